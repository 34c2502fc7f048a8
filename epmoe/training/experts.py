"""The experts stage of training: SwiGLU experts over expert-major rows, with parameters that train."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epmoe.local.experts import without_autocast
from epmoe.local.grouped_gemm import choose
from epmoe.native import ops
from epmoe.native.arguments import FLOATS, check_tensor, dtype_name


class GroupedExperts(nn.Module):
    """This rank's experts, `down(weight · silu(gate(x)) · up(x))`, with gradients for rows, weights and parameters.

    The GEMMs of both directions are torch's `grouped_mm`, which looks at no count on the host on GPUs with bf16; where
    it does not take the parameters, a loop over the experts computes the same, and waits for the device. The activation
    and its gradients are a kernel each. Gradients have the same bits on every run. An expert without rows gets
    gradients of 0.

    Args:
        w_gate_up: fp32, fp16 or bf16 [e, 2F, D], in which each expert has F gate rows, then F up rows.
        w_down: [e, D, F], same dtype and device.
        interleaved: gate and up rows alternate in `w_gate_up`.
        limit: gate is at most this, and up lies within ± this, before the activation; None: no limit.
        alpha: the activation is gate · sigmoid(alpha · gate); 1 is silu.
        up_offset: is added to up.

    Raises:
        TypeError: a weight is no tensor, or has another dtype; fp8 does not train.
        ValueError: the shapes or devices do not fit each other.
    """

    def __init__(
        self,
        w_gate_up: Tensor,
        w_down: Tensor,
        *,
        interleaved: bool = False,
        limit: float | None = None,
        alpha: float = 1.0,
        up_offset: float = 0.0,
    ) -> None:
        check_tensor("w_down", w_down, FLOATS, ("e", "D", "F"))
        e, D, f = w_down.shape
        check_tensor("w_gate_up", w_gate_up, (w_down.dtype,), (e, 2 * f, D), w_down.device)
        super().__init__()
        self.w_gate_up, self.w_down = nn.Parameter(w_gate_up), nn.Parameter(w_down)
        self.interleaved, self.limit, self.alpha, self.up_offset = interleaved, limit, alpha, up_offset
        self._gemm = self._choose()

    @property
    def dtype(self) -> torch.dtype:
        """Of rows, outputs and parameters."""
        return self.w_down.dtype

    def forward(self, rows_ND: Tensor, expert_offsets: Tensor, row_weights_N: Tensor | None = None) -> Tensor:
        """Apply each expert to its segment of rows.

        Args:
            rows_ND: [N, D] in `dtype`. Rows between segments are zeros, as in `Routed.rows`; rows past the last segment
                may hold anything, and so may their outputs and gradients.
            expert_offsets: int32 [e + 1]. Expert i's segment is rows[expert_offsets[i] : expert_offsets[i + 1]].
            row_weights_N: fp32 [N], factors of the outputs, 0 between segments; None: 1.

        Returns:
            Outputs [N, D] in `dtype`.

        Raises:
            TypeError: an argument has another dtype.
            ValueError: an argument has another shape or device.
        """
        (e, D, _), device = self.w_down.shape, self.w_down.device
        check_tensor("rows", rows_ND, (self.dtype,), ("N", D), device)
        check_tensor("expert_offsets", expert_offsets, (torch.int32,), (e + 1,), device)
        if row_weights_N is not None:
            check_tensor("row_weights", row_weights_N, (torch.float32,), (rows_ND.shape[0],), device)
            row_weights_N = row_weights_N.contiguous()
        if e == 0:
            return rows_ND * 0.0
        offsets = expert_offsets.contiguous()
        gating = self.interleaved, math.inf if self.limit is None else self.limit, self.alpha, self.up_offset
        with without_autocast(device):
            gate_up = train_gemm(rows_ND.contiguous(), self.w_gate_up, offsets, self._gemm)
            activated: Tensor = ops.weighted_gates(gate_up, row_weights_N, offsets, *gating)
            out: Tensor = train_gemm(activated, self.w_down, offsets, self._gemm)
            return out

    def _choose(self) -> str:
        """torch's GEMM where it takes the products of both directions: all strides are multiples of 16 bytes."""
        (_, D, f), item = self.w_down.shape, self.w_down.element_size()
        aligned = D * item % 16 == 0 and f * item % 16 == 0
        return choose("torch", self.w_gate_up, self.w_down) if aligned else "loop"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._gemm = self._choose()
        return self

    def extra_repr(self) -> str:
        """What `repr` says of the parameters."""
        e, D, f = self.w_down.shape
        return f"e={e}, D={D}, F={f}, {dtype_name(self.dtype)}"


@torch.library.custom_op("epmoe::train_gemm", mutates_args=())
def train_gemm(rows: Tensor, weights: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    """rows [N, k] · weights [e, n, k]ᵀ → [N, n], by expert. Opaque, since compilers trace torch's in bf16 only."""
    if not len(rows):
        return rows.new_empty(0, weights.shape[1])
    if gemm == "torch":
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=offsets[1:])
    out, ends = rows.new_empty(len(rows), weights.shape[1]), offsets.tolist()
    for i in range(len(weights)):
        torch.mm(rows[ends[i] : ends[i + 1]], weights[i].T, out=out[ends[i] : ends[i + 1]])
    return out


@train_gemm.register_fake
def _(rows: Tensor, weights: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@torch.library.custom_op("epmoe::train_gemm_backward", mutates_args=())
def train_gemm_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, offsets: Tensor, gemm: str
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows [N, k] and of the weights [e, n, k], which are 0 for an expert without rows."""
    if not len(rows):
        return torch.empty_like(rows), torch.zeros_like(weights)
    if gemm == "torch":
        ends = offsets[1:]
        return F.grouped_mm(grad, weights, offs=ends), F.grouped_mm(grad.t(), rows, offs=ends)
    by_rows, by_weights = torch.empty_like(rows), torch.empty_like(weights)
    starts = offsets.tolist()
    for i in range(len(weights)):
        segment = slice(starts[i], starts[i + 1])
        torch.mm(grad[segment], weights[i], out=by_rows[segment])
        torch.mm(grad[segment].T, rows[segment], out=by_weights[i])
    return by_rows, by_weights


@train_gemm_backward.register_fake
def _(grad: Tensor, rows: Tensor, weights: Tensor, offsets: Tensor, gemm: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _save_gemm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *saved, ctx.gemm = inputs
    ctx.save_for_backward(*saved)


def _gemm_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *train_gemm_backward(grad.contiguous(), *ctx.saved_tensors, ctx.gemm), None, None


train_gemm.register_autograd(_gemm_gradients, setup_context=_save_gemm)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, row_weights, offsets, *ctx.gating = inputs
    ctx.save_for_backward(gate_up, row_weights, offsets)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate_up, row_weights, offsets = ctx.saved_tensors
    by_gate_up, by_weights = ops.weighted_gates_backward(grad.contiguous(), gate_up, row_weights, offsets, *ctx.gating)
    return by_gate_up, None if row_weights is None else by_weights, *(None,) * 5


torch.library.register_autograd("epmoe::weighted_gates", _gradients, setup_context=_save)
