"""The errors of calls that all ranks of a group take part in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Tags(NamedTuple):
    """The tags of two ranks that are in different layers."""

    mine: int
    """the tag of this rank"""
    rank: int
    """another rank"""
    theirs: int
    """its tag"""


class EPError(RuntimeError):
    """The exchange failed."""


def named_ranks(error: EPError) -> list[int]:
    """The ranks whose end or failure has led to this error, if the error names any. For an
    `EPTimeoutError` they are numbered in the world, and for all other errors in the group.
    """
    if isinstance(error, EPTimeoutError):
        return error.missing_global_ranks
    if isinstance(error, EPOpenError):
        return error.missing_ranks
    if isinstance(error, EPAbortedError | EPRefusedError):
        return error.ranks
    return []


class EPStateError(EPError, ValueError):
    """A call that the state of the `ExpertParallel` does not permit: it is closed, a round is open,
    or another call or another handle is due. Nothing was sent.
    """


class EPTimeoutError(EPError, TimeoutError):
    """Ranks did not arrive within the deadline, or left; or on a GPU this rank's own kernel was not
    scheduled in time. The `ExpertParallel` can only be resumed or closed, unless the error says
    otherwise.

    It has these attributes:

    - `stage`: the stage that waited, such as "dispatch".
    - `epoch`: the round's number, from 1.
    - `missing_ranks`: ranks of the group that were missing.
    - `missing_global_ranks`: the same ranks, as torch.distributed numbers them in the world.
    """

    def __init__(
        self,
        stage: str,
        epoch: int,
        missing: list[int],
        missing_global: list[int],
        why: str,
        then: str = "this ExpertParallel can only be resumed or closed",
    ):
        self.stage = stage
        self.epoch = epoch
        self.missing_ranks = missing
        self.missing_global_ranks = missing_global
        super().__init__(f"{stage} of round {epoch} {why}; {then}")


class EPOpenError(EPError):
    """Ranks of the group did not come when an `ExpertParallel` was made, or ended meanwhile.

    It has these attributes:

    - `missing_ranks`: these ranks of the group, as far as they are known.
    """

    def __init__(self, timeout_s: float, missing: list[int], missing_global: list[int]):
        self.missing_ranks = missing
        super().__init__(
            f"rank(s) {missing} of the group, global rank(s) {missing_global}, ended, or did not "
            f"come within exchange.warmup_timeout_s = {timeout_s} s to open an ExpertParallel"
        )


class EPResumeError(EPOpenError):
    """The ranks of a new group did not all get through `ExpertParallel.resume`. It may be called
    again.

    It has these attributes:

    - `missing_ranks`: ranks of the new group that are missing, as far as they are known.
    """

    def __init__(self, timeout_s: float, error: Exception):
        self.missing_ranks: list[int] = getattr(error, "missing_ranks", [])
        EPError.__init__(
            self,
            f"the new group did not form within {timeout_s} s, or a rank ended ({error}): resume "
            "in a group of ranks that answer",
        )


class EPOverflowError(EPError):
    """A round needed more rows than a limit allows: `capacity.max_expert_rows`, or with several
    nodes a slab's.

    It has these attributes:

    - `needed_rows`: how many rows the round needed.
    """

    def __init__(
        self,
        needed: int,
        max_rows: int,
        rows: str = "expert-major rows",
        key: str = "capacity.max_expert_rows",
    ):
        self.needed_rows = needed
        super().__init__(
            f"a round needed {needed} {rows}, but {key} is {max_rows}: set it to at least "
            f"{needed}, or capacity.on_overflow to 'drop'"
        )


class EPAbortedError(EPError):
    """Other ranks have aborted a round, so the sums of this round lack their experts. The next
    round works.

    The round was closed on all ranks. On GPUs the error may come some rounds later, as hosts run
    ahead of their GPUs. It then stands for all rounds that were aborted since the last such error.

    It has these attributes:

    - `ranks`: ranks of the group that have aborted.
    - `epoch`: the number of the round; on GPUs of the last one that was aborted.
    """

    def __init__(self, epoch: int, ranks: list[int]):
        self.epoch = epoch
        self.ranks = ranks
        super().__init__(
            f"round {epoch}: rank(s) {ranks} aborted the round, after an exception or by skip, so "
            "this rank's y lacks their experts. The round was closed, and the next one works; with "
            "exchange.on_abort zeros it only counts"
        )


class EPMismatchError(EPError, ValueError):
    """The calls of the ranks do not match: another tag, K, D or dtype; on GPUs also layout or
    weights on input.

    On the CPU the round was closed, and the next one is complete. On GPUs the `ExpertParallel` can
    only be resumed or closed: the hosts see it in different rounds, because they run ahead of their
    GPUs.

    It has these attributes:

    - `epoch`: the round's number, from 1.
    - `differing_ranks`: ranks of the group whose calls differ from this rank's.
    - `tags`: this rank's tag, the first differing rank, and its tag; None where tags are equal.
    - `differences`: by name what is known to differ: the value of this rank, and the value of the
      first of `differing_ranks`.
    """

    def __init__(
        self,
        epoch: int,
        ranks: list[int],
        latched: bool = False,
        tags: tuple[int, int, int] | None = None,
        differences: Mapping[str, tuple[object, object]] | None = None,
    ):
        self.epoch = epoch
        self.differing_ranks = ranks
        self.tags = None if tags is None else Tags(*tags)
        self.differences = differences or {}
        # Different tags say most about the mistake. Next come values that differ and have a name.
        if self.tags is not None:
            what = _differing_tags(self.tags, ranks)
        elif self.differences:
            what = _differing_values(self.differences, ranks)
        else:
            what = _differing_shapes(ranks, latched)
        then = "The round was closed"
        if latched:
            then = "This ExpertParallel can only be resumed or closed"
        super().__init__(f"round {epoch}: {what}. {then}")


def _differing_tags(tags: Tags, ranks: list[int]) -> str:
    """The middle of the error's text for ranks in different layers."""
    return (
        f"this rank's tag is {tags.mine}, that of rank {tags.rank} is {tags.theirs}, and the calls "
        f"of rank(s) {ranks} differ. A tag names a layer, or in a backward round its "
        "forward round: a rank has left out a round or has another order of layers or of "
        "backward passes of micro-batches; `skip` takes part in a round for a rank that "
        "cannot"
    )


