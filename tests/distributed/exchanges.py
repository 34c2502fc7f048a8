"""Rounds of an exchange for the tests: configs, every rank's input, and the expected results of
dispatch and combine.

Each rank generates the input of ALL ranks from seeds. It computes what it must receive without
communication.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from helpers import generator, poison_, randn
from torch import Tensor

from epmoe import Dispatched, EPConfig, ExpertParallel, Permuted, Placement, simulate_routing
from epmoe.exchange.node import NodeExchange
from epmoe.local.reference import finalize_reference, moe_reference, permute_reference

# With `make two-machines` the group is one of several nodes. A test that chooses its nodes itself
# is left alone.
RANKS_PER_NODE = int(os.environ.get("EPMOE_TEST_RANKS_PER_NODE", 0)) or None
CONTROL = (
    "signal.",
    "doorbell",
    "state",
    "table.",
    "health.",
    "ll.",
    "rail.missed",
    "rail.table.",
    "rail.total.",
)
FP8 = torch.float8_e4m3fn
# (relative, absolute) error of y, with 10 % of slack: roundings to half a unit in the last place
# (two, with fp8 one), and the loss in denormals.
ROUNDINGS = {
    torch.float32: (1e-6, 0.0),
    torch.bfloat16: (2.2 * 2**-8, 0.0),
    torch.float16: (2.2 * 2**-11, 1e-6),
    FP8: (1.1 * 2**-4, 2e-4),
}


def nodes_of(size: int) -> int | None:
    """Ranks of a node in a group of this size: None, which is one node, unless the run
    has several.
    """
    return RANKS_PER_NODE if RANKS_PER_NODE and size % RANKS_PER_NODE == 0 else None


def make_config(
    size: int,
    *,
    experts: int = 13,
    top_k: int = 4,
    hidden: int = 64,
    dtype: str = "float32",
    max_tokens: int = 16,
    timeout_s: float = 20.0,
    ranks_per_node: int | None = None,
    max_ranks: int | None = None,
    placement: dict | None = None,
    capacity: dict | None = None,
    exchange: dict | None = None,
    routing: dict | None = None,
    computes: dict | None = None,
) -> EPConfig:
    return EPConfig(
        model={
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "hidden_size": hidden,
            "dtype": dtype,
        },
        topology={
            "ep_size": size,
            "ranks_per_node": ranks_per_node or nodes_of(size),
            "max_ranks": max_ranks,
        },
        placement=placement or {},
        routing=routing or {},
        experts=computes or {},
        capacity={"max_num_tokens_per_rank": max_tokens, "gap_rows": "zero"} | (capacity or {}),
        # What other ranks hear of a round that one gives up is in test_mistakes.py. The other tests
        # look at their sums. A deadline in a test is short, and a busy machine may need longer for
        # the first round.
        exchange={
            "timeout_s": timeout_s,
            "warmup_timeout_s": max(60.0, 2 * timeout_s),
            "on_abort": "zeros",
        }
        | (exchange or {}),
    )


@dataclass
class Tokens:
    """One rank's input of a round. Rows from `real` on are padding, full of NaN and valid ids."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    real: int

    def live(self, num_experts: int) -> tuple[Tensor, Tensor]:
        """Logical ids int64 and fp32 weights of the real rows, −1 and 0 for a pair that does not
        count.
        """
        ids = self.ids[: self.real].long()
        weights = self.weights[: self.real].float()
        live = (ids >= 0) & (ids < num_experts) & weights.isfinite() & (weights != 0)
        return ids.where(live, -1), weights.where(live, 0.0)


def make_tokens(
    config: EPConfig,
    rank: int,
    num_tokens: int,
    *,
    seed: int = 0,
    kind: str = "uniform",
    id_dtype: torch.dtype = torch.int32,
    weight_dtype: torch.dtype = torch.float32,
    padded: int = 0,
) -> Tokens:
    """`num_tokens` rows of one rank, of which the last `padded` are padding."""
    model = config.model
    seed = 1000 * seed + rank
    # Every rank draws other tokens from the same seed.
    x = randn(num_tokens, model.hidden_size, dtype=model.torch_dtype, seed=seed)
    ids, weights = simulate_routing(
        kind, num_tokens, model.num_experts, model.num_experts_per_tok, seed=seed, id_dtype=id_dtype
    )
    real = max(num_tokens - padded, 0)
    # What nobody may read is NaN.
    poison_(x[real:])
    return Tokens(x, ids, weights.to(weight_dtype), real)


