"""`epmoe run` without a model: it runs the MoE layer of a configuration with simulated logits.

Letters in names and shapes: T counts the tokens of a rank, D is the hidden size, E counts the
experts, K the experts of a token, F is the width of an expert, and N counts the rows that arrive.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from epmoe.cli.capacity import rank_plans
from epmoe.cli.clock import StageClock
from epmoe.cli.console import UserError, console, human_bytes
from epmoe.cli.result import Balancing, Check, Result
from epmoe.config.config import ConfigError, EPConfig
from epmoe.exchange.health import Health
from epmoe.exchange.window import available_memory_bytes
from epmoe.group.peers import Peers
from epmoe.live.balancer import Balancer
from epmoe.local.experts import GroupedExperts
from epmoe.local.reference import moe_reference
from epmoe.local.route import Routing
from epmoe.local.simulate import Kind, simulate_logits
from epmoe.service import ExpertParallel

# Rows of simulated logits in a pool, from which every round draws its rows.
POOL_ROWS = 1024
# About how many rows of each round and rank are compared with the dense reference.
CHECKED_ROWS = 32
# The largest error, relative to the largest element of a round's output.
TOLERANCE = {
    "float32": 1e-5,
    "float16": 5e-3,
    "bfloat16": 3e-2,
}
# The largest error with an fp8 payload, in either direction.
FP8_TOLERANCE = 1e-1
# The most bytes of weights. Every rank holds the weights of all experts, for the reference.
WEIGHT_BUDGET = 64 << 20
# How often a run with `--balance` plans moves.
_PLANS = 16
# The memory that torch and its libraries take on each rank.
PROCESS_BYTES = 400 << 20


class _Weights(NamedTuple):
    """The weights of all logical experts, the same on every rank."""

    gate_up: torch.Tensor
    """[E, 2F, D]"""
    down: torch.Tensor
    """[E, D, F]"""


def run(
    config: EPConfig,
    name: str,
    kind: Kind,
    steps: int,
    tokens: int | None,
    seed: int,
    balances: bool,
) -> Result:
    """Run the layer over all ranks of the default group. Collective.

    The Result is the same on every rank.
    `name` is shown as the name of the run. `steps` is the number of rounds, and `tokens` the number
    of tokens of a rank in a round, by default at most 64. `kind` is the routing. With `balances`,
    experts move while the rounds run. Raises UserError if the exchange cannot open.
    """
    model = config.model
    if tokens is None:
        tokens = min(64, config.capacity.max_num_tokens_per_rank)
    console.rule(f"[bold]{name}[/]: {steps} rounds of {tokens} tokens a rank, {kind} routing")
    try:
        ep = ExpertParallel(config)
    except (ValueError, MemoryError) as error:
        raise UserError(str(error)) from None
    with ep, console.status(f"{steps} rounds"):
        _synchronise(ep)
        own_figures = _measure(ep, kind, steps, tokens, seed, balances)
        health = ep.health()
        placement = ep.placement
    # Every rank learns what all ranks have measured.
    own_figures["health"] = health.as_dict()
    all_figures: list[Any] = Peers.of(dist.group.WORLD).all_gather(own_figures)
    by_rank = {key: [figures[key] for figures in all_figures] for key in own_figures}
    counts = Result.counts(placement, [Health(**counters) for counters in by_rank["health"]])
    # `health` also counts the empty round. Take the waiting times of the measured rounds instead.
    counts["waited"] = by_rank["waited"]
    limit = _tolerance(config)
    worst = max(by_rank["worst_error"])
    check = Check(
        f"error against the dense fp64 reference ≤ {limit:.0e}", f"{worst:.1e}", worst <= limit
    )
    return Result(
        name=name,
        config=config,
        facts={
            "experts": f"{model.num_experts}, {model.num_experts_per_tok} per token",
            "hidden size": f"{model.hidden_size} {model.dtype}",
            "rounds": f"{steps} of {tokens} tokens a rank",
            "routing": kind,
        },
        checks=[check] if tokens else [],
        placement=placement,
        **counts,
        stages=by_rank["stages"],
        elapsed=[sum(seconds.values()) for seconds in by_rank["stages"]],
        rounds=steps,
        balancing=Balancing(by_rank["rows"], own_figures["moves"]) if balances else None,
    )


def _measure(
    ep: ExpertParallel, kind: Kind, steps: int, tokens: int, seed: int, balances: bool
) -> dict[str, Any]:
    """Run `steps` rounds of route, dispatch, experts and combine, and compare some rows of each
    round with the reference. Collective.

    With `balances`, experts move between the ranks while the rounds run. Returns the figures of
    this rank for `Result` and `Balancing`, by name, and "worst_error": the largest error of a
    round, relative to the largest value in its output.
    """
    config = ep.config
    model = config.model
    clock = StageClock(ep.device)
    worst_error = 0.0
    rows = list[int]()
    moves = list[tuple[int, int]]()
    # Make the experts of this rank. An empty slot has the number −1, and gets the weights of expert
    # 0, which no token uses.
    weights = _expert_weights(config, seed, ep.device)
    tag = int(config.placement.live)
    held = [max(expert, 0) for expert in ep.logical_experts(tag)]
    experts = GroupedExperts(weights.gate_up[held], weights.down[held]).requires_grad_(False)
    balancer = None
    if balances:

        def weights_of(tag: int, slot: int) -> list[torch.Tensor]:
            return [weight[slot] for weight in experts.parameters()]

        balancer = Balancer(ep, every=max(1, steps // _PLANS), weights=weights_of)
    # All ranks and rounds draw from the same pool of logits, so that popular experts stay popular.
    # Only the routing "drift" makes a new pool for each round.
    pool = partial(
        simulate_logits,
        kind,
        POOL_ROWS,
        model.num_experts,
        seed=seed,
        num_expert_groups=config.routing.num_expert_groups,
        top_groups=config.routing.top_groups,
        ep_size=ep.size,
    )
    pool_TE = pool()
    generator = torch.Generator().manual_seed(seed + 1 + ep.rank)
    bias_E = None
    if config.routing.selection_bias:
        bias_E = torch.zeros(model.num_experts, device=ep.device)
    health = ep.health()
    waited_before = health.waited_s
    rows_before = sum(health.tokens_per_expert)
    for n in range(steps):
        # Make tokens and logits. With "drift", the popularity of the experts changes over the run.
        if kind == "drift":
            pool_TE = pool(step=n / steps)
        x_TD = torch.randn(tokens, model.hidden_size, generator=generator)
        x_TD = x_TD.to(ep.device, model.torch_dtype)
        drawn_T = torch.randint(POOL_ROWS, (tokens,), generator=generator)
        logits_TE = pool_TE[drawn_T].to(ep.device)
        routing, y_TD = _round(ep, experts, clock, x_TD, logits_TE, bias_E)
        # Compare some of the rows with the reference.
        checked = slice(None, None, max(1, tokens // CHECKED_ROWS))
        expected_TD = moe_reference(
            x_TD[checked], routing.ids[checked], routing.weights[checked], weights
        )
        worst_error = max(worst_error, _relative_error(y_TD[checked], expected_TD))
        if balancer is not None:
            rows.append(sum(ep.health().tokens_per_expert))
            balancer.tick()
    ep.check()
    # The counters of health go on from round to round, so take their differences.
    if balancer is not None:
        balancer.finish()
        rows = [after - before for before, after in pairwise([rows_before, *rows])]
        moves = [(step.tick, step.moves) for step in balancer.history]
        balancer.close()
    waited = [now - then for now, then in zip(ep.health().waited_s, waited_before, strict=True)]
    return {
        "stages": clock.seconds,
        "worst_error": worst_error,
        "waited": waited,
        "rows": rows,
        "moves": moves,
    }


def _round(
    ep: ExpertParallel,
    experts: GroupedExperts,
    clock: StageClock,
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
) -> tuple[Routing, torch.Tensor]:
    """Run one round, and measure each of its stages. Returns the routing and y [T, D]. Collective.

    `bias_E` is the bias of the choice of experts, if the configuration has one.
    """
    tag = int(ep.config.placement.live)
    with clock.stage("route"):
        routing = ep.route(logits_TE, bias_E)
    with clock.stage("dispatch"):
        dispatched = ep.dispatch(x_TD, routing.ids, routing.weights, tag=tag)
    with clock.stage("experts"):
        out_ND = experts(dispatched.rows, dispatched.expert_offsets, dispatched.scales)
    with clock.stage("combine"):
        y_TD = ep.combine(out_ND, dispatched)
    return routing, y_TD


def _synchronise(ep: ExpertParallel) -> None:
    """Run a round without tokens and without timing, so that the ranks begin the next round
    together. Collective.
    """
    model = ep.config.model
    routing = ep.route(torch.empty(0, model.num_experts, device=ep.device))
    x_TD = torch.empty(0, model.hidden_size, dtype=model.torch_dtype, device=ep.device)
    tag = int(ep.config.placement.live)
    dispatched = ep.dispatch(x_TD, routing.ids, routing.weights, tag=tag)
    ep.combine(torch.zeros_like(dispatched.rows, dtype=model.torch_dtype), dispatched)


def live(config: EPConfig) -> EPConfig:
    """Make a configuration whose experts can move: each rank has one slot more than it needs. A
    configuration whose experts can move already stays as it is. Raises UserError if they cannot.
    """
    if config.placement.live:
        return config
    E = config.model.num_experts
    R = config.topology.ep_size
    placement = {"live": True, "slots_per_rank": min(-(-E // R) + 1, E)}
    try:
        return EPConfig(**config.model_dump() | {"placement": placement})
    except ConfigError as error:
        raise UserError(f"experts of this configuration cannot move: {error}") from None


def _tolerance(config: EPConfig) -> float:
    """The largest relative error that passes the check. It allows for the rounding of rows in
    dispatch and combine, and inside the experts.
    """
    if config.exchange.quantizes:
        return FP8_TOLERANCE
    return TOLERANCE[config.model.dtype]


def require_memory(config: EPConfig) -> None:
    """Raise UserError if this machine's memory cannot hold all ranks of `config`."""
    # On GPUs each rank uses the memory of its own GPU.
    if config.exchange.transport == "nvlink":
        return
    ranks = config.topology.ep_size
    weights = _bytes_per_intermediate(config) * _intermediate_size(config)
    windows = sum(plan.total_bytes for plan in rank_plans(config))
    # A rank holds the weights of all experts, and a copy of those that it serves: all, at most.
    needed = windows + ranks * (2 * weights + PROCESS_BYTES)
    available = available_memory_bytes()
    if needed > available:
        raise UserError(
            f"this configuration needs {human_bytes(needed)} for its {ranks} ranks, and this "
            f"machine has {human_bytes(available)} available: lower "
            f"`capacity.max_num_tokens_per_rank`, in the file or for one run "
            "(EPMOE_CAPACITY__MAX_NUM_TOKENS_PER_RANK=64); `epmoe plan` shows what it costs"
        )


