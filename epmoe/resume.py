"""How an `ExpertParallel` joins a group, and how it goes on in another one: without dead ranks, or with new ones.

All ranks of the new group run the same steps, whether they resume or are new: they say what they bring, check that it
fits, open new windows, and go on only once all of them have.
"""

from __future__ import annotations

import ctypes
import json
import os
import reprlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from types import ModuleType
from typing import Self
from weakref import WeakSet

import torch
import torch.distributed as dist

from epmoe.config.config import EPConfig
from epmoe.config.placement import Move, Placement
from epmoe.exchange import combine, dispatch
from epmoe.exchange import round_state as rounds
from epmoe.exchange.exchange import Exchange
from epmoe.exchange.handles import HoldsWindows
from epmoe.exchange.health import EPOpenError, EPResumeError, EPStateError
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.peers import LostRankError, Peers
from epmoe.exchange.waiting import device_ends
from epmoe.group import check_backend, check_shared_memory, check_size, device_of, group_of, open_window
from epmoe.native import ops
from epmoe.native.arguments import describe
from epmoe.rail import stages as two_levels
from epmoe.rail.exchange import TwoLevels
from epmoe.rail.exchange_cuda import TwoLevelsOnGPUs
from epmoe.rail.gloo import AskingRail

_NEW = -1
_MOST_TOLD = 8  # keys in an error
_ANSWER_S = 1.0  # how long ranks have to say that they live, once the group has failed


@dataclass(frozen=True)
class Hello:
    """What a rank says to the others when it joins a group.

    config: JSON, of the group to be; if the rank `keeps` the placement as far as it can, of the group so far.
    origin: the same on all ranks that were ever in one group.
    generation: how many groups the rank has had before the present one; `_NEW` if it has none yet.
    rank: in the group so far.
    attempt: rank 0's names this attempt to open a group, and what is connected in it.
    """

    config: str
    origin: str = field(default_factory=lambda: secrets.token_hex(8))
    generation: int = _NEW
    rank: int = _NEW
    keeps: bool = False
    attempt: str = field(default_factory=lambda: secrets.token_hex(8))


def agree(hellos: list[Hello], rank: int) -> tuple[str, int, list[int] | None]:
    """What the ranks of a group make of their hellos. All return alike, or all raise.

    Args:
        hellos: of all ranks, in rank order.
        rank: this one.

    Returns:
        Origin and generation of the group to be; and if the ranks keep the placement, their ranks in the group so far.

    Raises:
        ValueError: the hellos do not fit together.
    """
    known = [hello for hello in hellos if hello.generation != _NEW]
    if len({hello.origin for hello in known}) > 1:
        raise ValueError("the ranks resume different ExpertParallels: resume the same ones, in one order, on all ranks")
    newest = max(hello.generation for hello in hellos)
    former = [hello.rank for hello in hellos]
    keeps = any(hello.keeps for hello in hellos)
    if keeps and (any(hello.generation != newest for hello in hellos) or former != sorted(set(former))):
        raise ValueError("`placement` must be given where the group has new ranks, or its ranks another order")
    for key, what in (("keeps", "`placement`"), ("config", "config")):
        mine = getattr(hellos[rank], key)
        others = [other for other, hello in enumerate(hellos) if getattr(hello, key) != mine]
        if others:
            keys = _differing([hello.config for hello in hellos], rank, others) if key == "config" else ""
            raise ValueError(
                f"the {what} of rank {rank} differs from that of rank(s) {others}: it must be the same on all{keys}"
            )
    return (known or hellos)[0].origin, newest + 1, former if keeps else None


