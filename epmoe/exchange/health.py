"""Health counters, and the errors that kernels report to the host.

Kernels count events such as dropped pairs in buffers of the memory plan, which `Totals` reads as a
`Health`. Failures of a round stand in the status words, from which `raise_on_failure` makes an
error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure
from dataclasses import dataclass

from torch import Tensor

from epmoe.config.seats import Seats
from epmoe.exchange.mismatch import Traits, differences
from epmoe.exchange.processor import Processor
from epmoe.group.errors import (
    EPAbortedError,
    EPMismatchError,
    EPOrderError,
    EPOverflowError,
    EPTimeoutError,
)
from epmoe.native.layouts import constant

STAGES = ("dispatch", "combine")
# The buffers of the memory plan from which `Health` is read. Their counts never fall.
TOTALS = (
    "health.counters",
    "health.tokens_per_expert",
    "health.rows_sent",
    "health.waited_ns",
    "health.aborted_rounds",
)
# The buffer with the number of rounds: it is a `RoundState` of csrc/plan.h, which begins with the 4
# bytes of `dispatch_epoch`.
_STATE = "state"


@dataclass(frozen=True)
class Health:
    """Counts of this rank since its `ExpertParallel` was made. No count ever falls.

    Attributes:
        rounds: rounds in which this rank has sent its dispatch, on GPUs received it. Replays of a
            CUDA graph count. The number is right if `health` is called at least once in 2³² rounds.
        sanitised_rows: rows of logits in which `ep.route` found NaN or Inf.
        padded_rows: rows at and past `num_tokens`, in `ep.route`.
        out_of_range_ids: ids outside [0, E) that dispatch was given, other than -1 and E.
        duplicate_ids: ids that a row of dispatch names again.
        nonfinite_weights: weights of NaN or Inf that dispatch was given.
        dropped_pairs: pairs that found no room in `capacity.max_expert_rows`.
        clamped_num_tokens: calls whose `num_tokens` was negative or more than T.
        timeouts: waits that failed, 0 or 1: the first one is the last.
        tokens_per_expert: [e], rows of each local expert.
        rows_sent: [R], rows sent to each rank.
        waited_s: [R], seconds that this rank has waited for each rank. A wait for all ranks counts
            for each of them from its start until the signal of that rank was seen, and 0 if that
            was there at the first look.
        aborted_rounds: [R], rounds that each rank has aborted. The CPU does not see the aborts
            of other ranks in a round that this rank aborted, too.
        rows_by_layer: [layers], rows of this rank's experts in each layer whose experts move, from
            tag 1 on; otherwise one sum.
        refused_plans: calls of `replace` in which nothing has moved, since a rank raised or was
            given other arguments.
    """

    rounds: int
    sanitised_rows: int
    padded_rows: int
    out_of_range_ids: int
    duplicate_ids: int
    nonfinite_weights: int
    dropped_pairs: int
    clamped_num_tokens: int
    timeouts: int
    tokens_per_expert: list[int]
    rows_sent: list[int]
    waited_s: list[float]
    aborted_rounds: list[int]
    rows_by_layer: list[int]
    refused_plans: int = 0

    @classmethod
    def read(cls, rounds: int, totals: Sequence[Tensor]) -> Health:
        """Make the counts from the number of rounds and the buffers `TOTALS`, in their order."""
        # `tokens_per_expert` is [layers, experts of this rank] here.
        counters, tokens_per_expert, rows_sent, waited_ns, aborted_rounds = totals
        counted = dict(zip(COUNTERS, counters.tolist(), strict=True))
        return cls(
            rounds,
            **counted,
            tokens_per_expert=tokens_per_expert.sum(0).tolist(),
            rows_sent=rows_sent.tolist(),
            waited_s=(waited_ns.double() / 1e9).tolist(),
            aborted_rounds=aborted_rounds.tolist(),
            rows_by_layer=tokens_per_expert.sum(1).tolist(),
        )

    def as_dict(self) -> dict[str, int | list[int] | list[float]]:
        """The attributes as plain numbers and lists, ready for JSON."""
        return dataclasses.asdict(self)


COUNTERS = tuple(field.name for field in dataclasses.fields(Health) if field.type == "int")[1:-1]
"""The names of the health counters, in the order of `Counter` in csrc/types.h."""


class Totals:
    """Reads the health counters of one rank, at any time and on any thread.

    `views` are the buffers of the memory plan by name.
    """

    def __init__(self, views: Mapping[str, Tensor], processor: Processor) -> None:
        self._epochs = processor.num_epochs
        self._rounds = 0
        self._peek = processor.peek(views[_STATE][:1], *(views[name] for name in TOTALS))

    def read(self) -> Health:
        """Read the counters as they are now. A kernel that is running has counted in part."""
        # Take the number of the last read before the new values come: another thread may read and
        # change it meanwhile, and then the difference below would be negative.
        before = self._rounds
        epoch, *totals = self._peek.read()
        # Epochs are 32 bits wide and begin again. So add the rounds since the last read.
        since = ((int(epoch) & 0xFFFFFFFF) - before) % self._epochs
        rounds = before + since
        self._rounds = max(self._rounds, rounds)
        return Health.read(rounds, totals)


def raise_incomplete(overflow: EPOverflowError | None, aborted: EPAbortedError | None) -> None:
    """Raise the error of a round whose y is incomplete; do nothing if both errors are None.

    If there are both, the overflow is raised, with the text of the abort as a note.
    """
    if overflow is not None:
        if aborted is not None:
            overflow.add_note(str(aborted))
        raise overflow
    if aborted is not None:
        raise aborted


def raise_on_failure(
    status: Structure,
    global_ranks: list[int],
    seats: Seats,
    rank: int,
    latched: bool,
    dead: int = 0,
    calls: Callable[[], Sequence[Traits]] = tuple,
) -> None:
    """Raise the failure that kernels or other ranks have written into `status`, if there is one.

    The failure stays in `status`, so that each later call raises it again. Only a mismatch that has
    not latched is erased: the caller closes its round, and the next round may succeed.

    Args:
        status: a `Status` of csrc/plan.h. Its masks and numbers count seats.
        global_ranks: the global rank of each rank of the group.
        seats: which rank has which seat.
        rank: this rank.
        latched: whether a mismatch lasts, as it does on GPUs.
        dead: the ranks whose process has ended, as a mask.
        calls: returns the calls of all ranks in the round after a mismatch; [] where nobody can
            tell. It is called only for the error's text.
    """
    code = status.code
    epoch = status.epoch
    if not code:
        return
    # Turn seats into ranks, which users know.
    originator = seats.rank_in(status.originator)
    stage = STAGES[status.stage]
    ranks = seats.ranks_in(status.missing)

    # Calls of a round that do not match.
    if code == constant("kMismatch"):
        if not latched:
            status.code = 0
        # `other` is 0 or 1 + a word with a seat and the tag of this seat's rank: see
        # `Status.other` in csrc/plan.h.
        tags = None
        if status.other:
            seat, tag = divmod(status.other - 1, 1 << 16)
            tags = (status.tag, seats.rank_in(seat), tag)
        differing = {}
        calls_of_ranks = calls()
        if calls_of_ranks and ranks:
            differing = differences(calls_of_ranks[rank], calls_of_ranks[ranks[0]])
        raise EPMismatchError(epoch, ranks, latched, tags, differing)
    if code == constant("kOutOfTurn"):
        raise EPOrderError(stage, epoch, status.phases)

    # A kernel of this rank did not begin.
    missing = [global_ranks[rank] for rank in ranks]
    if code == constant("kUnscheduled"):
        why = (
            "has not begun within its deadline: this rank's own kernel was not scheduled, since "
            "others hold the GPU"
        )
        raise EPTimeoutError(stage, epoch, ranks, missing, why)

    # Ranks did not come in time. The text of the error names the likeliest cause.
    assert code == constant("kTimeout"), f"unknown status code {code}"
    ended = [r for r in ranks if dead >> r & 1]
    named = f"rank(s) {ranks} of the group (global rank(s) {missing})"
    why = f"timed out waiting for {named}, first seen by rank {originator}"
    # A rank that reports itself missing has left the round, since no deadline makes a rank do so.
    if ranks == [originator] and len(global_ranks) > 1:
        why = (
            f"ended early: {named} left the group by an exception or with a round open, or had an "
            "EPOrderError"
        )
    elif ended:
        which = f"of which the process of rank(s) {ended} has ended"
        if ended == ranks:
            which = "whose process has ended"
        why = f"missed {named}, {which}, first seen by rank {originator}"
    elif rank in ranks:
        why += (
            ": this rank came too late, or its own kernel was not scheduled, since others held the "
            "GPU"
        )
    else:
        why += (
            ": raise exchange.timeout_s if the ranks are only slow; ranks with several "
            "ExpertParallels must use them in one order"
        )
    raise EPTimeoutError(stage, epoch, ranks, missing, why)
