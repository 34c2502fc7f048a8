"""Where the time of a run goes: at every moment, at most one stage is on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle


class StageClock:
    """Wall time of one rank by stage, waiting for other ranks included.

    A stage that starts inside another one pauses it. The stages' times therefore add up to the time
    of the run.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Measure what runs on `device`: a clock of a GPU waits for it wherever a stage starts or
        ends.
        """
        # Seconds by stage.
        self.seconds: dict[str, float] = {}
        # Seconds of `watch`, measured on their own.
        self.elapsed = 0.0
        self._device = torch.device(device)
        # Stages that have begun, the innermost last, and when it has gone on.
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the block as stage `name`."""
        self._start(name)
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Measure what happens in the block, above all calls of `model`.

        Stages are gather (FSDP collects weights), attention, route, experts and other layers. What
        happens outside of the model's forward pass is the stage loop.
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
        """Replace `stage` by its `parts`, in seconds; what they leave of it is added to the stage
        `rest`.
        """
        whole = self.seconds.pop(stage)
        self.seconds[rest] = self.seconds.get(rest, 0.0) + whole - sum(parts.values())
        self.seconds.update(parts)

    def now(self) -> float:
        """Seconds, once the device has done everything that was launched on it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _watch(self, model: nn.Module, name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        """Hooks that begin and end the stages of a module."""
        stage = stage_of(model, name)
        # FSDP's own hook, between these two, collects the module's weights.
        if isinstance(module, FSDPModule):
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


def stage_of(model: nn.Module, name: str) -> str | None:
    """The stage of a module of `model`, by the name that transformers gives to it; None: that of
    its parent.
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
