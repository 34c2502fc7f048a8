"""The logits of a router, with gradients.

On request all sums have one fixed order. Then the logits of a token have the same bits whatever
other tokens are in the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.local.gemm.blocks import multiply_blocks
from epmoe.native import ops
from epmoe.native.arguments import contiguous_rows
from epmoe.native.named import named


def router_logits(
    x_TD: Tensor, weight: Tensor, bias: Tensor | None, *, invariant: bool = False
) -> Tensor:
    """Compute the logits [T, E] of tokens [T, D] by the weight [E, D] of a router, with gradients.

    The logits have the dtype of the weight. Tokens of padding, whose logits get gradients of 0,
    have no effect on the gradients of the router, whatever values they hold. With `invariant`, the
    logits of a token and its gradient have the same bits in any batch.
    """
    logits_TE: Tensor = _Logits.apply(x_TD, weight, bias, invariant)
    return logits_TE


def logits_forward(x_TD: Tensor, weight: Tensor, bias: Tensor | None, *, invariant: bool) -> Tensor:
    """Compute the logits as `router_logits` does, without gradients."""
    x_TD = x_TD.to(weight.dtype)
    if not invariant:
        return F.linear(x_TD, weight, bias)
    logits_TE: Tensor = _product(x_TD, weight)
    return logits_TE if bias is None else logits_TE + bias


def weight_gradient(grad_TE: Tensor, x_TD: Tensor) -> Tensor:
    """The gradient [E, D] of the router's weight, by the gradient of logits [T, E].

    A token whose logits all have gradients of 0, such as padding, adds nothing, even if the token
    holds NaN or Inf.
    """
    if torch.is_grad_enabled():
        # A gradient of this gradient is wanted, which torch can compute for its own operators.
        is_reached_T1 = (grad_TE != 0).any(1, keepdim=True)
        reached_TD = x_TD.to(grad_TE.dtype).where(is_reached_T1, 0.0)
    else:
        reached_TD = ops.reached_rows(contiguous_rows(x_TD), grad_TE.contiguous())
    return grad_TE.t() @ reached_TD


def x_gradient(grad_TE: Tensor, weight: Tensor, *, invariant: bool) -> Tensor:
    """The gradient [T, D] of the tokens, by that of logits [T, E], in the router's dtype."""
    if invariant:
        grad_TD: Tensor = _product(grad_TE, weight.t())
        return grad_TD
    return grad_TE @ weight


class _Logits(torch.autograd.Function):
    """The logits of `router_logits` for autograd."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weight)
        ctx.invariant = invariant
        return logits_forward(x_TD, weight, bias, invariant=invariant)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = None
        grad_weight = None
        grad_bias = None
        if needs_x:
            grad_x = x_gradient(grad_TE, weight, invariant=ctx.invariant).to(x_TD.dtype)
        if needs_weight:
            grad_weight = weight_gradient(grad_TE, x_TD)
        if needs_bias:
            grad_bias = grad_TE.sum(0)
        return grad_x, grad_weight, grad_bias, None


@named("epmoe::invariant_product")
def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x [T, k] · weight [n, k]ᵀ with one fixed order of sums.

    The bits of a row of the product depend on that row of x and the weight only. The weight may be
    a transposed view.
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
