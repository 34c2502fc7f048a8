"""The rail between CPUs: all-to-all by gloo."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import starmap
from typing import Any, ClassVar
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions, _get_default_store

from epmoe.config.deadlines import NETWORK_SLACK_S, Deadlines
from epmoe.group.board import RollCall
from epmoe.rail.rail import RailError, Transfer

_CONNECT = timedelta(seconds=60)  # for ranks to reach one another at the start
_SPINS = 200  # looks at a transfer before the first sleep
_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 2e-3


def gloo_group(name: str, rank: int, size: int, connect: timedelta) -> Any:
    """A group of a name that no other group has had: `dist.new_group` gives the name of a destroyed
    one again, and with it the addresses that its ranks had. Collective over its ranks. torch
    declares few of the methods.
    """
    store = dist.PrefixStore(f"epmoe/{name}", _get_default_store())
    return dist.ProcessGroupGloo(store, rank, size, connect)


def connect_within(timeout_s: float | None) -> timedelta:
    """How long ranks may take to reach one another, if what they are part of has a deadline: half
    of it, so that a rank that fails can still report it in time.
    """
    if timeout_s is None:
        return _CONNECT
    return min(_CONNECT, timedelta(seconds=timeout_s / 2))


class GlooRail:
    """A `Rail` by all-to-all of torch.distributed, over a group of its own. The host waits for its
    transfers.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(
        self, roll_call: RollCall, deadlines: Deadlines, device: torch.device, connect: timedelta
    ) -> None:
        self._roll_call = roll_call
        self._deadlines = deadlines
        self._device = device
        self._ended = False
        name = f"{roll_call.name}/rail/{roll_call.ranks[0]}"
        ranks = roll_call.ranks
        self._group = gloo_group(name, ranks.index(roll_call.rank), len(ranks), connect)
        self._under_way: list[Transfer] = []

    def allocate(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def start(self, transfer: Transfer) -> None:
        """Start a transfer."""
        if self._ended:
            raise RailError("the rail is closed")
        # `dist.all_to_all_single` takes no deadline.
        timeout_s = self._deadlines.wait_s(returning=transfer.returning)
        options = AllToAllOptions()
        options.timeout = timedelta(seconds=timeout_s + NETWORK_SLACK_S)
        options.asyncOp = True
        arguments = (
            transfer.received,
            transfer.sent,
            transfer.received_rows,
            transfer.sent_rows,
            options,
        )
        # For `close`, which must not end the group under a transfer.
        self._under_way = [*filter(_is_under_way, self._under_way), transfer]
        try:
            # Both in one call of C, so that no signal handler comes between the start and its
            # record.
            transfer.started.extend(starmap(self._group.alltoall_base, [arguments]))
        except RuntimeError as error:
            raise RailError(str(error)) from error

    def wait(self, transfer: Transfer, look: Callable[[], None]) -> None:
        """Wait for a transfer by polling, so that signal handlers of Python run."""
        # It sleeps for longer and longer between two looks.
        (work,) = transfer.started
        deadline = time.monotonic() + self._deadlines.wait_s(returning=transfer.returning)
        polls = 0
        sleep_s = _SLEEP_S
        while not work.is_completed():
            # A transfer is short, so the first looks come without a pause.
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
            work.wait()
        except RuntimeError as error:
            raise RailError(str(error)) from error

    def watch(self, on_late: WeakMethod[Callable[[], None]], latched: Tensor) -> None:
        """There is nothing to do, since the host waits for every transfer."""

    def missing(self, found: Sequence[int]) -> list[int]:
        return self._roll_call.missing(found)

    def abort(self) -> None:
        """gloo cannot cancel a transfer: what is under way ends by its own deadline."""
        self._ended = True

    def close(self) -> None:
        """The end of a group with a transfer under way would wait for the deadline, so
        it lives on.
        """
        self._ended = True
        # One reference too many: the group lives until the process ends.
        if any(map(_is_under_way, self._under_way)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._under_way.clear()
        # It is gone already where a signal handler has ended an earlier call.
        vars(self).pop("_group", None)


def _is_under_way(transfer: Transfer) -> bool:
    return not all(work.is_completed() for work in transfer.started)
