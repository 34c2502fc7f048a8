"""Measures how much time each stage of a run takes. At most one stage is running at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class StageClock:
    """Measures the wall time of each stage on one rank. Waiting for other ranks is included.

    A stage that starts inside another stage pauses the outer one. So the times of all stages add up
    to the time of the run.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Measure what runs on `device`. Wherever a stage starts or ends, the clock waits until a
        GPU has done its work.
        """
        # The seconds of each stage.
        self.seconds: dict[str, float] = {}
        # The seconds of `watch`, measured independently of the stages.
        self.elapsed = 0.0
        self._device = torch.device(device)
        # The stages that have started and not ended, the innermost last, and the time of the last
        # lap, since when the innermost one has been running.
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the block as the stage `name`."""
        self._start(name)
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Measure the block, in which `model` is called, stage by stage.

        The stages of a forward pass are "gather" (FSDP collects weights), "attention", "route",
        "experts" and "other layers". The time outside of forward passes belongs to the stage
        "loop".
        """
        hooks: list[RemovableHandle] = []
        for name, module in model.named_modules():
            hooks += self._watch(model, name, module)
        start = self.now()
        try:
            with self.stage("loop"):
                yield
        finally:
            self.elapsed = self.now() - start
            for hook in hooks:
                hook.remove()

    def divide(self, stage: str, parts: Mapping[str, float], rest: str) -> None:
        """Replace a stage by several parts of it, whose seconds `parts` gives. Time of the stage
        that is in none of the parts is added to the stage `rest`.
        """
        whole = self.seconds.pop(stage)
        self.seconds[rest] = self.seconds.get(rest, 0.0) + whole - sum(parts.values())
        self.seconds.update(parts)

    def now(self) -> float:
        """Wait until the device has done everything that was launched on it. Returns the time in
        seconds.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _watch(self, model: nn.Module, name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        """Register hooks on a module that start and end its stage. Yields the handles by which to
        remove the hooks.
        """
        stage = stage_of(model, name)
        # FSDP has a hook of its own, which collects the module's weights. These two enclose it.
        if _is_of_fsdp(module):
            yield module.register_forward_pre_hook(lambda *_: self._start("gather"), prepend=True)
            yield module.register_forward_pre_hook(lambda *_: self._stop())
        if stage:
            yield module.register_forward_pre_hook(lambda *_: self._start(stage))
            yield module.register_forward_hook(lambda *_: self._stop(), prepend=True)

    def _start(self, stage: str) -> None:
        self._lap()
        self._open.append(stage)

    def _stop(self) -> None:
        self._lap()
        self._open.pop()

    def _lap(self) -> None:
        """Add the time since the last lap to the innermost stage."""
        now = self.now()
        if self._open:
            stage = self._open[-1]
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


def _is_of_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module.

    To import torch's FSDP takes most of a second, in which a command does nothing else. Where it
    was not imported, there are no such modules.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def stage_of(model: nn.Module, name: str) -> str | None:
    """Find the stage of a module of `model` by the name that transformers gives to the module. None
    means that the module belongs to the stage of its parent.
    """
    parent, _, leaf = name.rpartition(".")
    if not name:
        return "other layers"
    if leaf == "experts":
        return "experts"
    if leaf in ("gate", "router") and hasattr(model.get_submodule(parent), "experts"):
        return "route"
    words = leaf.split("_")
    return "attention" if "attn" in words or "attention" in words else None
