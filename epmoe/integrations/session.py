"""One `ExpertParallel` for all layers of a host framework that can share it.

    shapes, settings ─ make_config ─▶ EPConfig ─ Session.share ─▶ ExpertParallel

There is one `ExpertParallel` for a group and these shapes.

Layers number themselves by `ExpertParallel.new_tag`, in the order in which the framework makes or
first calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from epmoe.config.config import ConfigError, EPConfig
from epmoe.native.arguments import dtype_name

TRAINING_DEADLINES: dict[str, Any] = {"warmup_timeout_s": 1800.0, "timeout_s": 600.0}
"""As long as a collective of NCCL waits. A rank may write a checkpoint meanwhile, or compile in its
first step.
"""


def make_config(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    dtype: torch.dtype,
    ep_size: int,
    sections: dict[str, dict[str, Any]],
    from_environment: bool = False,
) -> EPConfig:
    """Make the configuration of layers with these shapes, by sections of `EPConfig`. Raises
    ConfigError, which names the key.

    `num_experts` are physical experts where the framework makes copies itself, otherwise logical
    experts. `from_environment`: variables `EPMOE_<SECTION>__<KEY>` override keys.
    """
    model = {
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "hidden_size": hidden_size,
        "dtype": dtype_name(dtype),
    }
    topology = {"ep_size": ep_size} | sections.get("topology", {})
    values = sections | {"model": model, "topology": topology}
    config = EPConfig.overridden(values) if from_environment else EPConfig(**values)
    if config.topology.max_ranks is not None:
        raise ConfigError(
            "`topology.max_ranks` must be unset: the framework fixes the number of ranks"
        )
    return config


class Shared(Protocol):
    """An `ExpertParallel`, or an object around one or several of them."""

    def poll(self) -> None: ...

    def close(self) -> None: ...


Entry = TypeVar("Entry", bound=Shared)


class Session(Generic[Entry]):
    """The entries of one host framework in this process, by group, device and shapes."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, Entry] = {}

    def share(
        self,
        shapes: Hashable,
        group: dist.ProcessGroup | None,
        device: torch.device,
        make: Callable[[int], Entry],
    ) -> Entry:
        """Find the entry of this group and these shapes. The first call makes it and is collective.

        `shapes` are all that layers must have in common. `group` is the world by default; groups of
        the same ranks are one. `make` takes the number of ranks. Raises RuntimeError if the first
        call is captured into a CUDA graph.
        """
        # Layers with these in common share an entry.
        ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)
        key = (shapes, ranks, device)
        if key not in self._entries:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "call the model once before the capture: the first call makes the windows"
                )
            # Frameworks make models under another default device.
            with torch.device("cpu"):
                self._entries[key] = make(len(ranks))
        return self._entries[key]

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    def poll(self) -> None:
        """Raise what kernels have reported so far. It never waits."""
        for entry in self.entries():
            entry.poll()

    def release(self, entry: Entry) -> None:
        """Release one entry: a later call of `share` makes a new one."""
        self._entries = {key: kept for key, kept in self._entries.items() if kept is not entry}
        entry.close()

    def close(self) -> None:
        """Release every entry; later calls of `share` make new ones."""
        while self._entries:
            self._entries.popitem()[1].close()
