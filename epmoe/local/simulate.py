"""Simulated routing for tests, benchmarks and demonstrations. A seed determines all values.

Every kind of routing gives each of the E experts a popularity, as the logarithm of a weight. For
each token, Gumbel noise is added to it. The experts with the K largest sums are then K distinct
experts, drawn without replacement in proportion to their popularity (Gumbel-top-k; Kool, van Hoof
and Welling, 2019).
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from epmoe.config.placement import Placement
from epmoe.local.route import Routing

Kind = Literal["uniform", "zipf", "normal", "group_limited", "hot_rank", "drift", "adversarial"]

# How steeply popularity falls in the kinds zipf and drift.
_ZIPF_EXPONENT = 1.2
# In the kind normal, the first and the last expert are this many standard deviations from the peak.
_NORMAL_SIGMAS = 4.0
# What is added to the logits of hot experts. It exceeds the range of the noise, so that a token
# gets other experts only if K is larger than the number of hot experts.
_HOT = 60.0
# What the kind adversarial does to a row of logits, as random numbers from 0 to 3.
_ONE_BAD_EXPERT = 0
_ALL_BAD_EXPERTS = 1
# What the kind adversarial does to a pair of a token and an expert, as random numbers from 0 to 3.
_DUPLICATE = 0
_BAD_ID = 1
_BAD_WEIGHT = 2
_UNCHANGED = 3


def simulate_logits(
    kind: Kind,
    num_tokens: int,
    num_experts: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_expert_groups: int = 8,
    top_groups: int = 4,
    ep_size: int = 4,
    hot_rank: int = 0,
    step: float = 0,
) -> torch.Tensor:
    """Make router logits [T, E] in `dtype`, for T = `num_tokens` and E = `num_experts`.

    The kinds are:

    - uniform: all experts are equally likely
    - zipf: popularity falls as (1 + position)^-1.2 over the shuffled experts
    - normal: popularity is a bell curve over the expert ids, with its peak in the middle
    - group_limited: each token has `top_groups` of `num_expert_groups` groups; experts of the other
      groups are −Inf
    - hot_rank: the experts that a linear placement gives to `hot_rank` of `ep_size` have the
      largest logits of each row
    - drift: as zipf, but the order of the experts moves from one permutation at a whole `step` to
      another at the next
    - adversarial: uniform, but half of the rows have NaN, ±Inf, huge values or ties, in one expert
      or in all

    Raises ValueError, which names the wrong argument.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"`kind` must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if not 0 <= step < math.inf:
        raise ValueError(f"`step` must be a number of at least 0, got {step}")
    if num_tokens < 0 or num_experts < 1:
        raise ValueError(
            f"`num_tokens`, `num_experts` must be ≥ 0, ≥ 1, got {num_tokens}, {num_experts}"
        )
    # Draw Gumbel noise. The kind then adds the popularity of each expert.
    generator = torch.Generator().manual_seed(seed)
    noise_TE = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    logits_TE = -torch.log(-torch.log(noise_TE.clamp(1e-15, 1 - 1e-15)))
    if kind == "zipf":
        logits_TE -= _ZIPF_EXPONENT * torch.log1p(torch.randperm(num_experts, generator=generator))
    elif kind == "normal":
        logits_TE -= torch.linspace(-_NORMAL_SIGMAS, _NORMAL_SIGMAS, num_experts) ** 2 / 2
    elif kind == "group_limited":
        if num_experts % num_expert_groups or not 1 <= top_groups <= num_expert_groups:
            raise ValueError(
                f"`num_expert_groups` must divide {num_experts} experts and be at least "
                f"`top_groups`, got {num_expert_groups} and {top_groups}"
            )
        order_TG = torch.rand(num_tokens, num_expert_groups, generator=generator).argsort(dim=1)
        closed_TG = order_TG >= top_groups
        closed_TE = closed_TG.repeat_interleave(num_experts // num_expert_groups, dim=1)
        logits_TE[closed_TE] = -torch.inf
    elif kind == "hot_rank":
        hot = Placement.build(num_experts, ep_size).local_experts(hot_rank)
        logits_TE[:, hot] += _HOT
    elif kind == "drift":
        logits_TE -= _ZIPF_EXPONENT * torch.log1p(_drifting_order(num_experts, seed, step))
    elif kind == "adversarial":
        _spoil_logits(logits_TE, generator)
    return logits_TE.to(dtype)


def simulate_routing(
    kind: Kind,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    seed: int = 0,
    id_dtype: torch.dtype = torch.int32,
    **options: Any,
) -> Routing:
    """Make ids [T, K] in `id_dtype` (int32 or int64) and fp32 weights [T, K], for K = `top_k`.

    The kinds and `options` are those of `simulate_logits`. The ids of a row are distinct and in
    [0, E), and its weights sum to 1. The kind adversarial breaks these rules in half of its rows.
    Such a row may have duplicate ids, −1, E and other ids out of range, and weights NaN, ±Inf, 0
    and −0. In int64 it may also have a valid id plus 2³², which an unchecked narrowing to int32
    would accept.

    Raises ValueError, which names the wrong argument.
    """
    if id_dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`id_dtype` must be torch.int32 or torch.int64, got {id_dtype}")
    clean: Kind = "uniform" if kind == "adversarial" else kind
    logits_TE = simulate_logits(
        clean, num_tokens, num_experts, seed=seed, dtype=torch.float64, **options
    )
    # With group_limited some experts have logits of −Inf. A token must not get one of these.
    reachable = min([num_experts, *logits_TE.isfinite().sum(1).tolist()])
    if not 1 <= top_k <= reachable:
        raise ValueError(
            f"`top_k` must be 1 to {reachable}, as a token reaches no more, got {top_k}"
        )
    ids_TK = logits_TE.topk(top_k, dim=1).indices
    # The weights do not depend on the logits. They have a seed of their own.
    generator = torch.Generator().manual_seed(seed + 2**32)
    weights_TK = torch.randn(num_tokens, top_k, generator=generator).softmax(dim=1)
    if kind == "adversarial":
        _spoil_routing(ids_TK, weights_TK, num_experts, id_dtype, generator)
    return Routing(ids_TK.to(id_dtype), weights_TK)


def _drifting_order(num_experts: int, seed: int, step: float) -> torch.Tensor:
    """The position of each expert in the order of popularity at a step of the kind drift, [E].

    Each whole step has a permutation of the experts. Between two whole steps, the order follows
    from a mixture of the logarithms of both positions.
    """
    first = math.floor(step)
    mixed = torch.lerp(
        _log_positions(num_experts, seed, first),
        _log_positions(num_experts, seed, first + 1),
        step - first,
    )
    return mixed.argsort().argsort()


def _log_positions(num_experts: int, seed: int, step: int) -> torch.Tensor:
    """The logarithm of each expert's position at a whole step, fp64 [E]."""
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
    return torch.log1p(torch.randperm(num_experts, generator=generator).double())


def _spoil_logits(logits_TE: torch.Tensor, generator: torch.Generator) -> None:
    """Write values that a router should never return into half of the rows, in place."""
    tokens, experts = logits_TE.shape
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0], dtype=logits_TE.dtype)
    # Draw a bad value for each row, and the expert that gets it if only one does.
    value_T1 = bad[torch.randint(len(bad), (tokens, 1), generator=generator)]
    bad_expert_T1 = torch.randint(experts, (tokens, 1), generator=generator)
    # Draw what happens to each row. Two of the four numbers leave it as it is.
    fate_T1 = torch.randint(4, (tokens, 1), generator=generator)
    is_in_one_TE = (fate_T1 == _ONE_BAD_EXPERT) & (torch.arange(experts) == bad_expert_T1)
    is_bad_TE = (fate_T1 == _ALL_BAD_EXPERTS) | is_in_one_TE
    logits_TE.copy_(torch.where(is_bad_TE, value_T1, logits_TE))


