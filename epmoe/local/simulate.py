"""Simulated routing for tests, benchmarks and demonstrations; a seed determines all values.

Every kind defines a popularity of the experts (log weights [E]) and adds Gumbel noise to it. The K
largest sums are then K distinct experts, drawn without replacement in proportion to their
popularity (Gumbel-top-k; Kool, van Hoof and Welling, 2019).
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from epmoe.config.placement import Placement
from epmoe.local.route import Routing

Kind = Literal["uniform", "zipf", "normal", "group_limited", "hot_rank", "drift", "adversarial"]

# How steeply popularity falls.
_ZIPF_EXPONENT = 1.2
# The E experts span this many standard deviations to either side of the middle expert.
_NORMAL_SIGMAS = 4.0
# More than the range of the noise: hot experts come first, others only where K exceeds these.
_HOT = 60.0


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
    """Router logits [T, E] in `dtype`.

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
    # Gumbel noise, to which the kind adds log weights.
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
    """Ids [T, K] in `id_dtype` (int32 or int64) and fp32 weights [T, K]; kinds and `options` as in
    `simulate_logits`.

    The ids of a row are distinct and in [0, E), and its weights sum to 1. The kind adversarial
    breaks these rules in half of its rows. Such a row may have duplicate ids, −1, E and other ids
    out of range, and weights NaN, ±Inf, 0 and −0. In int64 it may also have a valid id plus 2³²,
    which an unchecked narrowing to int32 would accept.

    Raises ValueError, which names the wrong argument.
    """
    if id_dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`id_dtype` must be torch.int32 or torch.int64, got {id_dtype}")
    clean: Kind = "uniform" if kind == "adversarial" else kind
    logits_TE = simulate_logits(
        clean, num_tokens, num_experts, seed=seed, dtype=torch.float64, **options
    )
    # Experts of closed groups are −Inf, and no token may have one.
    reachable = min([num_experts, *logits_TE.isfinite().sum(1).tolist()])
    if not 1 <= top_k <= reachable:
        raise ValueError(
            f"`top_k` must be 1 to {reachable}, as a token reaches no more, got {top_k}"
        )
    ids_TK = logits_TE.topk(top_k, dim=1).indices
    # Weights are independent of the logits' numbers.
    generator = torch.Generator().manual_seed(seed + 2**32)
    weights_TK = torch.randn(num_tokens, top_k, generator=generator).softmax(dim=1)
    if kind == "adversarial":
        _spoil_routing(ids_TK, weights_TK, num_experts, id_dtype, generator)
    return Routing(ids_TK.to(id_dtype), weights_TK)


def _drifting_order(num_experts: int, seed: int, step: float) -> torch.Tensor:
    """The position of each expert in the order of popularity, [E]. Between two whole steps it
    mixes the log positions of their permutations.
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
    """Write values that are no logits into half of the rows, in place."""
    tokens, experts = logits_TE.shape
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0], dtype=logits_TE.dtype)
    value_T1 = bad[torch.randint(len(bad), (tokens, 1), generator=generator)]
    victim_T1 = torch.randint(experts, (tokens, 1), generator=generator)
    # The kind of a row: 0 has one wrong expert, 1 has all wrong, 2 and 3 have none.
    kind_T1 = torch.randint(4, (tokens, 1), generator=generator)
    struck_TE = (kind_T1 == 1) | ((kind_T1 == 0) & (torch.arange(experts) == victim_T1))
    logits_TE.copy_(torch.where(struck_TE, value_T1, logits_TE))


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

    # The kind of a pair: 0 is a duplicate, 1 a bad id, 2 a bad weight, 3 stays.
    kind_TK = torch.randint(4, shape, generator=generator)
    kind_TK[torch.rand(shape[0], generator=generator) < 0.5] = 3
    ids_TK.copy_(torch.where(kind_TK == 0, ids_TK[:, :1], ids_TK))
    ids_TK.copy_(torch.where(kind_TK == 1, _drawn(torch.tensor(bad_ids), shape, generator), ids_TK))
    weights_TK.copy_(torch.where(kind_TK == 2, _drawn(bad_weights, shape, generator), weights_TK))


def _drawn(values: torch.Tensor, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """A tensor of this shape, each element one of `values`."""
    return values[torch.randint(len(values), shape, generator=generator)]
