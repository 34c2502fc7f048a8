"""The rail: how slabs of rows reach the ranks of one local index on the other nodes.

Another network is another class like `Rail`, with its name in `RAILS` of opening.py;
`exchange.rail` chooses it. gloo.py has the rail of CPUs, for which the host waits. nccl.py has that
of GPUs, for which streams wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Protocol
from weakref import WeakMethod

import torch
from torch import Tensor

from epmoe.config.deadlines import Deadlines
from epmoe.group.board import RollCall


class RailError(RuntimeError):
    """A transfer failed or did not end in time: `Rail.missing` returns the ranks that did not take
    part.
    """


@dataclass(eq=False, slots=True)
class Transfer:
    """Slabs that travel together, to and from other nodes."""

    sent: Tensor
    """contiguous [n, …], the slabs to the other nodes behind one another, in the order
    of the nodes
    """
    received: Tensor
    """the slabs from the other nodes, in the same order, in memory of `Rail.allocate`"""
    sent_rows: list[int]
    """[N], the length of the slab to each node; 0 for the own node"""
    received_rows: list[int]
    """[N], the length of the slab from each node; 0 for the own node"""
    returning: bool = False
    """whether partial rows travel, which go back to the nodes of their tokens"""
    started: list[Any] = field(default_factory=list)
    """gets what the rail waits for, once it is started, so it is right after any interrupt"""


class Rail(Protocol):
    """The ranks of one local index, one on each node: those of `roll_call`.

    `deadlines` are those of transfers, whose slabs lie on `device`. The constructor raises
    RuntimeError where the ranks do not reach one another within `connect`.
    """

    devices: ClassVar[tuple[str, ...]]
    """types of the devices that the rail serves"""

    def __init__(
        self, roll_call: RollCall, deadlines: Deadlines, device: torch.device, connect: timedelta
    ) -> None: ...

    def allocate(self, nbytes: int) -> Tensor:
        """Zeros, uint8 [nbytes] on the device, for what is received: a network may need memory of
        its own.
        """

    def start(self, transfer: Transfer) -> None:
        """Send slabs to the other nodes and receive theirs. Collective over the rail; waits for no
        rank.

        Raises RailError if the network refuses the transfer.
        """

    def wait(self, transfer: Transfer, look: Callable[[], None]) -> None:
        """Let the reader of a started transfer wait for it: the host, or the current stream of a
        GPU, where the host goes on.

        While the host waits, it calls `look` now and then; what that raises ends the wait. Raises
        RailError where the transfer failed, or did not end before its deadline.
        """

    def watch(self, on_late: WeakMethod[Callable[[], None]], latched: Tensor) -> None:
        """Look after the transfers for which no host waits, on the GPU of `latched`.

        `on_late` is called once, on another thread, when such a transfer misses its deadline.
        `latched`, int32 [1], is not 0 once this rank has failed: it sends no partial rows any more.
        A transfer that `abort` has ended sets it before its reader goes on, since what was received
        may be leftovers.
        """

    def missing(self, found: Sequence[int]) -> list[int]:
        """After a failure: who is missing; see `RollCall.missing`. It takes `ANSWER_S` at most."""

    def abort(self) -> None:
        """End all transfers, because ranks are missing. No transfer starts any more.

        Waits for no rank.
        """

    def close(self) -> None:
        """Drop all transfers, and release what the network holds. Waits for no rank."""