def gains(config: EPConfig, hidden: int) -> Tensor:
    """[E, D]: the tests' expert e multiplies a row by gains[e]. These are ± powers of two, so exact
    in every dtype.
    """
    shape = (config.model.num_experts, 61)  # prime, so that the blocks of a row differ
    exponent = torch.randint(-1, 2, shape, generator=generator(7))
    sign = torch.randint(0, 2, shape, generator=generator(8)) * 2 - 1
    return (sign * 2.0**exponent)[:, torch.arange(hidden) % 61]


def run_experts(ep: ExpertParallel, d: Dispatched) -> Tensor:
    """Expert-major outputs: the rows times `gains`. Rows past the last segment are NaN."""
    rows = dequantized(d.rows, d.scales, d.dtype)
    gain = gains(ep.config, rows.shape[1])
    # Each expert multiplies the rows of its own segment.
    ends = d.expert_offsets.tolist()
    out = poison_(torch.empty_like(rows))
    for i, physical in enumerate(ep.placement.local_experts(ep.rank)):
        expert = gain[ep.placement.logical(physical)].to(rows)
        out[ends[i] : ends[i + 1]] = rows[ends[i] : ends[i + 1]] * expert
    return out


def run_fused_experts(ep: ExpertParallel, d: Dispatched) -> Tensor:
    """Stands in for a stack's fused MoE on layout="rank": returns partial rows [R, M, D]. Unused
    slots are NaN.
    """
    x = dequantized(d.recv.x, d.recv.scales, d.dtype)
    partial = poison_(torch.empty_like(x, memory_format=torch.contiguous_format))
    # Ids of slots are physical: they lead to local experts, and these to logical ones.
    expert_map = ep.expert_map.cpu().long()
    gain = gains(ep.config, x.shape[2])
    # The logical expert of each local index; the last entry is for −1.
    logical = torch.tensor([*map(ep.placement.logical, ep.placement.local_experts(ep.rank)), 0])
    for r, count in enumerate(d.recv.counts.tolist()):
        # Unused slots stay NaN.
        ids = d.recv.ids[r, :count].cpu().long()
        weights = d.recv.weights[r, :count].cpu().double()
        index = torch.cat([expert_map, torch.tensor([-1])])[ids]  # the sentinel's entry is −1
        # The sum of the experts of this rank, weighted, in fp64.
        weights_cE = torch.zeros(count, len(gain), dtype=torch.float64)
        weights_cE.scatter_add_(1, logical[index], weights * (index >= 0))
        partial[r, :count] = (x[r, :count].double() * (weights_cE @ gain.double()).to(x.device)).to(
            x.dtype
        )
    return partial


def dequantized(rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return rows
    D = rows.shape[-1]
    return (rows.float() * scales.repeat_interleave(128, dim=-1)[..., :D]).to(dtype)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, D] as e4m3 and fp32 scales [n, D/128]: amax / 448 of each block, 1 for a block of
    zeros.
    """
    blocks = rows.float().unflatten(1, (-1, 128))
    scales = (blocks.abs().amax(-1) / 448).masked_fill(blocks.abs().amax(-1) == 0, 1.0)
    return (blocks / scales[..., None]).to(FP8).flatten(1), scales


@dataclass
class Slabs:
    """The expected content of one rank's window: S = G·N·M slots, G ranks of a node and N nodes. x
    past the counts is NaN.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    counts: Tensor
    """[G] rows of each slab."""
    token: list[list[int]]
    """[R] by source: its tokens that are here."""
    slot: list[range]
    """[R] by source: where they are."""


def slab_shape(config: EPConfig) -> tuple[int, int]:
    """Slabs of a rank and slots of one: R and M with one node, otherwise G and N·M."""
    G = config.topology.ranks_here
    return G, config.topology.num_nodes * config.rows_per_node


def inside(config: EPConfig, placement: Placement, rank: int) -> tuple[Placement, int]:
    """The placement on the ranks of this rank's node, and this rank there."""
    G = config.topology.ranks_here
    node, local = divmod(rank, G)
    return (placement if placement.ep_size == G else placement.of_node(node, G)), local