def _differing(configs: list[str], rank: int, others: list[int]) -> str:
    """The keys in which the configs of ranks differ, with the values: the end of a sentence. Words of other ranks."""
    mine, told = json.loads(configs[rank]), list[str]()
    for other in others:
        theirs = json.loads(configs[other])
        for section, keys in mine.items():
            for key, value in keys.items():
                got = theirs.get(section, {}).get(key)
                if got != value:
                    told.append(
                        f"`{section}.{key}` is {reprlib.repr(value)} here and {reprlib.repr(got)} on rank {other}"
                    )
    return f"; {', '.join(told[:_MOST_TOLD])}" if told else ""


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
    _origin: str
    _exchange: Exchange | None = None
    _dispatch_stage: ModuleType  # of one node, or of several; they offer the same calls
    _combine_stage: ModuleType
    _missing: int = 0  # ranks, as a mask
    _owner: int | None = None  # in a forked child: the process that this object belongs to

    def survivors(self) -> list[int]:
        """Ranks of the group that live and that nobody misses, as far as this rank has heard. It waits for no rank.

        Ranks on the machine of a process hear at once of its end. After an `EPTimeoutError` the ranks may hear of one
        another's findings in turn: ask again before each try to form a group. A rank that was only slow misses itself
        then, since the others have given it up.

        Returns:
            Ranks, numbered in the group, ascending; before `resume` has returned, of the group so far.
        """
        if self._exchange is not None:
            self._missing = self._exchange.missing() | self._exchange.dead()
        return [rank for rank in range(self.size) if not self._missing >> rank & 1]

    def resume(self, group: dist.ProcessGroup | None = None, placement: Placement | None = None) -> tuple[Move, ...]:
        """Go on in another group: after a failure without the dead ranks, or between any two rounds with more ranks.

        Collective over the new group: every rank resumes, or, if it is new, makes an `ExpertParallel(config, group)`
        with the `config.with_placement(placement)` of the others. The windows are new, and no process restarts. Layers
        that hold this object go on with it. `health` and the numbers of rounds begin again, and so does
        `exchange.tuning` after a `retune`. Earlier handles and their tensors must not be used any more. CUDA graphs
        must be captured again: a replay of an old one would write to freed memory.

        Args:
            group: as for the constructor, with any ranks of the group so far and any new ones, in any order.
            placement: the same on all ranks. By default each expert and copy stays on its rank, without the ranks that
                are gone; see `Placement.without`.

        Returns:
            The experts of this rank whose weights are not where `placement` has them: the caller moves or loads these.

        Raises:
            TypeError: an argument has another type.
            ValueError: on all ranks, if placement or config differ or do not fit the group, or if logical experts have
                no copy left, which the error names. Nothing has changed then, and the group is still good.
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
        config = self.config if placement is None else self.config.with_placement(placement)
        hello = Hello(config.model_dump_json(), self._origin, self.generation, self.rank, keeps=placement is None)
        old, ranks = self.placement, [self.rank if rank == peers.rank else None for rank in range(peers.size)]
        if self._exchange is not None:
            self._exchange.enter()
        try:
            if not device_ends(self.device, timeout_s):  # a kernel that still runs must not lose its windows
                raise TimeoutError("the GPU has not finished its work")
            self._join(peers, config, hello)
        except EPOpenError as error:
            raise EPResumeError(timeout_s, error) from None
        except (RuntimeError, OSError) as error:
            raise EPResumeError(timeout_s, error) from error
        finally:
            if self._exchange is not None:
                self._exchange.thread = 0
        return old.moves(self.placement, ranks)[self.rank]

    def close(self) -> None:
        """Release the windows and the group. Handles of earlier rounds, and their tensors, must not be used any more.

        With a round open, the waits of the other ranks end at once, with an EPTimeoutError that names this rank.
        `rank`, `size`, `survivors` and `resume` still work.
        """
        exchange, self._exchange = self._exchange, None
        self.group = None  # a group that outlives `destroy_process_group` may end the interpreter by SIGABRT
        if exchange is not None:
            self._missing = exchange.missing() | exchange.dead()  # for `survivors`
            if exchange.rounds.state != rounds.CLOSED:
                exchange.leave()
            exchange.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close. After an exception the waits of the other ranks end at once, also where no round is open here."""
        if kind is not None and self._exchange is not None:
            self._exchange.leave()
        self.close()

    @property
    def _open(self) -> Exchange:
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
        """In a forked child: forget the windows of the parent, and destroy nothing that the parent's threads use."""
        if self._owner is None:
            self._owner = os.getppid()
        for kept in (self._exchange, self.group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # until the process ends
        self._exchange = self.group = None

    def _join(self, peers: Peers, config: EPConfig, hello: Hello) -> None:
        """Become a rank of this group. Collective; where a step fails on one rank, all raise."""
        exchange: Exchange | None = None
        try:
            with _opening(peers):
                hellos = [Hello(*values) for values in peers.all_gather(astuple(hello))]
                origin, generation, former = agree(hellos, peers.rank)
                if former is not None:
                    gone = set(range(config.topology.ep_size)).difference(former)
                    config = config.with_placement(config.place_experts().without(gone))
                check_size(config, peers)
                device_of(config, self.device)
                placement = config.place_experts()
                _ = ops.dispatch  # builds or loads the library now, not in a round in which other ranks wait
                if self.device.type == "cuda":
                    ops.load_cuda()
                check_shared_memory(config, placement, self.device)
                peers.all_gather(None)  # all can: whoever resumes loses the old windows now
                self.close()  # both windows might not fit
                exchange = self._open_exchange(peers, config, placement, f"{origin}.{generation}.{hellos[0].attempt}")
        except BaseException:
            if exchange is not None:
                exchange.release()
            raise
        several_nodes = config.topology.num_nodes > 1
        self._dispatch_stage, self._combine_stage = (two_levels,) * 2 if several_nodes else (dispatch, combine)
        self.config, self.placement, self._origin, self.generation = config, placement, origin, generation
        self.group, self.rank, self.size = peers.group, peers.rank, peers.size
        self._exchange, self._missing = exchange, 0
        _live.add(self)

    def _open_exchange(self, peers: Peers, config: EPConfig, placement: Placement, name: str) -> Exchange:
        with torch.inference_mode(False):  # otherwise the buffers could not be written outside inference mode
            if config.topology.num_nodes > 1:
                levels = TwoLevelsOnGPUs if self.device.type == "cuda" else TwoLevels
                return levels.open(config, placement, peers, self.device, name)
            plan = MemoryPlan.build(config, peers.rank, placement, nvlink=self.device.type == "cuda")
            window = open_window(plan, peers, self.device)
            return Exchange.create(config, plan, placement, window, peers.rank, peers.global_ranks, self.device)


_live: WeakSet[Resumable] = WeakSet()


def _disown_all() -> None:
    for resumable in list(_live):
        resumable._disown()


os.register_at_fork(after_in_child=_disown_all)  # calls need not ask for the process, which would cost each of them


@contextmanager
def _opening(peers: Peers) -> Iterator[None]:
    """A step of `Peers.together`. Raises EPOpenError, which names the ranks, where some end or do not come."""
    check_backend(peers.group)
    try:
        with peers.together():
            yield
    except LostRankError as lost:
        assert peers.group is not None and peers.timeout_s is not None
        asking = AskingRail(list(range(peers.size)), peers.rank, peers.size, f"opening/{peers.group.group_name}")
        missing = asking.missing([], _ANSWER_S)
        raise EPOpenError(peers.timeout_s, missing, [peers.global_ranks[rank] for rank in missing]) from lost.__cause__
