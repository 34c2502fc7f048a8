"""Finalize: add up the outputs of experts, so that each received token has one weighted row."""

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
    """Undo the permutation, and add up the weighted outputs of each token's experts.

    For each slot s of S it computes partial[s] = Σ_k weights[s, k] · expert_rows[row_of_pair[s,
    k]], summed in fp32. A pair without a row, or with weight 0, adds nothing, even if its output is
    NaN or Inf. A slot without pairs becomes zeros. If `permuted` has counts, slots behind them are
    not written. It raises the same errors as `permute`.

    Args:
        expert_rows: outputs of the experts, [N, D] fp32, fp16 or bf16, in the order of
            `permuted.rows`.
        permuted: the result of `permute`.
        weights: the weight of each pair, [S, K] fp32, fp16 or bf16.

    Returns:
        The sums, [S, D] in the dtype of `expert_rows`.
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
