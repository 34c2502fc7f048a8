"""Route: choose K distinct experts for each token, and their weights.

The weights are finite for any bits that the logits may have.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from epmoe.native import ops
from epmoe.native.arguments import (
    FLOATS,
    INTS,
    check_forward_only,
    check_number,
    check_tensor,
    contiguous_rows,
    describe_fields,
    token_count,
)

MAX_TOP_K_ON_CUDA = 32
OWN_CHOICE = -2
"""An id in a routing that a caller gives: if it is the first id of a token, the router chooses the
experts of this token.
"""


class Routing(NamedTuple):
    """The K experts of each token: ids int32 or int64 [T, K], weights fp32 [T, K]."""

    ids: Tensor
    weights: Tensor

    def __repr__(self) -> str:
        return describe_fields(self, self._asdict())


class Choice(NamedTuple):
    """How experts are chosen by logits [T, E] of T tokens and E experts.

    The fields are the arguments of `route`, in the order in which the operator takes them. A layer
    checks them once, by `checked`, and uses them in many calls.
    """

    num_experts: int
    """E, the number of experts"""
    top_k: int
    is_sigmoid: bool
    renormalize: bool
    renormalize_epsilon: float
    num_expert_groups: int
    top_groups: int
    scores_with_bias: int
    """by how many of its best scores a group is rated if a call has a bias"""
    scores_without_bias: int
    """by how many of its best scores a group is rated if a call has no bias"""
    routed_scaling_factor: float
    has_wide_ids: bool
    """whether ids are int64"""

    @classmethod
    def checked(
        cls,
        num_experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        renormalize: bool = False,
        renormalize_epsilon: float = 0.0,
        num_expert_groups: int = 1,
        top_groups: int = 1,
        scores_per_group: int | None = None,
        routed_scaling_factor: float = 1.0,
        id_dtype: torch.dtype = torch.int32,
    ) -> Self:
        """Check arguments of `route`. Raises the errors of `route`."""
        # Check how scores are computed, and how many experts a token has.
        E = num_experts
        if not 1 <= E <= 4096:
            raise ValueError(f"`logits` must have from 1 to 4096 experts, got {E}")
        if isinstance(top_k, bool) or not isinstance(top_k, int):
            raise TypeError(f"`top_k` must be an int, got {type(top_k).__name__}")
        if not 1 <= top_k <= E:
            raise ValueError(f"`top_k` must be from 1 to the number of experts, {E}, got {top_k}")
        if scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"`scoring` must be 'softmax' or 'sigmoid', got {scoring!r}")

        # Check the groups of experts. A token can only have experts of its best groups.
        if num_expert_groups < 1 or E % num_expert_groups:
            raise ValueError(
                f"`num_expert_groups` must divide the number of experts, {E}, got "
                f"{num_expert_groups}"
            )
        group_size = E // num_expert_groups
        if not 1 <= top_groups <= num_expert_groups or top_groups * group_size < top_k:
            raise ValueError(
                f"`top_groups` must be at most num_expert_groups = {num_expert_groups} and leave "
                f"at least top_k = {top_k} experts, got {top_groups}"
            )
        if scores_per_group is None:
            # DeepSeek-V3 rates a group by two biased scores, DeepSeek-V2 by its best one.
            scores_with_bias = min(2, group_size)
            scores_without_bias = 1
        elif 1 <= scores_per_group <= group_size:
            scores_with_bias = scores_per_group
            scores_without_bias = scores_per_group
        else:
            raise ValueError(
                f"`scores_per_group` must be from 1 to the {group_size} experts of a group, got "
                f"{scores_per_group}"
            )

        # Check how weights are scaled.
        if not 0 <= renormalize_epsilon <= 1:
            raise ValueError(
                f"`renormalize_epsilon` must be from 0 to 1, got {renormalize_epsilon}"
            )
        check_number("routed_scaling_factor", routed_scaling_factor)
        if id_dtype not in INTS:
            raise TypeError(f"`id_dtype` must be torch.int32 or torch.int64, got {id_dtype}")
        return cls(
            num_experts=E,
            top_k=top_k,
            is_sigmoid=scoring == "sigmoid",
            renormalize=renormalize,
            renormalize_epsilon=renormalize_epsilon,
            num_expert_groups=num_expert_groups,
            top_groups=top_groups,
            scores_with_bias=scores_with_bias,
            scores_without_bias=scores_without_bias,
            routed_scaling_factor=routed_scaling_factor,
            has_wide_ids=id_dtype == torch.int64,
        )

    def of(
        self,
        logits: Tensor,
        bias: Tensor | None,
        num_tokens: Tensor | None,
        num_real: int,
        counters: Tensor | None,
    ) -> Routing:
        """Choose experts for each row of logits [T, E], whose shape and dtype are not checked.

        `bias` and `counters` are those of `route`. `num_tokens` and `num_real` are the results of
        `token_count`: one of them says how many rows are not padding. Raises the errors of `route`
        for the bias, and for a `top_k` that is too large on CUDA.
        """
        if self.top_k > MAX_TOP_K_ON_CUDA and logits.is_cuda:
            raise ValueError(
                f"`top_k` must be at most {MAX_TOP_K_ON_CUDA} on CUDA, got {self.top_k}"
            )
        scores_per_group = self.scores_without_bias
        if bias is not None:
            scores_per_group = self.scores_with_bias
            bias = _checked_bias(bias, self.num_experts, logits.device)
        ids, weights = ops.route(
            contiguous_rows(logits),
            self.top_k,
            bias,
            num_tokens,
            num_real,
            self.is_sigmoid,
            self.renormalize,
            self.renormalize_epsilon,
            self.num_expert_groups,
            self.top_groups,
            scores_per_group,
            self.routed_scaling_factor,
            self.has_wide_ids,
            counters,
        )
        return Routing(ids, weights)


def _checked_bias(bias: Tensor, num_experts: int, device: torch.device) -> Tensor:
    """Check a bias [E] and make it fp32 and contiguous, as the operator needs it.

    Raises the errors of `route`.
    """
    check_tensor("bias", bias, FLOATS, (num_experts,), device)
    if torch.is_grad_enabled():
        check_forward_only(bias)
    if bias.dtype != torch.float32:
        bias = bias.float()
    return bias.contiguous()


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    bias: Tensor | None = None,
    renormalize: bool = False,
    renormalize_epsilon: float = 0.0,
    num_expert_groups: int = 1,
    top_groups: int = 1,
    scores_per_group: int | None = None,
    routed_scaling_factor: float = 1.0,
    num_tokens: int | Tensor | None = None,
    id_dtype: torch.dtype = torch.int32,
    counters: Tensor | None = None,
) -> Routing:
    """Choose `top_k` experts for each token by the logits of a router.

    Logits become scores by softmax or sigmoid. A score that is not finite counts as 0. Therefore,
    for any bits of logits and bias, the ids of a token are distinct and in [0, E), and its weights
    are finite. The expert with the best score comes first, and of equal scores the lower id.
    Without a bias the logits themselves decide, since both functions are monotonic.

    Args:
        logits: [T, E] fp32, fp16 or bf16, for T tokens and E experts, with any row stride. E is at
            most 4096.
        top_k: K, the number of experts of a token: from 1 to E, and at most 32 on CUDA.
        scoring: how a logit becomes a score: by softmax over the experts of a token, or by sigmoid.
        bias: [E] fp32, fp16 or bf16. It is added to the scores in fp32 for the choice of experts,
            but not for their weights (auxiliary-loss-free balancing of DeepSeek-V3).
        renormalize: whether to divide the weights of a token by their sum. A sum of 0 counts as 1.
        renormalize_epsilon: a number from 0 to 1 that is added to this sum. Scores that are much
            smaller than it become weights near 0.
        num_expert_groups: the number of groups into which the experts are divided, each of
            E / num_expert_groups experts that follow one another.
        top_groups: how many groups a token may choose experts from. It takes the best ones.
        scores_per_group: a group is rated by the sum of this many of its best scores, with the
            bias. By default it is two with a bias and one without (group-limited routing of
            DeepSeek-V3 and DeepSeek-V2). Megatron takes `top_k // top_groups`.
        routed_scaling_factor: a number by which the weights are multiplied at the end.
        num_tokens: how many rows are tokens: an int, or an int32 scalar tensor on the device. All
            later rows are padding. They get ids E and weights 0.
        id_dtype: the dtype of ids, torch.int32 or torch.int64.
        counters: int64 [8], to which the health counters are added, in the order of
            `epmoe.exchange.health.COUNTERS`.

    Returns:
        The ids of the experts, [T, K] in `id_dtype`, and their weights, fp32 [T, K].

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape, value or device.
        RuntimeError: `logits` or `bias` requires grad in grad mode.
    """
    check_tensor("logits", logits, FLOATS, ("T", "E"))
    choice = Choice.checked(
        logits.shape[1],
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        renormalize_epsilon=renormalize_epsilon,
        num_expert_groups=num_expert_groups,
        top_groups=top_groups,
        scores_per_group=scores_per_group,
        routed_scaling_factor=routed_scaling_factor,
        id_dtype=id_dtype,
    )
    if torch.is_grad_enabled():
        check_forward_only(logits)
    tokens, num_real = token_count(num_tokens, logits.shape[0], logits.device)
    return choice.of(logits, bias, tokens, num_real, counters)
