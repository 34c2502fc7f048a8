"""Shares one `ExpertParallel` between all layers of a host framework that can use the same one.

    shapes, settings ─ make_config ─▶ EPConfig ─ Session.share ─▶ ExpertParallel

Layers share an `ExpertParallel` if they have the same shapes, group and device. Each layer takes a
tag of its own by `ExpertParallel.new_tag`, in the order in which the framework makes the layers or
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
"""Deadlines of rounds in training, in seconds. They are as long as a collective of NCCL waits,
because a rank may write a checkpoint while the others wait, or compile in its first step.
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
    """Make the configuration of layers with these shapes.

    `sections` has further keys of `EPConfig`, by section. `num_experts` counts physical experts
    where the framework makes copies of experts itself, otherwise logical experts. With
    `from_environment`, environment variables `EPMOE_<SECTION>__<KEY>` override all keys. Raises
    ConfigError, which names the wrong key.
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
    """Everything that the layers of one host framework share in this process.

    An entry is an `ExpertParallel` or an object around one. Entries are found by group, device and
    shapes.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, Entry] = {}

    def share(
        self,
        shapes: Hashable,
        group: dist.ProcessGroup | None,
        device: torch.device,
        make: Callable[[int], Entry],
    ) -> Entry:
        """Find the entry of this group, device and these shapes. The first call makes the entry by
        `make` and is collective.

        `shapes` holds everything that layers must have in common to share an entry. `group` is the
        world by default, and two groups of the same ranks count as one. `make` gets the number of
        ranks. Raises RuntimeError if the first call is captured into a CUDA graph.
        """
        # Layers whose keys are equal share an entry. Without torch.distributed there is one rank.
        ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)
        key = (shapes, ranks, device)
        if key not in self._entries:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "call the model once before the capture: the first call makes the windows"
                )
            # Frameworks make models with a GPU or "meta" as the default device. What `make`
            # creates without naming a device belongs to the CPU.
            with torch.device("cpu"):
                self._entries[key] = make(len(ranks))
        return self._entries[key]

    def entries(self) -> tuple[Entry, ...]:
        """All entries, the oldest first."""
        """All entries, the oldest first."""
        return tuple(self._entries.values())

    def poll(self) -> None:
        """Raise what kernels have reported so far. It never waits."""
        for entry in self.entries():
            entry.poll()

    def release(self, entry: Entry) -> None:
        """Release one entry: a later call of `share` makes a new one. May be called again, as after
        an exception of a signal handler.
        """
        # A collection of garbage may call this in the middle of another call.
        for key, kept in self._entries.copy().items():
            if kept is entry:
                self._entries.pop(key, None)
        entry.close()

    def close(self) -> None:
        """Release every entry; later calls of `share` make new ones. After an exception of a signal
        handler the next call goes on.
        """
        # An entry stays until it is closed.
        for key, entry in self._entries.copy().items():
            entry.close()
            self._entries.pop(key, None)
