"""Routing with gradients: the experts and weights of `epmoe.route`, and the gradients that the
logits get from the weights.

Letters: T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.local.route import OWN_CHOICE, Routing
from epmoe.local.route import route as forward_only
from epmoe.native import ops
from epmoe.native.arguments import (
    FLOATS,
    INTS,
    check_tensor,
    contiguous_rows,
    describe,
    token_count,
)
from epmoe.native.named import named
from epmoe.training.owed_rounds import find


def route(
    logits: Tensor,
    top_k: int,
    *,
    ids: Tensor | None = None,
    num_tokens: int | Tensor | None = None,
    **options: Any,
) -> Routing:
    """Choose experts and weigh them as `epmoe.route` does, with weights that have gradients. It
    takes the arguments of `epmoe.route`, except `counters`, and raises the same errors.

    The choice of experts has no gradient, so a bias that steers the choice gets none either. The
    logits of padding, and of a token whose scores are not finite, get gradients of 0. So does a
    single logit whose score is not finite under sigmoid.

    Without `ids`, the weights have the same bits as those of `epmoe.route`. So have the weights of
    given `ids` that equal the router's own choice. The weights of other ids may differ from exact
    ones in the last bits.

    Args:
        logits: [T, E] fp32, fp16 or bf16, the logits of T tokens for E experts.
        top_k: K, the number of experts of a token. If `ids` are given, their number of columns
            counts instead.
        ids: int32 or int64 [T, K], experts to weigh in place of the router's choice, such as those
            of a rollout. An id that is no expert's number gets a weight of 0. A token whose first
            id is −2 takes its own choice.
        num_tokens: the number of real tokens, an int or an int32 scalar tensor on the device. Later
            rows are padding.
        options: other arguments of `epmoe.route`.

    Returns:
        ids [T, K], and weights fp32 [T, K] with gradients.
    """
    return counted(0, logits, top_k=top_k, ids=ids, num_tokens=num_tokens, **options)


def counted(
    number: int,
    logits: Tensor,
    *,
    top_k: int,
    ids: Tensor | None = None,
    num_tokens: Any = None,
    **options: Any,
) -> Routing:
    """Do what `route` does, for a layer.

    `number` is that of the layer's `TrainingExchange`. Its health counts the rows of logits that
    were not finite and have been replaced. With the number 0 nothing counts them.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise TypeError(f"`logits` must be fp32, fp16 or bf16 [T, E], got {describe(logits)}")
    if ids is not None:
        check_tensor("logits", logits, FLOATS, ("T", "E"))
        check_tensor("ids", ids, INTS, (logits.shape[0], "K"), logits.device)
        top_k = ids.shape[1]
        options["id_dtype"] = ids.dtype
    tokens, num_real = token_count(num_tokens, logits.shape[0], logits.device)
    bias = options.pop("bias", None)
    return Routing(*train_route(logits, top_k, ids, bias, tokens, num_real, number, **options))


