"""Permute: received rows become expert-major rows, by the expert map."""

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
    """Rows sorted by local expert, and the row of each (token, expert) pair.

    Attributes:
        rows: [N, D]. Rows past `expert_offsets[e]` are not written and must not be read.
        expert_offsets: int32 [e + 1], the first row of each segment; a grouped GEMM takes
            `expert_offsets[1:]`.
        tokens_per_expert: int32 [e], rows of each segment without its gap.
        row_of_pair: int32 [S, K], −1 for a pair without a row.
        counts: int32 [R], the real slots of each source, or None; as passed.
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
    """Copy each row once for each of its local experts. Order: by expert, then source rank, then
    token.

    Args:
        x: [S, D] fp32, fp16, bf16 or fp8, any row stride.
        ids: [S, K] int32 or int64. An id out of range, or one that the map sends to −1, gets no
            row.
        expert_map: int32 [P], the local index in [0, e) of each id, −1 for an expert of another
            rank.
        num_local_experts: e.
        counts_R: int32 [R]. With it, x is R slabs of S/R slots, and only the first counts_R[r]
            slots of slab r count.
        alignment: in rows. Segments start at its multiples; the gaps between them are zeros.
        max_rows: N, by default the worst case S·K + e·(alignment − 1). Pairs past it, in
            expert-major order, get row −1 and count as dropped.
        counters: see `route`.

    Returns:
        The rows [N, D] in x's dtype, and where each pair's row is.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape, value or device.
        RuntimeError: an argument requires grad in grad mode.
    """
    # The rows, and the experts of each.
    check_tensor("x", x, (*FLOATS, torch.float8_e4m3fn), ("S", "D"))
    S, _ = x.shape
    check_tensor("ids", ids, INTS, (S, "K"), x.device)
    check_tensor("expert_map", expert_map, I32, ("P",), x.device)

    # How segments lie, and which rows count.
    if alignment < 1:
        raise ValueError(f"`alignment` must be at least 1, got {alignment}")
    if num_local_experts < 0:
        raise ValueError(f"`num_local_experts` must be at least 0, got {num_local_experts}")
    if counts_R is not None:
        check_tensor("counts_R", counts_R, I32, ("R",), x.device)
        if counts_R.numel() == 0 or S % counts_R.numel():
            raise ValueError(f"`x` must hold {counts_R.numel()} slabs of equal size, got {S} slots")
    if max_rows is None:
        # All pairs are of this rank, and all gaps as large as can be.
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
