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
    found: Tensor = _Logits.apply(x_TD, weight, bias, invariant)
    return found


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
        if not invariant:
            return F.linear(x_TD.to(weight.dtype), weight, bias)
        found: Tensor = _product(x_TD.to(weight.dtype), weight)
        return found if bias is None else found + bias

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        by_x = by_weight = by_bias = None
        if of_x:
            by_x = (_product(grad_TE, weight.t()) if ctx.invariant else grad_TE @ weight).to(
                x_TD.dtype
            )
        if of_weight:
            x_TD = x_TD.to(weight.dtype)
            by_weight = grad_TE.t() @ x_TD.where((grad_TE != 0).any(1, keepdim=True), 0.0)
        if of_bias:
            by_bias = grad_TE.sum(0)
        return by_x, by_weight, by_bias, None


@named("epmoe::invariant_product")
def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, k] · weight [n, k]ᵀ, which may be transposed; rows have bits of their own."""
    if x.is_cuda:
        product: Tensor = ops.invariant_linear(x.contiguous(), weight.contiguous())
        return product
    out = x.new_empty(len(x), len(weight))
    multiply_blocks(x, weight, out)
    return out


@_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