def expected_slabs(
    config: EPConfig, placement: Placement, tokens: list[Tokens], rank: int
) -> Slabs:
    G, slots = slab_shape(config)
    R = len(tokens)
    K = tokens[0].ids.shape[1]
    D = tokens[0].x.shape[1]
    on_ranks, local = inside(config, placement, rank)
    here = rank // G
    nodes_P, ids_P = placement.node_ids(G)  # with one node, ids are physical experts
    sentinel = on_ranks.sentinel(local)
    owners = torch.tensor([*on_ranks.owners, -1])
    # Empty slabs: nobody may read the rows of unused slots.
    x = poison_(torch.empty(G, slots, D, dtype=tokens[0].x.dtype))
    ids = torch.full((G, slots, K), sentinel, dtype=torch.int32)
    weights = torch.zeros(G, slots, K)
    counts = [0] * G
    token = [[]] * R
    slot = [range(0)] * R

    # Tokens of each source, those of the own node first.
    # The own node comes first.
    for source in sorted(range(R), key=lambda source: source // G != here):
        sender = tokens[source]
        slab = source % G
        # Each pair by the copy that this source takes of its expert.
        logical, live_weights = sender.live(placement.num_experts)
        t = torch.arange(sender.real)[:, None] + source
        physical = placement.copies_table().long()[logical, t % placement.num_copies()[logical]]
        on_node = (logical >= 0) & (nodes_P[physical] == here)
        local_ids = ids_P[physical].long().where(on_node, -1)
        # A token comes once, if one of its experts is on this rank, with all its pairs of the node.
        sent = (owners[local_ids] == local).any(1).nonzero()[:, 0]
        used = range(counts[slab], counts[slab] + len(sent))
        x[slab, used] = sender.x[sent]
        ids[slab, used] = local_ids[sent].where(on_node[sent], sentinel).int()
        weights[slab, used] = live_weights[sent].where(on_node[sent], 0.0)
        counts[slab] += len(sent)
        token[source] = sent.tolist()
        slot[source] = range(slab * slots + used.start, slab * slots + used.stop)

    # Slots of all slabs in one dimension.
    flat = (part.flatten(0, 1) for part in (x, ids, weights))
    return Slabs(*flat, torch.tensor(counts, dtype=torch.int32), token, slot)


def expected_rows(
    config: EPConfig, placement: Placement, slabs: Slabs, rank: int, alignment: int | None = None
) -> Permuted:
    """`alignment` in rows, by default that of rounds that ask for none."""
    capacity = config.capacity
    on_ranks, local = inside(config, placement, rank)
    limit = capacity.max_expert_rows
    alignment = alignment or capacity.alignment or 1
    return permute_reference(
        slabs.x,
        slabs.ids,
        on_ranks.expert_map(local),
        on_ranks.num_local_experts(local),
        counts_R=slabs.counts,
        alignment=alignment,
        max_rows=None if limit is None else -(-limit // config.alignment) * config.alignment,
    )


def expected_y(config: EPConfig, tokens: Tokens) -> Tensor:
    """y [T, D] of one rank in fp64: the dense layer on x as the payload rounds it. Padding rows are
    zeros.
    """
    return _dense_y(config, tokens, lambda value: value)


def _dense_y(config: EPConfig, tokens: Tokens, each: Callable[[Tensor], Tensor]) -> Tensor:
    ids_TK, weights_TK = tokens.live(config.model.num_experts)
    x_TD = tokens.x[: tokens.real]
    if config.exchange.payload == "fp8":
        x_TD = dequantized(*quantized(x_TD), x_TD.dtype)
    gain_ED = each(gains(config, x_TD.shape[1]).double())
    # Padding is zeros.
    y_TD = torch.zeros(tokens.x.shape, dtype=torch.float64)
    y_TD[: tokens.real] = moe_reference(
        each(x_TD), ids_TK, each(weights_TK), lambda rows, expert: rows * gain_ED[expert]
    )
    return y_TD


def assert_y(got: Tensor, config: EPConfig, tokens: Tokens) -> None:
    """`got` is this rank's y up to roundings: one of the sum over a rank's experts, one of the sum
    over ranks.

    With several nodes there are three: the second sum is over the ranks of a node, and the third
    over nodes.

    Rounding errors are relative to Σ_k |weight · expert(x)|, element by element.
    """
    assert got.shape == tokens.x.shape and got.dtype == tokens.x.dtype
    assert got[tokens.real :].eq(0).all()
    relative, absolute = ROUNDINGS[FP8 if config.exchange.combine_payload == "fp8" else got.dtype]
    if config.topology.num_nodes > 1:
        relative *= 1.5
    error = (got.double().cpu() - expected_y(config, tokens)).abs()
    excess = error - relative * _dense_y(config, tokens, torch.abs) - absolute
    assert excess.numel() == 0 or excess.max() <= 0, (
        f"{int((excess > 0).sum())} values are off, by {error.max():.3g}"
    )


def expected_y_after_drops(
    config: EPConfig, placement: Placement, tokens: list[Tokens], rank: int
) -> Tensor:
    """y [T, D] of one rank from the references of the stages. Pairs past `max_expert_rows` are
    missing from it.
    """
    y = torch.zeros(tokens[rank].x.shape, dtype=torch.float64)
    gain = gains(config, config.model.hidden_size).double()
    for r in range(len(tokens)):
        slabs = expected_slabs(config, placement, tokens, r)
        permuted = expected_rows(config, placement, slabs, r)
        ends = permuted.expert_offsets.tolist()
        out = permuted.rows.double()
        for i, physical in enumerate(placement.local_experts(r)):
            out[ends[i] : ends[i + 1]] *= gain[placement.logical(physical)]
        partial = finalize_reference(out, permuted, slabs.weights)
        y[slabs.token[rank]] += partial[slabs.slot[rank]]
    return y


def node_of(ep: ExpertParallel) -> NodeExchange:
    """The exchange of this rank's node."""
    return getattr(ep.exchange, "node", ep.exchange)


def poison(ep: ExpertParallel) -> None:
    """Fills every payload buffer of this rank's window and scratch with 0xFF, while no rank is in a
    round.

    Lines of the LL protocol must be 0xFF already: the round that read them re-arms them. A later
    round would take any other value for its own payload.
    """
    if ep.device.type == "cuda":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))
    for lines in ep.exchange.plan.empty_lines:
        assert node_of(ep).window.local[lines].eq(0xFF).all()
    for name, buffer in ep.exchange.views.items():
        if buffer.numel() and not name.startswith(CONTROL) and not name.endswith(".flags"):
            poison_(buffer)
    node_of(ep).buffers.mark_empty_seats()
    if ep.device.type == "cuda":
        torch.cuda.synchronize()  # before another rank writes here
    dist.all_reduce(torch.zeros(1))


