"""The ranks of a group as one of them sees them. Ranks exchange values here, and an error of one
rank reaches all others.
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
# An error of one of these types is raised with the same type on the other ranks. The first type
# that fits counts. Any other error becomes a RuntimeError there.
_SHARED_TYPES: tuple[type[Exception], ...] = (
    MemoryError,
    EPStateError,
    ValueError,
    RuntimeError,
)
# A value has at most so many bytes as JSON.
_MOST_BYTES = 2**24
# So many bytes of a value travel in the first gather, behind its length. Few values are longer.
_BEGIN_BYTES = 4096
_LENGTH_BYTES = 8


class MissingRankError(RuntimeError):
    """A rank of `peers` has ended, or did not come in time. It is one of `ranks`, if these are
    known. The process group cannot be used any more.
    """

    def __init__(self, peers: Peers, error: RuntimeError, ranks: Sequence[int] = ()):
        self.peers = peers
        self.ranks = list(ranks)
        super().__init__(str(error))


class _Problem(NamedTuple):
    """An error of one rank, as it travels to the other ranks.

    If several ranks fail, the others raise the smallest problem in the order of these fields. So an
    error that is no timeout goes first: a rank that has waited in vain is not the cause.
    """

    late: bool  # whether the rank has waited in vain for another one
    rank: int
    kind: str  # the name of one of `_SHARED_TYPES`
    text: str


class _ReportedError(Exception):
    """Another rank of `peers` has failed in a step of `together`. It never leaves `together`, which
    raises `as_shared` in its place.
    """

    def __init__(self, peers: Peers, problem: _Problem):
        self.peers = peers
        self.problem = problem
        super().__init__(problem)

    def as_shared(self) -> Exception:
        """Make the error that the caller gets on this rank. Its text names the rank that failed."""
        kinds = {kind.__name__: kind for kind in _SHARED_TYPES}
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
    """the deadline of each collective in seconds; with None the group's own deadline holds"""
    first: int = 0
    """the number of rank 0 in errors, since these ranks may be a part of a larger group"""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, timeout_s: float | None = None) -> Self:
        """The ranks of `group`. This process must be one of them."""
        if group is None:
            return cls(group=None, rank=0, size=1, global_ranks=[0], timeout_s=timeout_s)
        return cls(
            group=group,
            rank=dist.get_rank(group),
            size=dist.get_world_size(group),
            global_ranks=dist.get_process_group_ranks(group),
            timeout_s=timeout_s,
        )

    def all_gather(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks, in rank order. Collective. Values travel as JSON, so a
        tuple arrives as a list.

        Raises MissingRankError: at once if a rank has ended, and after the deadline if a rank does
        not arrive. If another rank has failed in the present step of `together`, the exception that
        ends the step is raised here.
        """
        gathered = self._exchange((None, value))
        self._raise_reported(gathered)
        return [theirs for _, theirs in gathered]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Write the tensor of the rank `source` into `tensor` on all ranks, bit by bit. Collective.
        Raises MissingRankError if a rank has ended or does not arrive.
        """
        if self.group is None:
            return
        options = BroadcastOptions()
        options.rootRank = source
        # Call the method of the group, since `dist.broadcast` takes no deadline.
        deadline = self._deadline
        if deadline is not None:
            options.timeout = deadline
        # Send bytes, since gloo knows few dtypes.
        payload = [tensor.view(-1).view(torch.uint8)]
        with self.waiting():
            self.group.broadcast(payload, options).wait()

    def to_first(self, tensor: Tensor, source: int) -> None:
        """Write the tensor of the rank `source` into `tensor` on rank 0, bit by bit. Ranks other
        than these two do nothing. Raises MissingRankError if the other of the two does not arrive.
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
        """Turn a RuntimeError that torch raises within this context into a MissingRankError.

        `ranks` are the ranks for which the collective in this context waits, if it does not wait
        for all.
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
        """Make the body of this context a step that succeeds on all ranks or fails on all ranks.
        The end of the context is collective.

        If the body raises on a rank, that rank reports it in place of its next gather. The other
        ranks learn it in whichever gather they are in. The rank that has failed raises its own
        error, which may be any exception, also KeyboardInterrupt or SystemExit. The other ranks
        raise the error of the first rank that has failed, as a MemoryError, EPStateError,
        ValueError or RuntimeError.

        The step ends by a last gather, in which all ranks say that they have succeeded. No signal
        handler can interrupt it: what a handler raises meanwhile is raised after the step, which
        has then succeeded on all ranks. `then` is called right after the gather, on another thread,
        and is part of what cannot be interrupted. So a caller changes its state in `then`.
        """
        try:
            with self.substep(then):
                yield
        except _ReportedError as reported:
            raise reported.as_shared() from reported.__cause__

    @contextmanager
    def substep(self, then: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Make a step, as `together` does, of ranks that are also in a step of a larger group.

        An error in it goes on to the larger group: the exception that leaves this context may be a
        _ReportedError, which the step of the larger group reports there.
        """
        end_of_step = Uninterrupted(partial(self._end_step, then))
        try:
            yield
            end_of_step.run()
        except BaseException as error:
            # If the end of the step had begun, it is over by now. Then the step has its outcome,
            # and no rank waits for a report.
            if end_of_step.finish_or_cancel():
                raise
            # If these ranks themselves have told this rank of the error, they know it already.
            if isinstance(error, (MissingRankError, _ReportedError)) and error.peers is self:
                raise
            self._report(error)
            raise

    def _end_step(self, then: Callable[[], object]) -> None:
        """End a step that has succeeded on this rank: see that it has on all, and call `then`."""
        self._check_all_succeed()
        then()

    def _check_all_succeed(self) -> None:
        """Tell all ranks that this one has not failed so far. Collective. Raises _ReportedError if
        another rank has failed.
        """
        self._raise_reported(self._gather_values((None, None)))

    def _report(self, error: BaseException) -> None:
        """Tell the other ranks that this rank has failed with `error`. Collective.

        It returns if `error` is what this rank is to raise. If the error of another rank explains
        more, it raises that one: a _ReportedError or a MissingRankError.
        """
        is_late = isinstance(error, (MissingRankError, TimeoutError))
        problem = self._problem_of(error, is_late)
        try:
            self._raise_reported(self._exchange((problem, None)))
        except _ReportedError as reported:
            # If this rank has waited in vain, the error of another rank is the cause. If memory is
            # short, all ranks may have a MemoryError, and are to name the same rank.
            has_cause = is_late and reported.problem != problem
            if has_cause or isinstance(error, (MemoryError, _ReportedError)):
                raise reported from error
        except MissingRankError as missing:
            # Another rank is missing. That may have caused errors of these types.
            if isinstance(error, (RuntimeError, OSError, _ReportedError)):
                raise missing from error

    def _problem_of(self, error: BaseException, is_late: bool) -> _Problem:
        """Describe an error of this rank for the other ranks."""
        # A substep of some of these ranks has failed, and names its cause already.
        if isinstance(error, _ReportedError):
            return error.problem
        kind: type[Exception] = RuntimeError
        for shared_type in _SHARED_TYPES:
            if isinstance(error, shared_type):
                kind = shared_type
                break
        text = str(error)
        if type(error) is not kind:
            text = f"{type(error).__name__}: {error}"
        return _Problem(late=is_late, rank=self.first + self.rank, kind=kind.__name__, text=text)

    def _raise_reported(self, gathered: Sequence[tuple[Any, object]]) -> None:
        """Raise _ReportedError if a rank has failed. `gathered` has a pair from each rank: the
        rank's problem or None, and its value.
        """
        problems = [_Problem(*problem) for problem, _ in gathered if problem]
        if problems:
            raise _ReportedError(self, min(problems))

    def _exchange(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks. Collective.

        It takes one or two gathers. What a signal handler raises meanwhile is raised before both or
        after both, since the other ranks take part in both.
        """
        if self.group is None:
            return [value]
        return to_its_end(partial(self._gather_values, value))

    def _gather_values(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks, which travel as JSON. A signal handler may interrupt it,
        so callers run it on another thread.
        """
        if self.group is None:
            return [value]
        # Gather the length and the first bytes of each value.
        data = json.dumps(value).encode()
        header = len(data).to_bytes(_LENGTH_BYTES, "little")
        begins = self._gather(header + data[:_BEGIN_BYTES], _LENGTH_BYTES + _BEGIN_BYTES)
        lengths = [int.from_bytes(begin[:_LENGTH_BYTES], "little") for begin in begins]
        if not all(0 < length <= _MOST_BYTES for length in lengths):
            raise RuntimeError(
                f"ranks sent values of {lengths} bytes: each has at most {_MOST_BYTES}"
            )

        # Gather the other bytes, if any value is longer.
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
        """Return the bytes of all ranks, each padded with zeros to `nbytes`."""
        assert self.group is not None
        # Call the method of the group, since `dist.all_gather` takes no deadline.
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
    """Run `work` on all ranks or on none, and return its result. `work` makes collective calls that
    cannot report the error of a rank, such as those of torch.

    The caller is within the `steps` of `Peers.together`, which are given from the outermost to the
    innermost. Ranks first agree that none of them has failed; then all run `work` to its end, on
    another thread, so that no signal handler can interrupt it. The exception of a handler is raised
    before `work`, and then the other ranks learn of it and do not run `work`, or it is raised after
    `work`.
    """
    steps = [peers for peers in steps if peers.group is not None]
    if not steps:
        return work()

    def begin_together() -> _Value:
        # A rank that has failed reports it to the innermost step first.
        for peers in reversed(steps):
            peers._check_all_succeed()
        return work()

    return to_its_end(as_on_this_thread(begin_together))