@named("epmoe::train_route")
def train_route(
    logits: Tensor,
    top_k: int,
    ids: Tensor | None,
    bias: Tensor | None,
    num_tokens: Tensor | None,
    num_real: int,
    number: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    renormalize_epsilon: float = 0.0,
    num_expert_groups: int = 1,
    top_groups: int = 1,
    scores_per_group: int | None = None,
    routed_scaling_factor: float = 1.0,
    id_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:
    """Choose experts and weigh them; or, if `ids` are given, weigh these. Returns ids [T, K] and
    weights fp32 [T, K]. `counted` calls this operator, and has the same arguments.
    """
    real_tokens = num_real if num_tokens is None else num_tokens

    # The health of the exchange counts replaced rows of logits where these choose the experts.
    counters = None
    if number and ids is None:
        counters = find(number).forward.exchange.views["health.counters"]
    chosen = forward_only(
        logits.detach(),
        top_k,
        bias=bias,
        num_tokens=real_tokens,
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

    # Take the given ids, except for tokens that take their own choice. Padding gets E, which is no
    # expert's number.
    E = logits.shape[1]
    padding = torch.arange(len(ids), device=ids.device)[:, None] >= real_tokens
    ids = chosen.ids.where(ids[:, :1] == OWN_CHOICE, ids).masked_fill(padding, E)

    # Compute the weights of these ids. A token whose ids equal its own choice gets the weights of
    # the choice, whose bits are those of `epmoe.route`.
    is_expert = (ids >= 0) & (ids < E)
    _, scores_TK, total_T1 = _scores(
        logits, ids, is_expert, scoring, renormalize, renormalize_epsilon
    )
    weights = (scores_TK / total_T1 * routed_scaling_factor).float()
    is_own_choice = (ids == chosen.ids).all(1, keepdim=True)
    return ids, chosen.weights.where(is_own_choice, weights)


@train_route.register_fake
def _(
    logits: Tensor, top_k: int, *rest: Any, id_dtype: torch.dtype = torch.int32, **options: Any
) -> Any:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=id_dtype), logits.new_empty(shape, dtype=torch.float32)


def _scores(
    logits: Tensor, ids: Tensor, real: Tensor, scoring: str, renormalize: bool, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the scores from which weights follow, in fp64.

    Returns the scores of all experts [T, E], the scores of the chosen experts `ids` [T, K], and for
    each token the number by which the latter are divided [T, 1]. `real` [T, K] says which of `ids`
    have a score; the others get 0.
    """
    # Compute the scores of all experts. A score that is not finite counts as 0.
    wide_TE = logits.double()
    scores_TE = wide_TE.sigmoid() if scoring == "sigmoid" else wide_TE.softmax(1)
    scores_TE = scores_TE.where(scores_TE.isfinite(), 0.0)

    # Pick the scores of the chosen experts. An id that is not `real` may be no index, so `gather`
    # reads index 0 in its place, and the result is then replaced by 0.
    scores_TK = scores_TE.gather(1, ids.long().where(real, 0)).where(real, 0.0)

    # Weights are divided by the sum of the token's scores. A sum of 0 counts as 1.
    if renormalize:
        total_T1 = scores_TK.sum(1, keepdim=True) + epsilon
    else:
        total_T1 = torch.ones_like(scores_TK[:, :1])
    return scores_TE, scores_TK, total_T1.where(total_T1 != 0, 1.0)


def _save(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    """Keep the tensors and options that `_gradients` needs. torch calls it after the operator."""
    options = keyword_only_inputs
    scoring = options["scoring"]
    renormalize = options["renormalize"]
    epsilon = options["renormalize_epsilon"]
    factor = options["routed_scaling_factor"]
    ctx.weighing = Weighing(scoring == "sigmoid", renormalize, epsilon, factor)
    ctx.scoring = scoring, renormalize, epsilon
    ctx.factor = factor
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], *output)


class Weighing(NamedTuple):
    """How weights follow from logits. The fields are the last arguments of the operator
    `route_backward`, in this order.
    """

    is_sigmoid: bool
    renormalize: bool
    renormalize_epsilon: float
    routed_scaling_factor: float


def route_gradient(
    grad_TK: Tensor, logits: Tensor, ids: Tensor, weights: Tensor, weighing: Weighing
) -> Tensor:
    """Compute the gradients of the logits [T, E] from `grad_TK`, the gradients of the weights that
    `route` has returned. The result cannot be differentiated again.
    """
    grad_TE: Tensor = ops.route_backward(
        grad_TK.float().contiguous(), contiguous_rows(logits), ids, weights, *weighing
    )
    return grad_TE


def _gradients(ctx: Any, _: None, grad_TK: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the logits from those of the weights. torch calls it in a backward
    pass, with one gradient for each output of `train_route`. The ids have none.

    If the caller wants gradients of gradients, the computation here is made of operations of torch,
    which can be differentiated. It uses fp64, since scores may be tiny, and differences of
    gradients, too.
    """
    if grad_TK is None:
        return (None,) * 7
    logits, ids, weights = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return route_gradient(grad_TK, logits, ids, weights, ctx.weighing), *(None,) * 6

    # A weight of 0 belongs to padding, or to a score that is not finite. It gives no gradient.
    real = weights != 0
    scores_TE, scores_TK, total_T1 = _scores(logits, ids, real, *ctx.scoring)
    scoring, renormalize, _ = ctx.scoring

    # Go back from the weights to the scores of the chosen experts, and to those of all experts.
    # With `renormalize`, each weight depends on all scores of the token, through their sum.
    grad_scores_TK = grad_TK.double().where(real, 0.0) * ctx.factor
    if renormalize:
        by_total_T1 = (grad_scores_TK * scores_TK).sum(1, keepdim=True) / total_T1
        grad_scores_TK = grad_scores_TK - by_total_T1
    grad_scores_TK = (grad_scores_TK / total_T1).where(real, 0.0)
    indices_TK = ids.long().where(real, 0)
    grad_TE = torch.zeros_like(scores_TE).scatter_add_(1, indices_TK, grad_scores_TK)

    # Go back from the scores to the logits.
    if scoring == "sigmoid":
        grad_TE = grad_TE * (1 - scores_TE)
    else:
        grad_TE = grad_TE - (grad_TE * scores_TE).sum(1, keepdim=True)
    return (grad_TE * scores_TE).to(logits.dtype), *(None,) * 6


train_route.register_autograd(_gradients, setup_context=_save)
