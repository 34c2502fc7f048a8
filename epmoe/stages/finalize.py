"""Finalize: expert-major outputs → one weighted row for each received token."""

from __future__ import annotations

from torch import Tensor

from epmoe import ops
from epmoe.stages.checks import FLOATS, check_tensor, contiguous_rows
from epmoe.stages.permute import Permuted


def finalize(expert_rows: Tensor, permuted: Permuted, weights: Tensor) -> Tensor:
    """Undo the permutation: partial[s] = Σ_k weights[s, k] · expert_rows[row_of_pair[s, k]], summed in fp32.

    A pair without a row adds nothing, a slot without any yields zeros, and a weight of 0 never multiplies. Where
    `permuted` has counts, slots past them are not written.

    Args:
        expert_rows: [N, D] fp32, fp16 or bf16, in the order of `permuted.rows`.
        permuted: what `permute` returned.
        weights: [S, K] fp32, fp16 or bf16.

    Returns:
        [S, D] in the dtype of `expert_rows`.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    check_tensor("expert_rows", expert_rows, FLOATS, ("N", "D"))
    check_tensor("weights", weights, FLOATS, tuple(permuted.row_of_pair.shape), expert_rows.device)
    return ops.finalize(contiguous_rows(expert_rows), permuted.row_of_pair, contiguous_rows(weights), permuted.counts)