def _differing_values(differences: Mapping[str, tuple[object, object]], ranks: list[int]) -> str:
    """The middle of the error's text where it is known which values differ."""
    named = ", ".join(
        f"{name} is {mine} here and {theirs} there" for name, (mine, theirs) in differences.items()
    )
    return (
        f"the calls of rank(s) {ranks} differ from this rank's, that of rank {ranks[0]} by "
        f"this: {named}; they must be equal on all ranks"
    )


def _differing_shapes(ranks: list[int], latched: bool) -> str:
    """The middle of the error's text where it is not known what differs. On GPUs, where the error
    is `latched`, more properties of a call may differ.
    """
    shape = ", dtype, layout or apply_router_weight_on_input" if latched else " or dtype"
    return (
        f"rank(s) {ranks} brought another number of experts per token, hidden size{shape} "
        "than this rank; they must be equal on all ranks"
    )


class EPRefusedError(EPError):
    """Ranks have raised in `ExpertParallel.replace`, or were given other arguments. No expert has
    moved on any rank, and all ranks may call `replace` again.

    It has these attributes:

    - `ranks`: ranks of the group that differ from this rank.
    """

    def __init__(self, ranks: list[int], raised: bool):
        self.ranks = ranks
        what = "raised in `replace`"
        if not raised:
            what = (
                "were given other slots, or weights of other sizes, where all must be the same, or "
                "raised in `replace`"
            )
        super().__init__(f"rank(s) {ranks} {what}. No expert has moved on any rank")


# The phase that was due, indexed by the argument `phases` of EPOrderError: the number of phases of
# the round that had ended or were under way.
_DUE = (
    "dispatch was due",
    "dispatch had not ended",
    "combine was due",
    "combine had not ended",
)


class EPOrderError(EPError):
    """On a GPU, a stage of this rank ran before the stage that was due: graphs were replayed in
    another order than that of the rounds, or streams were not ordered. The `ExpertParallel` can
    only be resumed or closed.
    """

    def __init__(self, stage: str, epoch: int, phases: int):
        self.stage = stage
        self.epoch = epoch
        due = _DUE[phases]
        super().__init__(
            f"round {epoch}: {stage} ran on this rank's GPU where {due}. dispatch and combine "
            "alternate, each after the end of the other: replay graphs in this order, and let the "
            "stream of a replay wait for the stream of the call or replay before it. This "
            "ExpertParallel can only be resumed or closed"
        )
