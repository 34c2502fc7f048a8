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

# The longest time for ranks to connect to one another at the start.
_CONNECT = timedelta(seconds=60)
# So many times a wait asks whether a transfer has ended before it first sleeps.
_SPINS = 200
# The first sleep of a wait. Each further one is twice as long, up to the longest.
_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 2e-3


def gloo_group(name: str, rank: int, size: int, connect: timedelta) -> Any:
    """Make a gloo group under a name that no other group has had. Collective over its ranks.

    `dist.new_group` would not do: it uses the name of a destroyed group again, and its ranks would
    then read the addresses of the old ranks in the store. The type of the result is Any, since
    torch declares few of the group's methods.
    """
    store = dist.PrefixStore(f"epmoe/{name}", _get_default_store())
    return dist.ProcessGroupGloo(store, rank, size, connect)


def connect_within(timeout_s: float | None) -> timedelta:
    """How long ranks may take to connect. `timeout_s` is the deadline of the whole opening, if it
    has one. Ranks get at most half of it, so that a rank that cannot connect can still report its
    error in time.
    """
    if timeout_s is None:
        return _CONNECT
    return min(_CONNECT, timedelta(seconds=timeout_s / 2))


class GlooRail:
    """A `Rail` that uses the all-to-all of gloo, in a process group of its own. The host waits for
    the transfers.
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
        """Start a transfer, and put its `Work` into `transfer.started`."""
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
        # Remember the transfer: `close` must not end the group while a transfer runs.
        self._under_way = [*filter(_is_under_way, self._under_way), transfer]
        try:
            # `extend` starts the transfer and records its `Work` in one call of C. So no signal
            # handler can raise between the two.
            transfer.started.extend(starmap(self._group.alltoall_base, [arguments]))
        except RuntimeError as error:
            raise RailError(str(error)) from error

    def wait(self, transfer: Transfer, look: Callable[[], None]) -> None:
        """Wait for a transfer by asking again and again whether it has ended, so that signal
        handlers of Python run meanwhile. The pauses between two questions become longer.
        """
        (work,) = transfer.started
        deadline = time.monotonic() + self._deadlines.wait_s(returning=transfer.returning)
        polls = 0
        sleep_s = _SLEEP_S
        while not work.is_completed():
            # Most transfers are short, so the first questions come without a pause.
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
        """Drop the group. A group with a transfer under way is kept until the process ends, because
        its destructor would wait for the deadline of the transfer.
        """
        self._ended = True
        # A reference that nobody gives back keeps the group alive.
        if any(map(_is_under_way, self._under_way)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._under_way.clear()
        # The attribute is gone already if a signal handler has ended an earlier call of `close`.
        vars(self).pop("_group", None)


def _is_under_way(transfer: Transfer) -> bool:
    """Whether a transfer was started and has not ended."""
    return not all(work.is_completed() for work in transfer.started)
