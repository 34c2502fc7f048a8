"""Route with gradients: the experts and weights of `epmoe.route`, and what the weights say to the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epmoe.local.route import OWN_CHOICE, Routing
from epmoe.local.route import route as forward_only
from epmoe.native.arguments import FLOATS, INTS, check_tensor, describe, token_count
from epmoe.training.debts import find


def route(
    logits: Tensor,
    top_k: int,
    *,
    ids: Tensor | None = None,
    num_tokens: int | Tensor | None = None,
    **options: Any,
) -> Routing:
    """`epmoe.route`, with its arguments and errors, whose weights have gradients.

    The choice of experts has none, so a bias gets none either. A token whose scores are not finite, and padding, give
    the logits gradients of 0; so does a score that is not finite under sigmoid.

    `ids`, int32 or int64 [T, K], take the place of the choice, such as those of a rollout. Other numbers than those of
    experts get weights of 0. A token whose first id is −2 takes its own choice. Where `ids` are the choice's own, as
    without `ids`, weights have the bits of `epmoe.route`; other weights are right to the last bits. There are no
    `counters`.
    """
    return counted(0, logits, top_k=top_k, ids=ids, num_tokens=num_tokens, **options)


def counted(
    number: int, logits: Tensor, *, top_k: int, ids: Tensor | None = None, bias: Tensor | None = None,
    num_tokens: Any = None,
    scoring: str = "softmax", renormalize: bool = False, renormalize_epsilon: float = 0.0,
    num_expert_groups: int = 1, top_groups: int = 1, scores_per_group: int | None = None,
    routed_scaling_factor: float = 1.0, id_dtype: torch.dtype = torch.int32,
) -> Routing:  # fmt: skip
    """`route` of a layer, whose sanitised rows count in the health of the exchange with this number, 0 for none."""
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise TypeError(f"`logits` must be fp32, fp16 or bf16 [T, E], got {describe(logits)}")
    if ids is not None:
        check_tensor("logits", logits, FLOATS, ("T", "E"))
        check_tensor("ids", ids, INTS, (logits.shape[0], "K"), logits.device)
        top_k, id_dtype = ids.shape[1], ids.dtype
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"`scoring` must be 'softmax' or 'sigmoid', got {scoring!r}")
    tokens, num_real = token_count(num_tokens, logits.shape[0], logits.device)
    ids, weights = train_route(
        logits, top_k, ids, bias, tokens, num_real, scoring, renormalize, float(renormalize_epsilon), num_expert_groups,
        top_groups, scores_per_group, float(routed_scaling_factor), id_dtype, number,
    )  # fmt: skip
    return Routing(ids, weights)


@torch.library.custom_op("epmoe::train_route", mutates_args=())
def train_route(
    logits: Tensor,
    top_k: int,
    ids: Tensor | None,
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
    counters = find(number).forward.exchange.views["health.counters"] if number and ids is None else None
    chosen = forward_only(
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
    if ids is None:
        return chosen
    tokens = torch.arange(len(ids), device=ids.device)[:, None]
    real = tokens < (num_real if num_tokens is None else num_tokens)
    ids = chosen.ids.where(ids[:, :1] == OWN_CHOICE, ids).where(real, logits.shape[1])
    weights = _weights_of(logits, ids, real, scoring, renormalize, renormalize_epsilon) * routed_scaling_factor
    return ids, chosen.weights.where((ids == chosen.ids).all(1, keepdim=True), weights)


@train_route.register_fake
def _(logits: Tensor, top_k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=rest[-2]), logits.new_empty(shape, dtype=torch.float32)


def _scores_of(logits: Tensor, scoring: str) -> Tensor:
    """fp32 [T, E]; those that are not finite are 0."""
    scores_TE = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(1)
    return scores_TE.where(scores_TE.isfinite(), 0.0)


def _weights_of(logits: Tensor, ids: Tensor, real: Tensor, scoring: str, renormalize: bool, epsilon: float) -> Tensor:
    """fp32 [T, K] of given experts, before scaling. `real` [T, 1] are tokens."""
    real = real & (ids >= 0) & (ids < logits.shape[1])
    weights = _scores_of(logits, scoring).gather(1, ids.long().where(real, 0)).where(real, 0.0)
    if not renormalize:
        return weights
    total = weights.sum(1, keepdim=True) + epsilon
    return weights / total.where(total != 0, 1.0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, _, _, _, ctx.scoring, ctx.renormalize, ctx.epsilon, _, _, _, ctx.factor, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, *output)


def _gradients(ctx: Any, _: None, grad_TK: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the logits, by the logarithms of the weights, which still differ where scores vanish."""
    if grad_TK is None:
        return (None,) * 15
    logits_TE, ids_TK, weights_TK = ctx.saved_tensors
    logits = logits_TE.float()
    real = weights_TK != 0  # not of padding, nor of a score that is not finite
    chosen = ids_TK.long().where(real, 0)
    grad_TK = grad_TK.float().where(real, 0.0)
    by_log = weights_TK * grad_TK
    if ctx.renormalize:  # by differences of gradients: the sum of products would cancel where one weight is all but 1
        shares_TK = weights_TK / ctx.factor
        by_log = weights_TK * ((grad_TK[:, :, None] - grad_TK[:, None]) * shares_TK[:, None]).sum(2)
        if ctx.epsilon:
            scores_TK = _scores_of(logits, ctx.scoring).gather(1, chosen).where(real, 0.0)
            by_log += weights_TK * grad_TK * (ctx.epsilon / (scores_TK.sum(1, keepdim=True) + ctx.epsilon))
    if ctx.scoring == "sigmoid":  # d log sigmoid(x) = sigmoid(-x) dx
        by_log = (by_log * logits.gather(1, chosen).neg().sigmoid()).where(real, 0.0)
    grad_TE = torch.zeros_like(logits).scatter_add_(1, chosen, by_log)
    if ctx.scoring == "softmax" and not (ctx.renormalize and ctx.epsilon == 0):  # then the sum of by_log is 0
        grad_TE = grad_TE - _scores_of(logits, ctx.scoring) * by_log.sum(1, keepdim=True)
    return grad_TE.to(logits_TE.dtype), *(None,) * 14


train_route.register_autograd(_gradients, setup_context=_save)
