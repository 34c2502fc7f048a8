"""Route with gradients: the experts and weights of `epmoe.route`, and what the weights say to the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epmoe.local.gemm.blocks import linear
from epmoe.local.route import Routing
from epmoe.local.route import route as forward_only
from epmoe.native.arguments import describe, token_count
from epmoe.training.passes import find


def route(logits: Tensor, top_k: int, *, num_tokens: int | Tensor | None = None, **options: Any) -> Routing:
    """`epmoe.route`, whose weights have gradients.

    The choice of experts has none, so a bias gets none either. A token whose scores are not finite, and padding, give
    the logits gradients of 0; so does a score that is not finite under sigmoid.

    Args:
        logits: [T, E] fp32, fp16 or bf16.
        top_k: K.
        num_tokens: real tokens.
        options: other arguments of `epmoe.route`, but for `counters`.

    Returns:
        ids [T, K] and weights fp32 [T, K], bit by bit those of `epmoe.route`.

    Raises:
        TypeError: see `epmoe.route`.
        ValueError: see `epmoe.route`.
    """
    return counted(0, logits, top_k=top_k, num_tokens=num_tokens, **options)


def counted(
    number: int, logits: Tensor, *, top_k: int, bias: Tensor | None = None, num_tokens: Any = None,
    scoring: str = "softmax", renormalize: bool = False, renormalize_epsilon: float = 0.0,
    num_expert_groups: int = 1, top_groups: int = 1, scores_per_group: int | None = None,
    routed_scaling_factor: float = 1.0, id_dtype: torch.dtype = torch.int32,
) -> Routing:  # fmt: skip
    """`route` of a layer, whose sanitised rows count in the health of the exchange with this number, 0 for none."""
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise TypeError(f"`logits` must be fp32, fp16 or bf16 [T, E], got {describe(logits)}")
    tokens, num_real = token_count(num_tokens, logits.shape[0], logits.device)
    ids, weights = train_route(
        logits, top_k, bias, tokens, num_real, scoring, renormalize, float(renormalize_epsilon), num_expert_groups,
        top_groups, scores_per_group, float(routed_scaling_factor), id_dtype, number,
    )  # fmt: skip
    return Routing(ids, weights)


class _Scores(torch.autograd.Function):
    """Logits. A token whose logits get gradients of 0, such as padding, gives the weights none, whatever it holds."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight: Tensor, bias: Tensor | None, by_block: bool) -> Tensor:
        ctx.save_for_backward(x_TD, weight)
        return linear(x_TD.to(weight.dtype), weight, bias, by_block)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        by_x = by_weight = by_bias = None
        if of_x:
            by_x = (grad_TE @ weight).to(x_TD.dtype)
        if of_weight:
            x_TD = x_TD.to(weight.dtype)
            by_weight = grad_TE.t() @ x_TD.where((grad_TE != 0).any(1, keepdim=True), 0.0)
        if of_bias:
            by_bias = grad_TE.sum(0)
        return by_x, by_weight, by_bias, None


def scores(x_TD: Tensor, weight: Tensor, bias: Tensor | None, *, by_block: bool = False) -> Tensor:
    """Logits [T, E] of tokens [T, D] by a router [E, D], in its dtype, with gradients that padding does not touch.

    `by_block`: a token's logits have the same bits in any batch, on CPUs.
    """
    logits: Tensor = _Scores.apply(x_TD, weight, bias, by_block)
    return logits


@torch.library.custom_op("epmoe::train_route", mutates_args=())
def train_route(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    num_tokens: Tensor | None,
    num_real: int,
    scoring: str,
    renormalize: bool,
    renormalize_epsilon: float,
    num_expert_groups: int,
    top_groups: int,
    scores_per_group: int | None,
    routed_scaling_factor: float,
    id_dtype: torch.dtype,
    number: int,
) -> tuple[Tensor, Tensor]:
    """ids [T, K] and weights fp32 [T, K]."""
    counters = find(number).forward.exchange.views["health.counters"] if number else None
    return forward_only(
        logits.detach(),
        top_k,
        bias=bias,
        num_tokens=num_real if num_tokens is None else num_tokens,
        scoring=scoring,  # type: ignore[arg-type]
        renormalize=renormalize,
        renormalize_epsilon=renormalize_epsilon,
        num_expert_groups=num_expert_groups,
        top_groups=top_groups,
        scores_per_group=scores_per_group,
        routed_scaling_factor=routed_scaling_factor,
        id_dtype=id_dtype,
        counters=counters,
    )


@train_route.register_fake
def _(logits: Tensor, top_k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=rest[-2]), logits.new_empty(shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, _, _, ctx.scoring, ctx.renormalize, ctx.epsilon, _, _, _, ctx.factor, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, *output)


def _gradients(ctx: Any, _: None, grad_TK: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the logits, by the logarithms of the weights, which still differ where scores vanish."""
    if grad_TK is None:
        return (None,) * 14
    logits_TE, ids_TK, weights_TK = ctx.saved_tensors
    logits = logits_TE.float()
    real = weights_TK != 0  # not of padding, nor of a score that is not finite
    chosen = ids_TK.long().where(real, 0)
    by_log = (grad_TK * weights_TK).where(real, 0.0)
    if ctx.renormalize:
        by_log = by_log - weights_TK / ctx.factor * by_log.sum(1, keepdim=True)
    if ctx.scoring == "sigmoid":  # d log sigmoid(x) = sigmoid(-x) dx
        by_log = (by_log * logits.gather(1, chosen).neg().sigmoid()).where(real, 0.0)
    grad_TE = torch.zeros_like(logits).scatter_add_(1, chosen, by_log)
    if ctx.scoring == "softmax" and not (ctx.renormalize and ctx.epsilon == 0):  # then the sum of by_log is 0
        scores_TE = logits.softmax(1)
        grad_TE = grad_TE - scores_TE.where(scores_TE.isfinite(), 0.0) * by_log.sum(1, keepdim=True)
    return grad_TE.to(logits_TE.dtype), *(None,) * 13


train_route.register_autograd(_gradients, setup_context=_save)
