"""What went wrong, and how often: health counters, the status words that kernels write, and the errors from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# int64 each, in the order of `Counter` in csrc/types.h.
COUNTERS = (
    "sanitised_rows",
    "padded_rows",
    "out_of_range_ids",
    "duplicate_ids",
    "nonfinite_weights",
    "dropped_pairs",
    "clamped_num_tokens",
    "timeouts",
)
# int64 each, in the order of `Status` in csrc/plan.h.
STATUS = ("code", "stage", "epoch", "missing", "originator", "needed_rows", "unused", "unused")
TIMEOUT, MISMATCH = 1, 2
_STAGES = ("dispatch", "combine")


@dataclass(frozen=True)
class Health:
    """Counts of this rank since its `ExpertParallel` was made.

    `tokens_per_expert` [e] counts the rows of each local expert, and `rows_sent` [R] the rows sent to each rank.
    """

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

    @classmethod
    def read(cls, counters: torch.Tensor, tokens_per_expert: torch.Tensor, rows_sent: torch.Tensor) -> Health:
        """From the buffers of the same names: int64 [8], int64 [e] and int64 [R]."""
        counts = dict(zip(COUNTERS, counters.tolist(), strict=True))
        return cls(**counts, tokens_per_expert=tokens_per_expert.tolist(), rows_sent=rows_sent.tolist())


class EPError(RuntimeError):
    """The exchange failed."""


class EPTimeoutError(EPError, TimeoutError):
    """Ranks did not arrive within the deadline, or left the group. The `ExpertParallel` can only be closed."""

    def __init__(
        self, stage: str, epoch: int, missing: list[int], missing_global: list[int], originator: int, left: bool = False
    ):
        self.stage, self.epoch = stage, epoch
        self.missing_ranks, self.missing_global_ranks = missing, missing_global
        ranks = f"rank(s) {missing} of the group (global rank(s) {missing_global})"
        super().__init__(
            f"{stage} of round {epoch} ended early: {ranks} left the group by an exception or with a round open; this "
            "ExpertParallel can only be closed"
            if left
            else f"{stage} of round {epoch} timed out waiting for {ranks}, first seen by rank {originator}; this "
            "ExpertParallel can only be closed. Raise exchange.timeout_s if the ranks are only slow"
        )


class EPOverflowError(EPError):
    """More expert-major rows arrived than `capacity.max_expert_rows`."""

    def __init__(self, needed: int, max_rows: int):
        self.needed_rows = needed
        super().__init__(
            f"a round needed {needed} expert-major rows, but capacity.max_expert_rows is {max_rows}: set it to at "
            f"least {needed}, or capacity.on_overflow to 'drop'"
        )


class EPMismatchError(EPError, ValueError):
    """The ranks brought different K, D or dtype to one round."""

    def __init__(self, epoch: int, ranks: list[int]):
        super().__init__(
            f"round {epoch}: rank(s) {ranks} brought another number of experts per token, hidden size or dtype than "
            "this rank; they must be equal on all ranks. The round was closed"
        )


def raise_on_failure(status: torch.Tensor, global_ranks: list[int]) -> None:
    """Raise the failure in `status` (int64, host memory); clear a mismatch, since the caller closes its round."""
    code, stage, epoch, missing_mask, originator = status[:5].tolist()
    if not code:
        return
    ranks = [rank for rank in range(len(global_ranks)) if missing_mask >> rank & 1]
    if code == MISMATCH:
        status[0] = 0
        raise EPMismatchError(epoch, ranks)
    assert code == TIMEOUT, f"unknown status code {code}"
    left = ranks == [originator] and len(global_ranks) > 1  # only a rank that leaves reports itself missing
    raise EPTimeoutError(_STAGES[stage], epoch, ranks, [global_ranks[rank] for rank in ranks], originator, left)


def raise_on_overflow(status: torch.Tensor, max_rows: int) -> None:
    """Raise if a round needed more than `max_rows` expert-major rows, and clear it, so that it is raised once."""
    needed = int(status[STATUS.index("needed_rows")])
    if needed:
        status[STATUS.index("needed_rows")] = 0
        raise EPOverflowError(needed, max_rows)
