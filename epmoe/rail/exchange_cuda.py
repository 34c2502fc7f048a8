"""The exchange over several nodes of GPUs. The host runs ahead: it queues transfers and kernels, and waits for neither.

What goes wrong reaches the host through memory that it looks at in every call: the status words of the node's exchange,
the counts that the thread of the rail watches, and a word for calls of other nodes that do not match.
"""

from __future__ import annotations

import time
from contextlib import suppress
from ctypes import c_int64
from dataclasses import dataclass
from threading import Lock
from typing import Any, NoReturn

import torch
from torch import Tensor

from epmoe.exchange.health import OUT_OF_TURN, STATUS, EPMismatchError, EPOrderError, EPTimeoutError
from epmoe.exchange.waiting import interruptible
from epmoe.rail.exchange import RETURN_S, TwoLevels
from epmoe.rail.gloo import Transfer
from epmoe.rail.nccl import NcclRail

_CODE = STATUS.index("code")
_LATCHED = 8 // 4  # place of `latched` in `RoundState` of csrc/plan.h
_SLEEP_S = 50e-6
_PEEK_S = 0.2
_PEEKED = ("rail.missed", "rail.total.counters", "rail.total.rows_sent")


@dataclass(kw_only=True)
class TwoLevelsOnGPUs(TwoLevels):
    """A `TwoLevels` on a GPU."""

    rail: NcclRail

    def __post_init__(self) -> None:
        super().__post_init__()
        # The kernels write these into memory of the host.
        self.views["rail.total.needed"] = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.differing = torch.zeros(1, dtype=torch.int64).pin_memory()  # of `rail_tags`
        self.differing_word = c_int64.from_address(self.differing.data_ptr())
        latched = self.views["state"][_LATCHED : _LATCHED + 1]
        self.failed_on_device = self.views["rail.missed"], latched
        self.beside = torch.cuda.Stream(self.device, priority=-1)  # for `peek`
        self.peeked = {name: torch.zeros_like(self.views[name], device="cpu").pin_memory() for name in _PEEKED}
        self.last_stream: Any = None  # of the last round
        self.losing = Lock()
        missed = self.views["rail.missed"][self.inside.rank : self.inside.rank + 1]
        self.rail.watch(self, RETURN_S, latched, missed)

    def start(
        self,
        sent: Tensor,
        received: Tensor,
        sent_rows: list[int],
        received_rows: list[int],
        started: list[Transfer],
        returning: bool = False,
    ) -> None:
        """As `TwoLevels.start`. If a signal handler ends it, nobody knows what is queued: the exchange has failed."""
        try:
            super().start(sent, received, sent_rows, received_rows, started, returning)
        except EPTimeoutError:
            raise
        except BaseException:
            self.lose([self.rank])
            raise

    def wait(self, transfer: Transfer, later_s: float = 0.0) -> None:
        """Let the current stream wait for a transfer; the rail's thread has the deadline."""
        super().wait(transfer, later_s)
        self.last_stream = torch.cuda.current_stream(self.device)

    def wait_for_given_up(self) -> None:
        """Before a round: order it after the last one, whichever stream that was on, and after what was given up."""
        stream = torch.cuda.current_stream(self.device)
        if self.exact and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot hold this round, since the host reads counts in it: set "
                "`exchange.network_splits` to padded"
            )
        if self.pending and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot wait for a round that was given up before its capture: run a round outside of the "
                "graph first, on all ranks"
            )
        if self.last_stream not in (None, stream) and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self.last_stream)
        super().wait_for_given_up()

    def to_host(self, *tensors: Tensor) -> list[list[Any]]:
        """As `TwoLevels.to_host`, once the current stream has come so far. A failure or an abort ends the wait."""
        state = self.rounds.state
        copies = [torch.empty_like(tensor, device="cpu").pin_memory() for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.current_stream(self.device).record_event()
        while not arrived.query():
            self._look(state)
            time.sleep(_SLEEP_S)
        self._look(state)
        return [copy.tolist() for copy in copies]

    def peek(self, name: str) -> list[Any]:
        """As `TwoLevels.peek`, on a stream of its own: the current one may wait for a rank.

        The driver may hold the copy back while another thread is in a copy that waits for a rank. Then these are the
        values of the last time.
        """

        def copy() -> None:
            with torch.cuda.stream(self.beside):
                self.peeked[name].copy_(self.views[name], non_blocking=True)
                self.beside.synchronize()

        interruptible(copy, _PEEK_S)
        return self.peeked[name].tolist()

    def lose(self, found: list[int]) -> None:
        """As `TwoLevels.lose`, and end the transfers under way. Any thread may call it.

        The node hears of it after the end of the transfers, which the driver may have the store wait for: see `peek`.
        """
        with self.losing:
            missing: list[int] = []
            try:
                if self.failure is None and not self.status_words[_CODE]:
                    missing = self.rail.missing(found or self._reported())
                    self._record(missing, "over the network")
                elif self.failure is None:
                    with suppress(EPMismatchError, EPOrderError):  # `check` raises it
                        self._take_failure_of_node()
            finally:
                self.rail.abort(self.failure[2] if self.failure else [])
            if missing:
                self.warn_node(missing[0])

    def mismatch(self, ranks: list[int], on_rail: list[int], tags: tuple[int, int, int] | None) -> NoReturn:
        """As `TwoLevels.mismatch`, which every later call raises, too."""
        if ranks[0] // self.ranks_per_node in self.others:
            self.differing_word.value = self.others.index(ranks[0] // self.ranks_per_node) + 1
        super().mismatch(ranks, on_rail, tags)

    def check(self) -> None:
        """As `TwoLevels.check`. A mismatch is raised by every later call, too."""
        super().check()
        if number := self.differing_word.value:
            self.inside.leave()  # the other ranks of the node may have a rail without a mismatch
            rank = self.others[number - 1] * self.ranks_per_node + self.inside.rank
            raise EPMismatchError(self.rounds.count, [rank], True)

    def _take_failure_of_node(self) -> None:
        """As `TwoLevels._take_failure_of_node`. A stage that ran out of turn is this rank's own failure."""
        if self.status_words[_CODE] == OUT_OF_TURN:
            self.inside.check()
        super()._take_failure_of_node()

    def _look_at_node(self) -> None:
        """As `TwoLevels._look_at_node`, in memory of the host: no wait for a stream, which no graph could hold."""
        self.check()

    @property
    def failed(self) -> bool:
        """As `TwoLevels.failed`, or whether the calls of the nodes did not match."""
        return super().failed or self.differing_word.value != 0
