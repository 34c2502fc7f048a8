"""The ranks of a group as one of them sees them, and how values and errors of one
reach all others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

from epmoe.group.errors import EPStateError
from epmoe.group.waiting import Uninterrupted, as_on_this_thread, to_its_end

_Value = TypeVar("_Value")
# Errors that reach other ranks as they are.
_KINDS: tuple[type[Exception], ...] = (MemoryError, EPStateError, ValueError, RuntimeError)
# Limits of a value.
_MOST_BYTES = 2**24
# Bytes of a value that travel with its length: few are longer.
_BEGIN_BYTES = 4096
_LENGTH_BYTES = 8


class MissingRankError(RuntimeError):
    """A rank of `peers` has ended, or did not come in time: one of `ranks`, if known. The group can
    do nothing more.
    """

    def __init__(self, peers: Peers, error: RuntimeError, ranks: Sequence[int] = ()):
        self.peers = peers
        self.ranks = list(ranks)
        super().__init__(str(error))


class _Problem(NamedTuple):
    """An error of one rank. The least one is raised on the others: a rank that waited in vain is
    not the cause.
    """

    late: bool
    rank: int
    kind: str  # of `_KINDS`
    text: str


class _ReportedError(Exception):
    """Another rank of `peers` has failed in a step of `together`."""

    def __init__(self, peers: Peers, problem: _Problem):
        self.peers = peers
        self.problem = problem
        super().__init__(problem)

    def as_shared(self) -> Exception:
        """The error that this rank raises in its place."""
        kinds = {kind.__name__: kind for kind in _KINDS}
        kind = kinds.get(self.problem.kind, RuntimeError)
        return kind(f"rank {self.problem.rank}: {self.problem.text}")


@dataclass(frozen=True)
class Peers:
    """A process group, and the place of this process in it."""

    group: dist.ProcessGroup | None  # None is this process alone
    rank: int
    size: int
    global_ranks: list[int]  # [R]
    timeout_s: float | None = None
    """deadline of each collective in seconds; None is the group's own"""
    first: int = 0
    """number of rank 0 in errors: these ranks may be a part of a larger group"""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, timeout_s: float | None = None) -> Self:
        """The ranks of `group`. This process must be one of them."""
        if group is None:
            return cls(None, 0, 1, [0], timeout_s)
        ranks = dist.get_process_group_ranks(group)
        return cls(group, dist.get_rank(group), dist.get_world_size(group), ranks, timeout_s)

    def all_gather(self, value: _Value) -> list[_Value]:
        """Every rank's value, in rank order. Collective. Values travel as JSON, in which a tuple is
        a list.

        Raises MissingRankError at once if a rank has ended, and after the deadline if one does not
        arrive. It also ends a step of `together` in which another rank has failed.
        """
        gathered = self._exchange((None, value))
        self._raise_reported(gathered)
        return [theirs for _, theirs in gathered]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Send the bytes of one rank's tensor to all, in place. Collective. Raises MissingRankError
        as `all_gather`.
        """
        if self.group is None:
            return
        options = BroadcastOptions()
        options.rootRank = source
        # `dist.broadcast` takes no deadline.
        deadline = self._deadline
        if deadline is not None:
            options.timeout = deadline
        # Bytes, since gloo knows few dtypes.
        payload = [tensor.view(-1).view(torch.uint8)]
        with self.waiting():
            self.group.broadcast(payload, options).wait()

    def to_first(self, tensor: Tensor, source: int) -> None:
        """Send the bytes of one rank's tensor to rank 0, in place. Other ranks do nothing. Raises
        MissingRankError.
        """
        if self.group is None or source == 0 or self.rank not in (0, source):
            return
        payload = [tensor.view(-1).view(torch.uint8)]
        other = source if self.rank == 0 else 0
        with self.waiting([other]):
            if self.rank == 0:
                work = self.group.recv(payload, source, 0)
            else:
                work = self.group.send(payload, 0, 0)
            if self._deadline is None:
                work.wait()
            else:
                work.wait(self._deadline)

    @contextmanager
    def waiting(self, ranks: Sequence[int] = ()) -> Iterator[None]:
        """Within it a collective waits for `ranks`, if known. A RuntimeError of torch becomes a
        MissingRankError.
        """
        try:
            yield
        except RuntimeError as error:
            if self.group is None:
                raise
            raise MissingRankError(self, error, ranks) from None

    @property
    def _deadline(self) -> timedelta | None:
        if self.timeout_s is None:
            return None
        return timedelta(seconds=self.timeout_s)

    @contextmanager
    def together(self, then: Callable[[], object] = lambda: None) -> Iterator[None]:
        """A step that succeeds on all ranks, or fails on all. Collective at its end.

        A rank that fails reports it in place of its next `all_gather`, whichever that is on the
        others, and raises its own error: any exception, KeyboardInterrupt and SystemExit too. The
        others raise the error of the first such rank, as a MemoryError, EPStateError, ValueError or
        RuntimeError.

        The last word of the step is whole: what a signal handler raises meanwhile is raised after
        it, when the step has succeeded on all ranks. So `then` is what this rank changes once it
        has: it runs as a part of the last word, on another thread.
        """
        try:
            with self.substep(then):
                yield
        except _ReportedError as reported:
            raise reported.as_shared() from reported.__cause__

    @contextmanager
    def substep(self, then: Callable[[], object] = lambda: None) -> Iterator[None]:
        """A step of these ranks within a step of a larger group. The larger group learns of an
        error in it, too.
        """
        last_word = Uninterrupted(partial(self._agree, then))
        try:
            yield
            last_word.run()
        except BaseException as error:
            # If the last word had begun, it has ended by now: the step has its outcome, and nobody
            # waits for a report.
            if last_word.finish_or_cancel():
                raise
            if isinstance(error, (MissingRankError, _ReportedError)) and error.peers is self:
                raise
            self._report(error)
            raise

    def _agree(self, then: Callable[[], object]) -> None:
        """The last word of a step that has succeeded here."""
        self._hear()
        then()

    def _hear(self) -> None:
        """A word of all ranks that none has failed so far. Raises _ReportedError."""
        self._raise_reported(self._gather_values((None, None)))

    def _report(self, error: BaseException) -> None:
        """Report that this rank has failed. Raises _ReportedError where another's error explains
        more.
        """
        is_late = isinstance(error, (MissingRankError, TimeoutError))
        problem = self._problem_of(error, is_late)
        try:
            self._raise_reported(self._exchange((problem, None)))
        except _ReportedError as reported:
            # A rank that waited in vain has another one's error. Memory is short on all ranks.
            has_cause = is_late and reported.problem != problem
            if has_cause or isinstance(error, (MemoryError, _ReportedError)):
                raise reported from error
        except MissingRankError as missing:
            # The missing rank may be the cause.
            if isinstance(error, (RuntimeError, OSError, _ReportedError)):
                raise missing from error

    def _problem_of(self, error: BaseException, is_late: bool) -> _Problem:
        """Describe an error of this rank for the others."""
        # A part of these ranks has failed.
        if isinstance(error, _ReportedError):
            return error.problem
        kind: type[Exception] = RuntimeError
        for known in _KINDS:
            if isinstance(error, known):
                kind = known
                break
        text = str(error)
        if type(error) is not kind:
            text = f"{type(error).__name__}: {error}"
        return _Problem(is_late, self.first + self.rank, kind.__name__, text)

    def _raise_reported(self, gathered: Sequence[tuple[Any, object]]) -> None:
        """Raise the error of the first rank that has failed, of what each rank has sent: a problem
        or None, and a value.
        """
        problems = [_Problem(*problem) for problem, _ in gathered if problem]
        if problems:
            raise _ReportedError(self, min(problems))

    def _exchange(self, value: _Value) -> list[_Value]:
        """Every rank's value. It takes one or two gathers, of which a signal handler's exception
        leaves none out: it is raised before them or after them.
        """
        if self.group is None:
            return [value]
        return to_its_end(partial(self._gather_values, value))

    def _gather_values(self, value: _Value) -> list[_Value]:
        """Gather every rank's value, as JSON."""
        if self.group is None:
            return [value]
        # The length and the first bytes of each value.
        data = json.dumps(value).encode()
        header = len(data).to_bytes(_LENGTH_BYTES, "little")
        begins = self._gather(header + data[:_BEGIN_BYTES], _LENGTH_BYTES + _BEGIN_BYTES)
        lengths = [int.from_bytes(begin[:_LENGTH_BYTES], "little") for begin in begins]
        if not all(0 < length <= _MOST_BYTES for length in lengths):
            raise RuntimeError(
                f"ranks sent values of {lengths} bytes: each has at most {_MOST_BYTES}"
            )

        # The rest, if any value is longer.
        ends = [b""] * self.size
        rest = max(lengths) - _BEGIN_BYTES
        if rest > 0:
            ends = self._gather(data[_BEGIN_BYTES:], rest)
        values = []
        for begin, end, length in zip(begins, ends, lengths, strict=True):
            text = begin[_LENGTH_BYTES:] + end
            values.append(json.loads(text[:length]))
        return values

    def _gather(self, data: bytes, nbytes: int) -> list[bytes]:
        """Gather every rank's bytes, padded to `nbytes`."""
        assert self.group is not None
        # `dist.all_gather` takes no deadline.
        options = AllgatherOptions()
        deadline = self._deadline
        if deadline is not None:
            options.timeout = deadline
        tensor = torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.waiting():
            self.group.allgather([rows], [tensor], options).wait()
        return [row.numpy().tobytes() for row in rows]


def run_uninterrupted(steps: Sequence[Peers], work: Callable[[], _Value]) -> _Value:
    """Run collective calls that are no `all_gather`, such as torch's, within steps of
    `Peers.together`, the outermost first. Returns what `work` returns.

    Ranks first agree that none has failed, then all run `work` to its end. It runs on another
    thread, so that a signal handler cannot interrupt it. The exception of a handler is raised
    before `work`, and then the other ranks hear of it, or after `work`.
    """
    steps = [peers for peers in steps if peers.group is not None]
    if not steps:
        return work()

    def begin_together() -> _Value:
        # A rank that has failed reports it to the innermost step first.
        for peers in reversed(steps):
            peers._hear()
        return work()

    return to_its_end(as_on_this_thread(begin_together))