def given(ep: ExpertParallel, tokens: Tokens) -> list[Tensor]:
    """x, ids and weights on the device of `ep`."""
    return [t.to(ep.device) for t in (tokens.x, tokens.ids, tokens.weights)]


def run_round(
    ep: ExpertParallel,
    tokens: Tokens,
    layout: str = "expert",
    num_tokens: int | Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """dispatch, the tests' experts, and combine."""
    scales = None if scales is None else scales.to(ep.device)
    d = ep.dispatch(*given(ep, tokens), scales=scales, num_tokens=num_tokens, layout=layout)
    if layout == "rank":
        return ep.combine_partial(run_fused_experts(ep, d), d)
    return ep.combine(run_experts(ep, d), d)


def assert_round(ep: ExpertParallel, tokens: Tokens, layout: str = "expert") -> None:
    """Plays a round, which agrees with the dense layer."""
    assert_y(run_round(ep, tokens, layout), ep.config, tokens)


def first_round(ep: ExpertParallel, num_tokens: int, layout: str = "expert") -> Tokens:
    """Plays a round that agrees with the dense layer, for which GPUs load their kernels. Returns
    this rank's input.
    """
    tokens = make_tokens(ep.config, ep.rank, num_tokens)
    assert_round(ep, tokens, layout)
    return tokens


def without_rank(ep: ExpertParallel, tokens: Tokens, rank: int, sent: bool = False) -> Tokens:
    """`tokens` without their pairs on the experts of `rank`, or of its node, if that is the way
    there and back.

    With `sent`, it gave the round up only after it had sent its sums to the ranks of its own node.
    """
    placement = ep.placement
    ids = tokens.ids.long()
    G = ep.config.topology.ranks_here
    turns = torch.arange(len(tokens.x))[:, None] + ep.rank
    owner = torch.tensor(placement.owners)[
        placement.copies_table().long()[ids, turns % placement.num_copies()[ids]]
    ]
    by_it = rank % G == ep.rank % G and rank != ep.rank
    gone = owner // G == rank // G if by_it else (owner == rank) & (not sent)
    return Tokens(tokens.x, tokens.ids, tokens.weights.masked_fill(gone, 0.0), tokens.real)
