"""How an `ExpertParallel` goes on in another group: without dead ranks, or with new ones."""

from __future__ import annotations

import ctypes
import os
from typing import Self
from weakref import WeakSet

import torch
import torch.distributed as dist

from epmoe.config.config import EPConfig
from epmoe.config.placement import Move, Placement
from epmoe.exchange.exchange import Exchange
from epmoe.exchange.handles import HoldsWindows
from epmoe.exchange.health import EPOpenError, EPResumeError, EPStateError
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.peers import Peers
from epmoe.exchange.round_state import CLOSED
from epmoe.exchange.waiting import device_ends
from epmoe.group import group_of
from epmoe.join import Hello, join
from epmoe.live.experts import LiveExperts
from epmoe.live.layout import EMPTY
from epmoe.live.slots import Table
from epmoe.native.arguments import describe


class Resumable(HoldsWindows):
    """The part of an `ExpertParallel` that belongs to one group: it can be taken to another."""

    config: EPConfig
    """Of the group."""
    device: torch.device
    """Of all tensors."""
    group: dist.ProcessGroup | None
    """None is this process alone, or that this object is closed."""
    rank: int
    """This rank in the group."""
    size: int
    """R"""
    placement: Placement
    """Of the experts on the ranks of the group."""
    generation: int
    """How many groups the ranks have had before this one: 0 until `resume`."""
    origin: str
    """Names this object on all ranks, old and new ones, through all its groups."""
    live: LiveExperts | None = None
    """The experts that move, with `placement.live`."""
    _exchange: Exchange | None = None
    _missing: int = 0  # ranks, as a mask
    _owner: int | None = None  # in a forked child: the process that this object belongs to

    def survivors(self) -> list[int]:
        """Ranks of the group that live and that nobody misses, as far as this rank knows. It waits for no rank.

        Ranks on the machine of a process see its end at once. After an `EPTimeoutError` the reports of other ranks may
        still arrive: ask again before each try to form a group. A rank that was only slow misses itself then, since the
        others have reported it.

        Returns:
            Ranks, numbered in the group, ascending; before `resume` has returned, of the group so far.
        """
        if self._exchange is not None:
            self._missing = self._exchange.missing() | self._exchange.dead()
        return [rank for rank in range(self.size) if not self._missing >> rank & 1]

    def resume(
        self,
        group: dist.ProcessGroup | None = None,
        placement: Placement | None = None,
        *,
        spread_lost: bool = False,
    ) -> tuple[Move, ...]:
        """Go on in another group: after a failure without the dead ranks, or between any two rounds with more ranks.

        Collective over the new group: every rank resumes, or, if it is new, makes an `ExpertParallel(config, group)`
        with the `config.with_placement(placement)` of the others. The windows are new, and no process restarts. Layers
        that hold this object go on with it. `health` and the numbers of rounds begin again, and so does
        `exchange.tuning` after a `retune`. Earlier handles and their tensors must not be used any more. CUDA graphs
        must be captured again: a replay of an old one would write to freed memory.

        Args:
            group: as for the constructor, with any ranks of the group so far and any new ones, in any order.
            placement: the same on all ranks. By default each expert and copy stays on its rank, without the ranks that
                are gone; see `Placement.without`. With `placement.live` ranks then keep their slots, new ranks have
                empty ones, and the only placement to give is `config.of_size(R).place_experts()`: slots begin again.
            spread_lost: the same on all ranks that resume. Without a placement, experts of which no copy is left go to
                the ranks with the fewest experts, and this rank's are among the moves. With `placement.live` the ranks
                get more slots, `num_local_experts`, where all experts would not fit otherwise.

        Returns:
            The experts of this rank whose weights are not where `placement` has them: the caller moves or loads these.

        Raises:
            TypeError: an argument has another type.
            ValueError: on all ranks, if placement or config differ or do not fit the group, or if logical experts have
                no copy left, without `spread_lost`; the error names them. Nothing has changed then, and the group is
                still good.
            RuntimeError: this process is a fork of the one that made this object.
            EPResumeError: a rank died or did not arrive within `exchange.warmup_timeout_s`. `resume` may be called
                again with another group; until then, this object may be closed.
            MemoryError: the windows do not fit. This object is closed, and `resume` may be called again.
        """
        if not isinstance(placement, Placement | None):
            raise TypeError(f"`placement` must be a Placement, got {describe(placement)}")
        if self._owner is not None:
            raise EPStateError(self._why_unusable())
        timeout_s = self.config.exchange.warmup_timeout_s
        peers = Peers.of(group_of(group), timeout_s)
        keeps, held = placement is None, None
        config = self.config if placement is None else self.config.with_placement(placement)
        if keeps and self.live is not None:
            config, held = self.config.of_size(peers.size), self.live.held.tolist()
        said = config.model_dump_json(), self.origin, self.generation, self.rank
        hello = Hello(*said, keeps=keeps, held=held, spread_lost=keeps and spread_lost)
        old, ranks = self.placement, [self.rank if rank == peers.rank else None for rank in range(peers.size)]
        if self._exchange is not None:
            self._exchange.enter()
        try:
            if not device_ends(self.device, timeout_s):  # a kernel that still runs must keep its windows
                raise TimeoutError("the GPU has not finished its work")
            self._join(peers, config, hello)
        except EPOpenError as error:
            raise EPResumeError(timeout_s, error) from None
        except (RuntimeError, OSError) as error:
            raise EPResumeError(timeout_s, error) from error
        finally:
            if self._exchange is not None:
                self._exchange.thread = 0
        if self.live is not None:
            return self._slots_to_load(held or [[] for _ in self.live.held])
        return old.moves(self.placement, ranks)[self.rank]

    def close(self) -> None:
        """Release the windows and the group. Handles of earlier rounds, and their tensors, must not be used any more.

        With a round open, the waits of the other ranks end at once, with an EPTimeoutError that names this rank.
        `rank`, `size`, `survivors` and `resume` still work.
        """
        exchange, self._exchange = self._exchange, None
        if self.live is not None:
            self.live.close()
        self.group = None  # a group that outlives `destroy_process_group` may end the interpreter by SIGABRT
        if exchange is not None:
            self._missing = exchange.missing() | exchange.dead()  # for `survivors`
            if exchange.rounds.state != CLOSED:
                exchange.end_waits()
            exchange.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close. After an exception the waits of the other ranks end at once, also where no round is open here."""
        if kind is not None and self._exchange is not None:
            self._exchange.end_waits()
        self.close()

    @property
    def exchange(self) -> Exchange:
        """What carries the rounds, for integrations of a host. Raises EPStateError once this object is closed."""
        if self._exchange is None:
            raise EPStateError(self._why_unusable())
        return self._exchange

    def _why_unusable(self) -> str:
        if self._owner is None:
            return "this ExpertParallel is closed"
        return (
            f"this ExpertParallel belongs to process {self._owner}, of which this process is a fork: each process "
            "makes its own"
        )

    def _disown(self) -> None:
        """In a forked child: drop the windows of the parent, and destroy nothing that the parent's threads use."""
        if self._owner is None:
            self._owner = os.getppid()
        for kept in (self._exchange, self.group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # until the process ends
        self._exchange = self.group = None

    def _slots_to_load(self, before: Table) -> tuple[Move, ...]:
        """The slots of this rank, with `placement.live`, that do not hold what they held `before`."""
        assert self.live is not None
        return tuple(
            Move(i, expert, None, tag)
            for tag, (experts, had) in enumerate(zip(self.live.held.tolist(), before, strict=True), 1)
            for i, expert in enumerate(experts)
            if expert not in (EMPTY, *had[i : i + 1])
        )

    def _join(self, peers: Peers, config: EPConfig, hello: Hello) -> None:
        """Become a rank of this group; see `join`."""
        joined = join(peers, config, hello, self.device, self.close)
        self.config, self.placement = joined.config, joined.placement
        self.origin, self.generation = joined.origin, joined.generation
        self.group, self.rank, self.size = peers.group, peers.rank, peers.size
        self._exchange, self._missing = joined.exchange, 0
        if self.config.placement.live:
            assert isinstance(joined.exchange, NodeExchange)
            weights = {} if self.live is None else self.live.weights
            self.live = LiveExperts(joined.config, joined.exchange, joined.slots, weights)
        _live.add(self)


_live: WeakSet[Resumable] = WeakSet()


def _disown_all() -> None:
    for resumable in list(_live):
        resumable._disown()


os.register_at_fork(after_in_child=_disown_all)  # calls need not ask for the process, which would cost each of them
