"""The rail: how slabs of rows reach the ranks of one local index on the other nodes.

A rail starts a transfer, waits for it with a deadline, and can be closed meanwhile. How bytes travel is its own affair:
another network is another class like `Rail`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import starmap
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions, _get_default_store

from epmoe.exchange.waiting import interruptible

CONNECT = timedelta(seconds=60)  # for ranks to reach one another at the start
ANSWER_S = 0.4  # how long ranks have to say that they live, once a transfer has failed
_SEND_S = 0.1  # to write a word into the store, where it can be reached
_SPINS = 200  # looks at a transfer before the first sleep
_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 2e-3
_SLACK_S = 2.0  # the network's own deadline comes after ours, so that ours words the error


class RailError(RuntimeError):
    """A transfer failed or did not end in time: `Rail.missing` says which ranks did not take part."""


class Transfer(Protocol):
    """Slabs on their way: a `Work` of torch.distributed."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""

    def wait(self) -> object:
        """Raise RuntimeError if it has failed."""


class Rail(Protocol):
    """The ranks of one local index, one on each node."""

    def start(
        self,
        sent: Tensor,
        received: Tensor,
        sent_rows: Sequence[int],
        received_rows: Sequence[int],
        timeout_s: float,
        started: list[Transfer],
        returning: bool = False,
    ) -> None:
        """Send slabs to the other nodes and receive theirs. Collective over the rail; waits for no rank.

        Args:
            sent: contiguous [n, …], the slabs to the other nodes behind one another, in the order of the nodes.
            received: likewise, the slabs from them.
            sent_rows: [N], the length of the slab to each node; 0 for the own node.
            received_rows: [N], the length of the slab from each node; 0 for the own node.
            timeout_s: after which the transfer fails, in seconds.
            started: gets the transfer, for `wait`, once it is started.
            returning: partial rows travel, which go back to the nodes of their tokens.

        Raises:
            RailError: the network refuses the transfer.
        """

    def wait(self, transfer: Transfer, deadline: float, look: Callable[[], None]) -> None:
        """Wait for a transfer.

        Args:
            transfer: from `start`.
            deadline: of `time.monotonic`.
            look: called now and then. What it raises ends the wait.

        Raises:
            RailError: it failed, or did not end in time.
        """

    def missing(self, found: Sequence[int]) -> list[int]:
        """After a failure: who is missing. It takes `ANSWER_S` at most.

        Args:
            found: ranks of the group that this rank knows to be missing. Its rail hears of them.

        Returns:
            Ranks of the group, at least one.
        """

    def close(self) -> None:
        """Give up all transfers, and release what the network holds. Waits for no rank."""


def gloo_group(name: str, rank: int, size: int, connect: timedelta = CONNECT) -> Any:
    """A group of a name that no other group has had: `dist.new_group` gives the name of a destroyed one again, and with
    it the addresses that its ranks had. Collective over its ranks. torch declares few of the methods."""
    return dist.ProcessGroupGloo(dist.PrefixStore(f"epmoe/{name}", _get_default_store()), rank, size, connect)


def connect_within(timeout_s: float | None) -> timedelta:
    """How long ranks may take to reach one another, if what they are part of has a deadline: half of it, so that a rank
    that fails still comes in time to say so."""
    return CONNECT if timeout_s is None else min(CONNECT, timedelta(seconds=timeout_s / 2))


def no_answer(missing: list[int], global_ranks: list[int], ranks_per_node: int, where: str, rank: int) -> str:
    """The end of the sentence of an EPTimeoutError that names missing ranks of several nodes to `rank`."""
    places = ", ".join(str(divmod(one, ranks_per_node)) for one in missing)
    why = (
        f"got no answer {where} from rank(s) {missing} of the group, (node, local) {places}, "
        f"global rank(s) {global_ranks}: they ended, left the group, or were slower than exchange.timeout_s"
    )
    return f"{why}. This rank came too late" if rank in missing else why


