"""The network of a rank on a GPU. The host runs ahead: it queues transfers and kernels, and waits
for neither.

What goes wrong reaches the host through memory that it looks at in every call: the status words of
the node's exchange, the counts that the thread of the rail watches, and a word for calls of other
nodes that do not match and for sums that are zeros.
"""

from __future__ import annotations

from contextlib import suppress
from ctypes import c_int64
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from epmoe.exchange.peek import LONG_S
from epmoe.group.errors import EPMismatchError, EPOrderError, EPTimeoutError
from epmoe.group.waiting import interruptible
from epmoe.rail.memory import FailedWords
from epmoe.rail.network import Network
from epmoe.rail.rail import Transfer

_PEEKED = ("rail.missed", "rail.total.counters", "rail.total.rows_sent")


class NetworkOnGPUs(Network):
    """A `Network` on a GPU, with its arguments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._noticed = c_int64.from_address(self.views["rail.noticed"].data_ptr())
        self._peek = self.node.processor.peek(*map(self.views.__getitem__, _PEEKED))
        self._peeked = list[Tensor]()
        self._last_stream: Any = None  # of the last round
        self.failed_words = FailedWords(
            self.views["rail.missed"], self.node.latched, self.views["rail.noticed"]
        )
        self.rail.watch(WeakMethod(self.on_late), self.node.latched)

    def on_late(self) -> None:
        """A transfer has missed its deadline, or the node's exchange has failed; called on the
        rail's thread.
        """
        self.record_failure([])

    def start(self, transfer: Transfer) -> None:
        """Start a transfer. If a signal handler ends the call, nobody knows what is queued. Then
        the transfer has failed, once earlier ones have ended: the other nodes would get leftovers
        of these, too.
        """
        try:
            super().start(transfer)
        except EPTimeoutError:
            raise
        except BaseException:
            # Transfers that were queued before end first, unless this is within a capture.
            try:
                with suppress(RuntimeError):
                    self.node.processor.ends(LONG_S)
            finally:
                self.record_failure([self.rank])
            raise

    def wait(self, transfer: Transfer) -> None:
        super().wait(transfer)
        self._last_stream = torch.cuda.current_stream(self.device)

    def wait_for_pending(self) -> None:
        """Order a round after the last one, whichever stream that was on, and after
        aborted ones.
        """
        stream = torch.cuda.current_stream(self.device)
        capturing = torch.cuda.is_current_stream_capturing()
        if self.pending and capturing:
            raise RuntimeError(
                "a CUDA graph cannot wait for a round that was aborted before its capture: run a "
                "round outside of the graph first, on all ranks"
            )
        if self._last_stream not in (None, stream) and not capturing:
            stream.wait_stream(self._last_stream)
        super().wait_for_pending()

    def peek(self, name: str) -> list[Any]:
        """Read buffers now. The driver may hold the copy back while another thread is in a copy
        that waits for a rank. Then these are the values of the last time.
        """

        def copy() -> None:
            self._peeked = self._peek.read()

        # Where the GPU has failed, or while one captures, there is no copy either.
        with suppress(RuntimeError):
            interruptible(copy, LONG_S)
        if not self._peeked:
            return [0] * self.views[name].numel()
        return self._peeked[_PEEKED.index(name)].tolist()

    def record_failure(self, found: list[int]) -> None:
        """Record a failure, and end the transfers under way. Any thread may call it.

        The node gets the report after the end of the transfers: the driver may have the store wait
        for it, see `peek`.
        """
        with self.recording:
            missing: list[int] = []
            try:
                # The first failure counts, be it of the rail or of the node.
                if self.failure is None and not self.node.failed:
                    missing = self.rail.missing(found or self.reported())
                    self.keep_failure(missing, "over the network")
                elif self.failure is None:
                    # `check` raises what is no timeout.
                    with suppress(EPMismatchError, EPOrderError):
                        self.take_failure_of_node()
            finally:
                self.rail.abort()
            if missing:
                # As in `peek`, the GPU may have failed.
                with suppress(RuntimeError):
                    self.tell_node(missing[0])

    def note_mismatch(self, rank: int) -> None:
        """Every later call raises it, too, where the rank is one of another node."""
        node = rank // self.memory.ranks_per_node
        if node in self.memory.others:
            self._noticed.value = self.memory.others.index(node) + 1

    def check(self) -> None:
        # Read first: leftovers set it only once a failure is kept.
        number = self._noticed.value
        super().check()
        # Sums are zeros, although no wait of this rank has failed.
        if number < 0:
            self.fail([])
        # 1 + the index of the node whose call differs.
        if number:
            # The other ranks of the node may have a rail without a mismatch.
            self.node.end_waits()
            rank = self.memory.of_rail(self.memory.others[number - 1])
            raise EPMismatchError(self.rounds.count, [rank], latched=True)

    def look_at_node(self) -> None:
        """It looks at memory of the host only: no graph could hold a wait for a stream."""
        self.check()

    @property
    def failed(self) -> bool:
        """Also after calls of the nodes that did not match, and sums of zeros."""
        return super().failed or self._noticed.value != 0
