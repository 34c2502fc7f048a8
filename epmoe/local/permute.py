"""Permute: sort received rows by the experts that will compute on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.native import ops
from epmoe.native.arguments import (
    FLOATS,
    INTS,
    check_forward_only,
    check_tensor,
    contiguous_rows,
    describe_fields,
)

I32 = (torch.int32,)


@dataclass(frozen=True)
class Permuted:
    """Rows sorted by the e local experts, and the row of each pair of a token and an expert.

    Attributes:
        rows: [N, D]. Rows behind `expert_offsets[e]` are not written and must not be read.
        expert_offsets: int32 [e + 1], the first row of each expert's segment, and the row behind
            the last segment. A grouped GEMM takes `expert_offsets[1:]`.
        tokens_per_expert: int32 [e], the rows of each segment without the gap behind them.
        row_of_pair: int32 [S, K], for each of S slots and K experts of its token; −1 for a pair
            that has no row.
        counts: the argument `counts_R` of `permute`.
    """

    rows: Tensor
    expert_offsets: Tensor
    tokens_per_expert: Tensor
    row_of_pair: Tensor
    counts: Tensor | None

    def __repr__(self) -> str:
        return describe_fields(self, vars(self))


def permute(
    x: Tensor,
    ids: Tensor,
    expert_map: Tensor,
    num_local_experts: int,
    *,
    counts_R: Tensor | None = None,
    alignment: int = 1,
    max_rows: int | None = None,
    counters: Tensor | None = None,
) -> Permuted:
    """Copy each received row once for each of its experts that this rank holds.

    The copies are ordered by expert, then by source rank, then by token.

    Args:
        x: the rows in S slots, [S, D] fp32, fp16, bf16 or fp8, with any row stride.
        ids: the K experts of each row, [S, K] int32 or int64. An id that is out of range, or that
            `expert_map` maps to −1, gets no copy.
        expert_map: int32 [P]. For each id of P physical experts, the expert's index from 0 to e − 1
            on this rank, or −1 if another rank holds the expert.
        num_local_experts: e, the number of experts on this rank.
        counts_R: int32 [R], for rows that come from R ranks. x is then R slabs of S/R slots each,
            and only the first counts_R[r] slots of slab r are used. None: all slots are used.
        alignment: the number of rows at whose multiples segments start. Gaps between segments are
            zeros.
        max_rows: N, the number of rows of the result. By default it is the largest number that can
            occur, S·K + e·(alignment − 1). If more would be needed, the last pairs in expert-major
            order get row −1 and count as dropped.
        counters: health counters, see `route`.

    Returns:
        The rows [N, D] in the dtype of x, and the row of each pair.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape, value or device.
        RuntimeError: an argument requires grad in grad mode.
    """
    # Check the rows, and the experts of each row.
    check_tensor("x", x, (*FLOATS, torch.float8_e4m3fn), ("S", "D"))
    S, _ = x.shape
    check_tensor("ids", ids, INTS, (S, "K"), x.device)
    check_tensor("expert_map", expert_map, I32, ("P",), x.device)

    # Check how segments are aligned, and which slots are used.
    if alignment < 1:
        raise ValueError(f"`alignment` must be at least 1, got {alignment}")
    if num_local_experts < 0:
        raise ValueError(f"`num_local_experts` must be at least 0, got {num_local_experts}")
    if counts_R is not None:
        check_tensor("counts_R", counts_R, I32, ("R",), x.device)
        if counts_R.numel() == 0 or S % counts_R.numel():
            raise ValueError(f"`x` must hold {counts_R.numel()} slabs of equal size, got {S} slots")
    if max_rows is None:
        # In the worst case this rank holds the experts of all pairs, and all gaps are largest.
        max_rows = S * ids.shape[1] + num_local_experts * (alignment - 1)
    if not 0 <= max_rows < 2**31:
        raise ValueError(f"`max_rows` must be from 0 to 2147483647, got {max_rows}")
    check_forward_only(x)

    rows_ND, offsets, tokens, row_of_pair_SK = ops.permute(
        contiguous_rows(x),
        contiguous_rows(ids),
        expert_map.contiguous(),
        num_local_experts,
        counts_R,
        alignment,
        max_rows,
        counters,
    )
    return Permuted(rows_ND, offsets, tokens, row_of_pair_SK, counts_R)
