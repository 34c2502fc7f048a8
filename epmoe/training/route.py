"""Route with gradients: the experts and weights of `epmoe.route`, and what the weights say to the
logits.
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
    """`epmoe.route`, with its arguments and errors, whose weights have gradients.

    The choice of experts has none, so a bias gets none either. A token whose scores are not finite,
    and padding, give the logits gradients of 0; so does a score that is not finite under sigmoid.

    Where `ids` are the choice's own, as without `ids`, weights have the bits of `epmoe.route`;
    other weights are right to the last bits. There are no `counters`.

    Args:
        logits: [T, E] fp32, fp16 or bf16.
        top_k: K; with `ids` it is their number of columns.
        ids: int32 or int64 [T, K], in place of the choice, such as those of a rollout. Other
            numbers than those of experts get weights of 0. A token whose first id is −2 takes its
            own choice.
        num_tokens: int or int32 scalar tensor on the device. Rows at and past it are padding.
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
    """`route` of a layer. Its sanitised rows count in the health of the exchange with this number;
    0: in none.
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
    """Route, or weigh the given `ids`. Returns ids [T, K] and weights fp32 [T, K]. Other arguments
    are those of `route` and `counted`.
    """
    real_tokens = num_real if num_tokens is None else num_tokens

    # A choice of its own counts in the health of the exchange; given ids are not this layer's.
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

    # Given ids, but for tokens that take their own choice, and for padding.
    E = logits.shape[1]
    padding = torch.arange(len(ids), device=ids.device)[:, None] >= real_tokens
    ids = chosen.ids.where(ids[:, :1] == OWN_CHOICE, ids).masked_fill(padding, E)

    # Their weights. A token whose ids are those of its own choice has the bits of that.
    _, scores_TK, total_T1 = _scores(
        logits, ids, (ids >= 0) & (ids < E), scoring, renormalize, renormalize_epsilon
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
    """Compute fp64 scores [T, E], those of the chosen pairs that are `real`, [T, K], and the
    numbers that divide these, [T, 1].
    """
    # Scores of all experts. What is not finite counts as 0.
    wide_TE = logits.double()
    scores_TE = wide_TE.sigmoid() if scoring == "sigmoid" else wide_TE.softmax(1)
    scores_TE = scores_TE.where(scores_TE.isfinite(), 0.0)

    # Scores of the chosen. Where `real` does not hold, the id may be no index: 0 stands for it.
    scores_TK = scores_TE.gather(1, ids.long().where(real, 0)).where(real, 0.0)

    # A sum of 0 counts as 1.
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
    """Keep what the gradients need."""
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
    """How weights follow from logits: the last arguments of the operator."""

    is_sigmoid: bool
    renormalize: bool
    renormalize_epsilon: float
    routed_scaling_factor: float


def route_gradient(
    grad_TK: Tensor, logits: Tensor, ids: Tensor, weights: Tensor, weighing: Weighing
) -> Tensor:
    """Compute the gradients [T, E] of the logits from those of weights [T, K] that `route` has
    given. They have no gradients themselves.
    """
    grad_TE: Tensor = ops.route_backward(
        grad_TK.float().contiguous(), contiguous_rows(logits), ids, weights, *weighing
    )
    return grad_TE


def _gradients(ctx: Any, _: None, grad_TK: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the logits, in fp64, since scores and differences of gradients may
    vanish.
    """
    if grad_TK is None:
        return (None,) * 7
    logits, ids, weights = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return route_gradient(grad_TK, logits, ids, weights, ctx.weighing), *(None,) * 6
    # Torch differentiates this once more; the operator above has no gradients of gradients.
    real = weights != 0  # not of padding, nor of a score that is not finite
    scores_TE, scores_TK, total_T1 = _scores(logits, ids, real, *ctx.scoring)
    scoring, renormalize, _ = ctx.scoring

    # From weights to scores of the chosen, and to those of all experts.
    grad_scores_TK = grad_TK.double().where(real, 0.0) * ctx.factor
    if renormalize:
        by_total_T1 = (grad_scores_TK * scores_TK).sum(1, keepdim=True) / total_T1
        grad_scores_TK = grad_scores_TK - by_total_T1
    grad_scores_TK = (grad_scores_TK / total_T1).where(real, 0.0)
    indices_TK = ids.long().where(real, 0)
    grad_TE = torch.zeros_like(scores_TE).scatter_add_(1, indices_TK, grad_scores_TK)

    # From scores to logits.
    if scoring == "sigmoid":
        grad_TE = grad_TE * (1 - scores_TE)
    else:
        grad_TE = grad_TE - (grad_TE * scores_TE).sum(1, keepdim=True)
    return (grad_TE * scores_TE).to(logits.dtype), *(None,) * 6


train_route.register_autograd(_gradients, setup_context=_save)
