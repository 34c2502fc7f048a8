"""A GEMM for weights that no library takes: a loop over experts. The host waits for the device."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import Gemm, Scaled, plain_rows
from epmoe.local.weight_formats import dequantize_weights, product_dtype


class Loop(Gemm):
    """A GEMM that computes one product for each expert that has rows. It takes all weights."""

    name = "loop"
    takes_tensor_scales = True

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        return None

    def trains(self, gate_up: Tensor, down: Tensor) -> bool:
        return True

    def is_capturable(self, weights: Tensor) -> bool:
        return False

    def multiply(self, rows: Scaled, weights: Scaled, ends: Tensor, alignment: int) -> Tensor:
        """See `Gemm.multiply`. The host reads where segments end, which it waits for on a GPU."""
        values, scales = weights
        if values.is_cuda:
            self.refuse_capture(values)
        out = values.new_empty(len(rows[0]), values.shape[1], dtype=product_dtype(values))
        plain = plain_rows(rows, out.dtype)
        for i, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
            if start >= end:
                continue
            # Dequantize one expert at a time, since those of all experts would take more memory.
            expert = values[i]
            if scales is not None:
                expert = dequantize_weights(expert, scales[i], out.dtype)
            self._multiply_by(expert, plain[start:end], out[start:end])
        return out

    def _multiply_by(self, expert: Tensor, rows: Tensor, out: Tensor) -> None:
        """Multiply the rows of one expert: rows [n, k] · expert [m, k]ᵀ → out [n, m]."""
        torch.mm(rows, expert.T, out=out)

    def multiply_for_weights(self, grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        if rows.is_cuda:
            self.refuse_capture(rows)
        out = rows.new_empty(len(ends), grad.shape[1], rows.shape[1])
        for i, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
            torch.mm(grad[start:end].T, rows[start:end], out=out[i])
        return out