def _spoil_routing(
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: int,
    id_dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Write bad ids and weights into pairs of half of the rows, in place."""
    shape = ids_TK.shape
    limits = torch.iinfo(id_dtype)
    bad_ids = [-1, experts, experts + 1, -2, limits.min, limits.max]
    if id_dtype == torch.int64:
        bad_ids += [2**31, 2**32, 2**32 + experts - 1, -(2**32)]
    bad_weights = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])

    # Draw what happens to each pair of a token and an expert. In half of the rows nothing does.
    fate_TK = torch.randint(4, shape, generator=generator)
    fate_TK[torch.rand(shape[0], generator=generator) < 0.5] = _UNCHANGED
    # A duplicate repeats the first id of the row.
    ids_TK.copy_(torch.where(fate_TK == _DUPLICATE, ids_TK[:, :1], ids_TK))
    drawn_ids_TK = _draw(torch.tensor(bad_ids), shape, generator)
    ids_TK.copy_(torch.where(fate_TK == _BAD_ID, drawn_ids_TK, ids_TK))
    drawn_weights_TK = _draw(bad_weights, shape, generator)
    weights_TK.copy_(torch.where(fate_TK == _BAD_WEIGHT, drawn_weights_TK, weights_TK))


def _draw(values: torch.Tensor, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw a tensor of this shape, each element of which is one of `values`."""
    return values[torch.randint(len(values), shape, generator=generator)]
