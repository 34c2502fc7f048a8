"""The rail between CPUs: all-to-all by gloo."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import starmap
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist
from torch.distributed.distributed_c10d import AllToAllOptions, _get_default_store

from epmoe.config.deadlines import NETWORK_SLACK_S, Deadlines
from epmoe.rail.rail import DeviceWords, Load, RailError, Transfer
from epmoe.rail.roll_call import RollCall

_CONNECT = timedelta(seconds=60)  # for ranks to reach one another at the start
_SPINS = 200  # looks at a transfer before the first sleep
_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 2e-3


def gloo_group(name: str, rank: int, size: int, connect: timedelta) -> Any:
    """A group of a name that no other group has had: `dist.new_group` gives the name of a destroyed one again, and with
    it the addresses that its ranks had. Collective over its ranks. torch declares few of the methods."""
    return dist.ProcessGroupGloo(dist.PrefixStore(f"epmoe/{name}", _get_default_store()), rank, size, connect)


def connect_within(timeout_s: float | None) -> timedelta:
    """How long ranks may take to reach one another, if what they are part of has a deadline: half of it, so that a rank
    that fails can still report it in time."""
    return _CONNECT if timeout_s is None else min(_CONNECT, timedelta(seconds=timeout_s / 2))


class GlooRail:
    """A `Rail` by all-to-all of torch.distributed, over a group of its own. The host waits for its transfers.

    Args:
        roll: the ranks of this rail.
        deadlines: of its transfers.
        connect: how long ranks may take to reach one another.
    """

    def __init__(self, roll: RollCall, deadlines: Deadlines, connect: timedelta) -> None:
        self._roll, self._deadlines, self._ended = roll, deadlines, False
        name, ranks = f"{roll.name}/rail/{roll.ranks[0]}", roll.ranks
        self._group = gloo_group(name, ranks.index(roll.rank), len(ranks), connect)
        self._under_way: list[list[Transfer]] = []  # as `start` was given them

    def start(self, load: Load, started: list[Transfer]) -> None:
        if self._ended:
            raise RailError("the rail is closed")
        timeout_s = self._deadlines.of(load.returning)
        options = AllToAllOptions()  # `dist.all_to_all_single` takes no deadline
        options.timeout, options.asyncOp = timedelta(seconds=timeout_s + NETWORK_SLACK_S), True
        arguments = load.received, load.sent, load.received_rows, load.sent_rows, options
        under_way = (other for other in self._under_way if not all(one.is_completed() for one in other))
        self._under_way = [*under_way, started]
        try:
            # Both in one call of C, so that no signal handler comes between the start and its record.
            started.extend(starmap(self._group.alltoall_base, [arguments]))
        except RuntimeError as error:
            raise RailError(str(error)) from error

    def wait(self, transfer: Transfer, look: Callable[[], None], returning: bool = False) -> None:
        """It polls, so that signal handlers of Python run."""
        deadline = time.monotonic() + self._deadlines.of(returning)
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

    def watch(self, on_late: WeakMethod[Callable[[], None]], words: DeviceWords) -> None:
        """There is nothing to do, since the host waits for every transfer."""

    def missing(self, found: Sequence[int]) -> list[int]:
        return self._roll.missing(found)

    def abort(self, missing: Sequence[int]) -> None:
        """gloo cannot cancel a transfer: what is under way ends by its own deadline."""
        self._ended = True

    def close(self) -> None:
        """The end of a group with a transfer under way would wait for the deadline, so it lives on."""
        self._ended = True
        if not all(transfer.is_completed() for started in self._under_way for transfer in started):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # until the process ends
        self._under_way.clear()
        del self._group
