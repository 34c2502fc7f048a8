"""What every host framework needs around `ExpertParallel`: one for all layers that can share it.

    shapes, settings ─ make_config ─▶ EPConfig ─ Session.share ─▶ one ExpertParallel for a group and these shapes

Layers number themselves by `ExpertParallel.new_tag`, in the order in which the framework makes or first calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from epmoe.config.config import EPConfig
from epmoe.exchange import more_rounds, round_state
from epmoe.exchange.health import Health
from epmoe.native.arguments import dtype_name
from epmoe.rail.exchange import TwoLevels
from epmoe.service import ExpertParallel


def make_config(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    dtype: torch.dtype,
    ep_size: int,
    sections: dict[str, dict[str, Any]],
    from_environment: bool = False,
) -> EPConfig:
    """The configuration of layers with these shapes.

    Args:
        num_experts: physical experts where the framework makes copies itself, otherwise logical experts.
        top_k: experts per token.
        hidden_size: D.
        dtype: of rows.
        ep_size: ranks.
        sections: further keys of `EPConfig`, by section.
        from_environment: whether variables `EPMOE_<SECTION>__<KEY>` override keys.

    Raises:
        ConfigError: a key or its value is wrong; the message names the key.
    """
    model = {"num_experts": num_experts, "num_experts_per_tok": top_k, "hidden_size": hidden_size}
    values = sections | {
        "model": model | {"dtype": dtype_name(dtype)},
        "topology": {"ep_size": ep_size} | sections.get("topology", {}),
    }
    return EPConfig.overridden(values) if from_environment else EPConfig(**values)


class Shared(Protocol):
    """What layers of the same shapes share: an `ExpertParallel`, or an object around one or several of them."""

    def poll(self) -> None:
        """`ExpertParallel.poll`."""

    def close(self) -> None:
        """`ExpertParallel.close`."""


Entry = TypeVar("Entry", bound=Shared)


class Session(Generic[Entry]):
    """What the layers of one host framework share in this process, by group, device and shapes."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, Entry] = {}

    def share(
        self, shapes: Hashable, group: dist.ProcessGroup | None, device: torch.device, make: Callable[[int], Entry]
    ) -> Entry:
        """The entry of this group and these shapes. The first call makes it and is collective.

        Args:
            shapes: all that layers must have in common to share an entry.
            group: the world by default; groups of the same ranks are one.
            device: of all tensors.
            make: takes the number of ranks.

        Raises:
            RuntimeError: the first call is captured into a CUDA graph.
        """
        ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)
        key = (shapes, ranks, device)
        if key not in self._entries:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("call the model once before the capture: the first call makes the windows")
            self._entries[key] = make(len(ranks))
        return self._entries[key]

    def entries(self) -> tuple[Entry, ...]:
        """Every entry, oldest first."""
        return tuple(self._entries.values())

    def poll(self) -> None:
        """Raise what kernels have reported so far. It never waits."""
        for entry in self.entries():
            entry.poll()

    def close(self) -> None:
        """Release every entry; later calls of `share` make new ones."""
        while self._entries:
            self._entries.popitem()[1].close()


class Rounds:
    """What integrations need of the exchange inside of an `ExpertParallel`, beyond the public calls.

    A rank tells the others in a round of dispatch whether it has more rounds. All ranks tell it, or none.

    Args:
        ep: must be open wherever a method is called.
    """

    def __init__(self, ep: ExpertParallel) -> None:
        self._ep = ep

    @property
    def count(self) -> int:
        """Rounds that this rank has opened so far."""
        return self._ep._open.rounds.count

    @property
    def failed(self) -> bool:
        """Whether no further round is possible."""
        return self._ep._open.failed

    def opened_after(self, count: int) -> bool:
        """Whether there is a round after the first `count` ones, and this thread has opened the last round."""
        return round_state.opened_after(self._ep._open, count) > 0

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Within it the caller runs a round. An exception aborts the round, if the caller has opened it."""
        exchange = self._ep._open
        count = exchange.rounds.count
        try:
            yield
        except BaseException:
            round_state.abort_after(exchange, count)
            raise

    def telling(self, has_more: bool | None) -> AbstractContextManager[None]:
        """Within it the caller dispatches once, and tells whether this rank has more rounds; None: it tells nothing."""
        return nullcontext() if has_more is None else more_rounds.asking(self._ep._open, has_more)

    def has_more_rounds(self) -> bool:
        """Whether any rank has more rounds after the last one, in which all ranks told it. Raises what waits raise."""
        return more_rounds.another(self._ep._open)

    def largest(self, number: int) -> Callable[[], int] | None:
        """`TwoLevels.largest` over several nodes, None on one node."""
        exchange = self._ep._open
        return exchange.largest(number) if isinstance(exchange, TwoLevels) else None


def health_now(ep: ExpertParallel) -> Health | None:
    """`ep.health(wait=False)`, on any thread; None if `ep` is closed."""
    exchange = ep._exchange
    return None if exchange is None else exchange.health(wait=False)
