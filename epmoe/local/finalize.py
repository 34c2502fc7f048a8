"""Finalize: expert-major outputs become one weighted row for each received token."""

from __future__ import annotations

from torch import Tensor

from epmoe.local.permute import Permuted
from epmoe.native import ops
from epmoe.native.arguments import (
    FLOATS,
    check_forward_only,
    check_tensor,
    contiguous_rows,
    describe,
)


def finalize(expert_rows: Tensor, permuted: Permuted, weights: Tensor) -> Tensor:
    """Undo the permutation: partial[s] = Σ_k weights[s, k] · expert_rows[row_of_pair[s, k]], summed
    in fp32.

    A pair without a row, or of weight 0, adds nothing, whatever its output holds; a slot without
    pairs yields zeros. If `permuted` has counts, slots past them are not written. Errors are those
    of `permute`.

    Args:
        expert_rows: [N, D] fp32, fp16 or bf16, in the order of `permuted.rows`.
        permuted: as `permute` returned it.
        weights: [S, K] fp32, fp16 or bf16.

    Returns:
        [S, D] in the dtype of `expert_rows`.
    """
    check_tensor("expert_rows", expert_rows, FLOATS, ("N", "D"))
    if not isinstance(permuted, Permuted):
        raise TypeError(f"`permuted` must be what permute returned, got {describe(permuted)}")
    check_tensor("weights", weights, FLOATS, tuple(permuted.row_of_pair.shape), expert_rows.device)
    check_forward_only(expert_rows, weights)
    return ops.finalize(
        contiguous_rows(expert_rows),
        permuted.row_of_pair,
        contiguous_rows(weights),
        permuted.counts,
    )
