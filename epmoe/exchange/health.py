"""How often something went wrong, and what kernels report: health counters, and the status words
with their errors.
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
# Buffers of the memory plan that only grow, and the count of rounds: what `Health` is made of.
TOTALS = (
    "health.counters",
    "health.tokens_per_expert",
    "health.rows_sent",
    "health.waited_ns",
    "health.aborted_rounds",
)
_ROUNDS = "state"  # whose first 4 bytes are `dispatch_epoch` in `RoundState` of csrc/plan.h


@dataclass(frozen=True)
class Health:
    """Counts of this rank since its `ExpertParallel` was made. No count ever falls.

    Attributes:
        rounds: whose dispatch this rank has sent, on GPUs received; replays of a CUDA graph count.
            It is right where `health` is called at least once in 2³² rounds.
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
        """Make the counts from the buffers `TOTALS`."""
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
    """Reads the totals of one rank at any time, on any thread. `views` are the buffers of the
    memory plan by name.
    """

    def __init__(self, views: Mapping[str, Tensor], processor: Processor) -> None:
        self._epochs = processor.num_epochs
        self._rounds = 0
        self._peek = processor.peek(views[_ROUNDS][:1], *(views[name] for name in TOTALS))

    def read(self) -> Health:
        """The totals now. Those of a kernel under way are counted in part."""
        # Of before these values: another thread may move it on meanwhile.
        before = self._rounds
        epoch, *totals = self._peek.read()
        # Epochs begin again after 2³² rounds: count on from the last look.
        since = ((int(epoch) & 0xFFFFFFFF) - before) % self._epochs
        rounds = before + since
        self._rounds = max(self._rounds, rounds)
        return Health.read(rounds, totals)


def raise_incomplete(overflow: EPOverflowError | None, aborted: EPAbortedError | None) -> None:
    """Raise what makes the y of a round incomplete: where there are both, one with a note of the
    other.
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
    """Raise the failure in `status` of `rank`, a `Status` of csrc/plan.h, which counts `seats`.
    `dead` is a mask of ranks whose process has ended. `calls` returns the ranks' calls of a round
    if they do not match, otherwise [].

    A failure stays there, unless it is a mismatch that has not `latched`: the caller closes its
    round then.
    """
    code = status.code
    epoch = status.epoch
    if not code:
        return
    # Ranks, as callers count them.
    originator = seats.rank_in(status.originator)
    stage = STAGES[status.stage]
    ranks = seats.ranks_in(status.missing)

    # Calls of a round that do not match.
    if code == constant("kMismatch"):
        if not latched:
            status.code = 0
        # 1 + the seat and the tag of another rank: see `Status.other` in csrc/plan.h.
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

    # A kernel of this rank that did not begin.
    missing = [global_ranks[rank] for rank in ranks]
    if code == constant("kUnscheduled"):
        why = (
            "has not begun within its deadline: this rank's own kernel was not scheduled, since "
            "others hold the GPU"
        )
        raise EPTimeoutError(stage, epoch, ranks, missing, why)

    # Ranks that did not come. The error says the likeliest cause.
    assert code == constant("kTimeout"), f"unknown status code {code}"
    ended = [r for r in ranks if dead >> r & 1]
    named = f"rank(s) {ranks} of the group (global rank(s) {missing})"
    why = f"timed out waiting for {named}, first seen by rank {originator}"
    # No deadline makes a rank report itself missing: it has left the round.
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
