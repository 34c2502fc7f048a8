"""Logits of a router, with gradients; on request in one order of sums, so that a token has one
value in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.local.gemm.blocks import multiply_blocks
from epmoe.native import ops
from epmoe.native.named import named


def router_logits(
    x_TD: Tensor, weight: Tensor, bias: Tensor | None, *, invariant: bool = False
) -> Tensor:
    """Logits [T, E] of tokens [T, D] by a router [E, D], in its dtype, with gradients that padding
    does not touch. `invariant`: those of a token, and its gradient, have the same bits in any
    batch.
    """
    logits_TE: Tensor = _Logits.apply(x_TD, weight, bias, invariant)
    return logits_TE


class _Logits(torch.autograd.Function):
    """A token whose logits get gradients of 0, such as padding, gives the weights none, whatever it
    holds.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weight)
        ctx.invariant = invariant
        x_TD = x_TD.to(weight.dtype)
        if not invariant:
            return F.linear(x_TD, weight, bias)
        logits_TE: Tensor = _product(x_TD, weight)
        if bias is not None:
            logits_TE = logits_TE + bias
        return logits_TE

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight = ctx.saved_tensors
        needs_x_grad, needs_weight_grad, needs_bias_grad, _ = ctx.needs_input_grad
        grad_x_TD = grad_weight = grad_bias = None
        if needs_x_grad:
            grad_x_TD = _product(grad_TE, weight.t()) if ctx.invariant else grad_TE @ weight
            grad_x_TD = grad_x_TD.to(x_TD.dtype)
        if needs_weight_grad:
            # Padding may hold NaN, which a gradient of 0 would not stop.
            has_grad_T1 = (grad_TE != 0).any(1, keepdim=True)
            grad_weight = grad_TE.t() @ x_TD.to(weight.dtype).where(has_grad_T1, 0.0)
        if needs_bias_grad:
            grad_bias = grad_TE.sum(0)
        return grad_x_TD, grad_weight, grad_bias, None


@named("epmoe::invariant_product")
def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, k] · weight [n, k]ᵀ, which may be transposed. The bits of a row of the product depend
    on that row of x only.
    """
    if x.is_cuda:
        product: Tensor = ops.invariant_linear(x.contiguous(), weight.contiguous())
        return product
    out = x.new_empty(len(x), len(weight))
    multiply_blocks(x, weight, out)
    return out


@_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
