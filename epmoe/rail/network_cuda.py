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
        # The stream of the last round; None before the first.
        self._last_stream: Any = None
        self.failed_words = FailedWords(
            missed=self.views["rail.missed"],
            latched=self.node.latched,
            noticed=self.views["rail.noticed"],
        )
        self.rail.watch(WeakMethod(self.on_late), self.node.latched)

    def on_late(self) -> None:
        """Record a failure. A thread of the rail calls this method when a transfer has missed its
        deadline, or when the exchange inside the node has failed.
        """
        self.record_failure([])

    def start(self, transfer: Transfer) -> None:
        """Start a transfer, unless it was started before.

        If a signal handler ends the call, this rank does not know what it has queued on the GPU. So
        it records a failure. It first lets earlier transfers end: the failure would cut them, too,
        and the other nodes would get incomplete rows of rounds that are in order.
        """
        try:
            super().start(transfer)
        except EPTimeoutError:
            raise
        except BaseException:
            # Wait for the transfers that were queued before. Within the capture of a graph this
            # raises RuntimeError, and there is nothing to wait for.
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
        """Make the current stream wait for the last round, which may have run on another stream,
        and for the transfers of aborted rounds.
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
        """Read the present values of a buffer that is in `_PEEKED`.

        While another thread is in a copy that waits for a rank, the driver may hold this copy back.
        The method then returns the values of its last successful copy, or zeros.
        """

        def copy() -> None:
            self._peeked = self._peek.read()

        # The copy raises RuntimeError where the GPU has failed, and during the capture of a graph.
        with suppress(RuntimeError):
            interruptible(copy, LONG_S)
        if not self._peeked:
            return [0] * self.views[name].numel()
        return self._peeked[_PEEKED.index(name)].tolist()

    def record_failure(self, found: list[int]) -> None:
        """Record a failure, and end the transfers that are under way. Any thread may call it.

        `found` are the ranks that are known to be missing. The ranks of the node are told after the
        transfers have ended: the driver may hold the store of the report back until then, see
        `peek`.
        """
        with self.recording:
            missing: list[int] = []
            try:
                # Keep only the first failure, whether the rail or the node has it.
                if self.failure is None and not self.node.failed:
                    missing = self.rail.missing(found or self.reported())
                    self.keep_failure(missing, "over the network")
                elif self.failure is None:
                    # Leave an error that is no timeout to `check`, which raises it.
                    with suppress(EPMismatchError, EPOrderError):
                        self.take_failure_of_node()
            finally:
                self.rail.abort()
            if missing:
                # Storing the report raises RuntimeError where the GPU has failed.
                with suppress(RuntimeError):
                    self.tell_node(missing[0])

    def note_mismatch(self, rank: int) -> None:
        """Note that the call of `rank` differs, so that every later call raises EPMismatchError.

        Only a rank of another node is noted. A mismatch inside this node is latched by the exchange
        of the node.
        """
        node = rank // self.memory.ranks_per_node
        if node in self.memory.others:
            self._noticed.value = self.memory.others.index(node) + 1

    def check(self) -> None:
        """Raise the failure of the network or of the node, if one was reported so far. The calls of
        two nodes that do not match are a failure here, too, and so are sums of zeros.
        """
        # Read the word before the failure. A failure cuts transfers, and the incomplete rows may
        # change the word, but only after the failure was kept; the failure then explains more.
        noticed = self._noticed.value
        super().check()
        # A negative word says that sums were zeros, although no wait of this rank has failed.
        if noticed < 0:
            self.fail([])
        # Another word that is not 0 is 1 + the index of the node whose call differs.
        if noticed:
            # The rails of the other ranks of this node may have no mismatch, so end their waits.
            self.node.end_waits()
            rank = self.memory.rank_on(self.memory.others[noticed - 1])
            raise EPMismatchError(self.rounds.count, [rank], latched=True)

    def look_at_node(self) -> None:
        """Raise what was reported so far. It reads memory of the host only and waits for no stream,
        since a CUDA graph that is being captured could not hold such a wait.
        """
        self.check()

    @property
    def failed(self) -> bool:
        """Whether this rank has failed: by a timeout, because the calls of two nodes did not match,
        or because sums were zeros.
        """
        return super().failed or self._noticed.value != 0