class AskingRail:
    """What rails have in common: the ranks say through the store of torch.distributed who is missing.

    Args:
        ranks: of the whole group, one on each node: this rail.
        rank: this one.
        size: of the whole group.
        name: the same on all ranks of the group, and of no other group.
    """

    def __init__(self, ranks: list[int], rank: int, size: int, name: str):
        self._ranks, self._rank, self._size, self._name = ranks, rank, size, name

    def missing(self, found: Sequence[int], answer_s: float = ANSWER_S) -> list[int]:
        """As `Rail.missing`: every rank that gives up says so in the store; a rank silent for `answer_s` is missing.

        Where the store cannot be reached either, all other ranks of the rail are missing.
        """
        others = [rank for rank in self._ranks if rank != self._rank]
        heard: dict[int, set[int]] = {}
        store: dist.Store | None = None
        with suppress(RuntimeError, ValueError):  # ValueError: the default group is destroyed
            store = dist.PrefixStore(f"epmoe/{self._name}/missing", _get_default_store())
            interruptible(partial(self._ask, store, found, others, heard, answer_s), answer_s)
        heard = dict(heard)  # the thread may still be at it
        named, silent = set().union(*heard.values()), set(others) - set(heard)
        result = sorted(set(found) or named or silent or others)
        if store is not None:  # for ranks that come too late
            with suppress(RuntimeError):
                interruptible(partial(store.set, str(self._rank), ",".join(map(str, result))), _SEND_S)
        return result

    def _ask(
        self, store: dist.Store, found: Sequence[int], others: list[int], heard: dict[int, set[int]], answer_s: float
    ) -> None:
        """Say what this rank has found, and fill `heard` with what the others have. It may never end."""
        store.set(str(self._rank), ",".join(map(str, found)))
        give_up = time.monotonic() + answer_s
        while len(heard) < len(others) and not found and time.monotonic() < give_up:
            for rank in others:
                if rank not in heard and store.check([str(rank)]):
                    heard[rank] = _ranks_in(store.get(str(rank)), self._size)
            time.sleep(0.02)


def _ranks_in(text: bytes, size: int) -> set[int]:
    """The ranks of a group of `size` in a list from the store. Other words in it do not count."""
    words = [word for word in text.split(b",") if word.isdigit() and len(word) < 10]
    return {rank for rank in map(int, words) if rank < size}


class CollectiveRail(AskingRail):
    """A `Rail` by all-to-all of torch.distributed, over a group of its own.

    Takes the arguments of `AskingRail`, and how long ranks may take to reach one another.
    """

    def __init__(self, ranks: list[int], rank: int, size: int, name: str, connect: timedelta = CONNECT):
        super().__init__(ranks, rank, size, name)
        self._group = gloo_group(f"{name}/rail/{ranks[0]}", ranks.index(rank), len(ranks), connect)
        self._under_way: list[list[Transfer]] = []  # as `start` was given them

    def start(
        self,
        sent: Tensor,
        received: Tensor,
        sent_rows: Sequence[int],
        received_rows: Sequence[int],
        timeout_s: float,
        started: list[Transfer],
        returning: bool = False,
    ) -> None:
        """As `Rail.start`."""
        options = AllToAllOptions()  # `dist.all_to_all_single` takes no deadline
        options.timeout, options.asyncOp = timedelta(seconds=timeout_s + _SLACK_S), True
        arguments = received, sent, list(received_rows), list(sent_rows), options
        under_way = (other for other in self._under_way if not all(one.is_completed() for one in other))
        self._under_way = [*under_way, started]
        try:
            # Both in one call of C, so that no signal handler comes between the start and its record.
            started.extend(starmap(self._group.alltoall_base, [arguments]))
        except RuntimeError as error:
            raise RailError(str(error)) from error

    def wait(self, transfer: Transfer, deadline: float, look: Callable[[], None]) -> None:
        """As `Rail.wait`. It polls, so that signal handlers of Python run."""
        polls, sleep_s = 0, _SLEEP_S
        while not transfer.is_completed():
            polls += 1
            if polls < _SPINS:
                time.sleep(0)
                continue
            look()
            if time.monotonic() > deadline:
                raise RailError("the transfer did not end in time")
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        try:
            transfer.wait()
        except RuntimeError as error:
            raise RailError(str(error)) from error

    def close(self) -> None:
        """As `Rail.close`. gloo cannot cancel a transfer: the end of its group would wait for the deadline."""
        if not all(transfer.is_completed() for started in self._under_way for transfer in started):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # until the process ends
        self._under_way.clear()
        del self._group
