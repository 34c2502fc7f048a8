"""A loop over the experts, which waits for the device: for whatever weights no library takes."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import Gemm, product_dtype
from epmoe.local.quantize import dequantize_rows, dequantize_weights


class Loop(Gemm):
    """One product for each expert that has rows. It takes all weights."""

    name = "loop"

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        return None

    def trains(self, gate_up: Tensor, down: Tensor) -> bool:
        return True

    def multiply(
        self,
        rows: Tensor,
        row_scales: Tensor | None,
        weights: Tensor,
        weight_scales: Tensor | None,
        ends: Tensor,
        alignment: int,
    ) -> Tensor:
        out = rows.new_empty(rows.shape[0], weights.shape[1], dtype=product_dtype(weights))
        start = 0
        for i, end in enumerate(ends.tolist()):
            if start < end:
                expert, segment = weights[i], rows[start:end]
                if weight_scales is not None:
                    expert = dequantize_weights(expert, weight_scales[i], out.dtype)
                if row_scales is not None:
                    segment = dequantize_rows(segment, row_scales[start:end], out.dtype)
                torch.mm(segment, expert.T, out=out[start:end])
            start = end
        return out

    def multiply_for_weights(self, grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        ends = offsets.tolist()
        out = rows.new_empty(len(ends) - 1, grad.shape[1], rows.shape[1])
        for i, (start, end) in enumerate(itertools.pairwise(ends)):
            torch.mm(grad[start:end].T, rows[start:end], out=out[i])
        return out