def _expert_weights(config: EPConfig, seed: int, device: torch.device) -> _Weights:
    """Make random weights of all experts, the same on every rank. Outputs have a variance of about
    1.
    """
    E = config.model.num_experts
    D = config.model.hidden_size
    F = _intermediate_size(config)
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(E, 2 * F, D, generator=generator) / D**0.5
    down = torch.randn(E, D, F, generator=generator) / F**0.5
    dtype = config.model.torch_dtype
    return _Weights(gate_up.to(device, dtype), down.to(device, dtype))


def _intermediate_size(config: EPConfig) -> int:
    """Choose the width F of an expert: half of D, or less where the weights of all experts would
    exceed `WEIGHT_BUDGET`. It is a multiple of 16, and at least 16.
    """
    most = min(config.model.hidden_size // 2, WEIGHT_BUDGET // _bytes_per_intermediate(config))
    return max(16, most // 16 * 16)


def _bytes_per_intermediate(config: EPConfig) -> int:
    """The bytes of weights for each unit of an expert's width: a row of gate, a row of up and a
    column of down, over all experts.
    """
    model = config.model
    return 3 * model.num_experts * model.hidden_size * model.torch_dtype.itemsize


def _relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of `y`, divided by the largest value of `expected`. It is infinite if `y`
    has NaN or Inf.
    """
    if not y.isfinite().all():
        return float("inf")
    if y.numel() == 0:
        return 0.0
    return float((y.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
