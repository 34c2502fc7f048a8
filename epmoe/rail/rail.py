"""The interface of a rail. A rail takes slabs of rows from a rank to the ranks of the same local
index on the other nodes.

gloo.py has the rail of CPUs, whose transfers the host waits for. nccl.py has the rail of GPUs,
whose transfers streams wait for. A rail over another network is another class like `Rail`, with a
name in `RAILS` of opening.py; the setting `exchange.rail` chooses a rail by its name.
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
    """A transfer has failed, or has not ended in time. `Rail.missing` then finds the ranks that did
    not take part.
    """


@dataclass(eq=False, slots=True)
class Transfer:
    """Slabs that one rank sends to the other nodes, and receives from them, at the same time."""

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
    """empty until the transfer is started; then it holds what the rail waits for. The rail starts
    and records a transfer in one step, so this is right also after the exception of a signal
    handler.
    """


class Rail(Protocol):
    """A connection between ranks of the same local index, one on each node.

    `roll_call` says which ranks these are. `deadlines` are the deadlines of transfers. The slabs
    lie on `device`. The constructor raises RuntimeError if the ranks do not reach one another
    within the time `connect`.
    """

    devices: ClassVar[tuple[str, ...]]
    """types of the devices that the rail serves"""

    def __init__(
        self, roll_call: RollCall, deadlines: Deadlines, device: torch.device, connect: timedelta
    ) -> None: ...

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate zeros, uint8 [nbytes] on the device, into which slabs are received. The rail
        does it because a network may need memory of a special kind.
        """

    def start(self, transfer: Transfer) -> None:
        """Send slabs to the other nodes and receive theirs. Collective over the rail; waits for no
        rank.

        Raises RailError if the network refuses the transfer.
        """

    def wait(self, transfer: Transfer, look: Callable[[], None]) -> None:
        """Wait for a transfer that was started. On a CPU the host waits. On a GPU the current
        stream waits, and the host goes on.

        While the host waits, it calls `look` now and then; an exception of `look` ends the wait.
        Raises RailError if the transfer has failed, or has not ended before its deadline.
        """

    def watch(self, on_late: WeakMethod[Callable[[], None]], latched: Tensor) -> None:
        """Watch the transfers for which no host waits, on the GPU of `latched`.

        `on_late` is called once, on another thread, when such a transfer misses its deadline.
        `latched`, int32 [1], is not 0 once this rank has failed; from then on this rank sends zeros
        in place of partial rows. A transfer that `abort` has ended sets `latched` before the reader
        of the received rows goes on, since these rows may be incomplete.
        """

    def missing(self, found: Sequence[int]) -> list[int]:
        """Find out after a failure which ranks are missing, see `RollCall.missing`. `found` are
        the ranks that this rank knows to be missing. It takes `ANSWER_S` at most.
        """

    def abort(self) -> None:
        """End all transfers, because ranks are missing. No transfer can start afterwards. It waits
        for no rank.
        """

    def close(self) -> None:
        """Drop all transfers, and release what the network holds. Waits for no rank."""
