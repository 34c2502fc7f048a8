"""One round, of which everything is compared with the references: what dispatch delivers bit by
bit, and y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from exchanges import (
    FP8,
    Slabs,
    Tokens,
    assert_y,
    dequantized,
    expected_rows,
    expected_slabs,
    gains,
    poison,
    quantized,
    run_experts,
    run_fused_experts,
)
from helpers import assert_close, generator
from torch import Tensor

from epmoe import Dispatched, EPConfig, ExpertParallel, Permuted
from epmoe.exchange.call import Layout
from epmoe.exchange.handles import Received
from epmoe.local.reference import moe_reference


def assert_slabs(got: Received, want: Slabs, fp8: bool) -> None:
    """layout="rank": the ids and weights of every slot, and the rows of the used slots."""
    assert torch.equal(got.ids.flatten(0, 1).cpu(), want.ids)
    assert torch.equal(got.weights.flatten(0, 1).cpu(), want.weights)
    want_x = want.x.unflatten(0, (len(want.counts), -1))
    for r, count in enumerate(want.counts.tolist()):
        assert_payload(got.x[r, :count], got.scales[r, :count] if fp8 else None, want_x[r, :count])


def make_extra(
    kind: tuple[torch.dtype, tuple[int, ...]], rank: int, num_tokens: int, seed: int = 0
) -> Tensor:
    """An `extra` [T, *shape] of a rank: any bits, and those of every other token all 1, a NaN in
    float dtypes.
    """
    dtype, shape = kind
    bytes_of_token = math.prod(shape) * dtype.itemsize
    extra = torch.randint(
        0, 256, (num_tokens, bytes_of_token), generator=generator(1000 * seed + rank)
    )
    # Every other token has only ones, which are NaN as a float.
    extra[::2] = 0xFF
    return extra.to(torch.uint8).view(dtype).view(num_tokens, *shape)


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def assert_extra(
    d: Dispatched, extras: list[Tensor], slabs: Slabs, want: Permuted | None, zero_gaps: bool
) -> None:
    """Each used slot, or each row of a pair, has the `extra` of its token, bit by bit. `zero_gaps`:
    all rows between segments are zeros.
    """
    # What each slot must have.
    of_slot = extras[0].new_zeros(len(slabs.x), *extras[0].shape[1:])
    for extra, slots, tokens in zip(extras, slabs.slot, slabs.token, strict=True):
        of_slot[list(slots)] = extra[tokens]
    # Rank-major: the slots that are used.
    if want is None:
        got = d.recv.extra.flatten(0, 1)
        for slots in slabs.slot:
            assert torch.equal(bits(got[list(slots)]), bits(of_slot[list(slots)]))
    else:
        # Expert-major: the row of each pair.
        slot, k = (want.row_of_pair >= 0).nonzero(as_tuple=True)
        rows = want.row_of_pair[slot, k].long()
        got = d.extra
        assert got.shape[1:] == extras[0].shape[1:] and got.dtype == extras[0].dtype
        assert torch.equal(bits(got[rows.to(got.device)]), bits(of_slot[slot]))
        # Rows of no pair.
        gaps = torch.ones(int(want.expert_offsets[-1]), dtype=torch.bool)
        gaps[rows] = False
        assert not zero_gaps or not bits(got[: len(gaps)].cpu()[gaps]).any()


def weight_of_rows(want: Permuted, slabs: Slabs) -> Tensor:
    """[N, 1] the weight of the pair that each expert-major row belongs to; 1 for the
    rows of gaps.
    """
    weights = torch.ones(len(want.rows), 1)
    paired = want.row_of_pair >= 0
    weights[want.row_of_pair[paired].long(), 0] = slabs.weights[paired]
    return weights


def assert_rows(
    d: Dispatched, want: Permuted, fp8: bool, weights: Tensor | None = None, zero_gaps: bool = True
) -> None:
    """layout="expert": the segments and their order. `weights` [N, 1]: by which dispatch
    multiplies.

    On GPUs rows of gaps are what they were before the round, or with `zero_gaps` zeros.
    """
    # The segments.
    used = int(want.expert_offsets[-1])
    assert torch.equal(d.expert_offsets.cpu(), want.expert_offsets)
    assert torch.equal(d.tokens_per_expert.cpu(), want.tokens_per_expert)
    rows = d.rows[:used]
    scales = d.scales[:used] if fp8 else None
    kept = slice(None)
    if not zero_gaps:
        # Rows in front of the end of their segment are real, the others are gaps.
        ends = (want.expert_offsets[:-1] + want.tokens_per_expert).long()
        kept = (
            torch.arange(used)
            < ends[
                torch.searchsorted(want.expert_offsets[1:].long(), torch.arange(used), right=True)
            ]
        )
        assert (
            d.rows.device.type == "cpu"
            or rows.cpu()[~kept].contiguous().view(torch.uint8).eq(0xFF).all()
        )
    assert_payload(
        rows[kept],
        None if scales is None else scales[kept],
        want.rows[kept],
        None if weights is None else weights[kept],
    )


def assert_payload(
    rows: Tensor, scales: Tensor | None, want: Tensor, weights: Tensor | None = None
) -> None:
    """Rows equal those sent: in every bit, or with fp8 in every value, and in the scales up to
    rounding.
    """
    if scales is None:
        assert torch.equal(
            rows.cpu(), want if weights is None else (want.float() * weights).to(want.dtype)
        )
    elif want.numel():
        want_rows, want_scales = quantized(want)
        want_scales = want_scales if weights is None else want_scales * weights
        torch.testing.assert_close(scales.cpu(), want_scales, rtol=1e-6, atol=0)
        assert rows.dtype == FP8 and torch.equal(rows.cpu().float(), want_rows.float())


def y_of_weighted_rows(config: EPConfig, tokens: Tokens) -> Tensor:
    """y [real, D] in fp64 where rows are weighted, and rounded once, before the experts."""
    x = tokens.x[: tokens.real]
    gain = gains(config, tokens.x.shape[1]).double()
    x = dequantized(*quantized(x), torch.float32) if config.exchange.payload == "fp8" else x
    live = tokens.live(config.model.num_experts)
    return moe_reference(
        x, *live, lambda rows, expert: rows * gain[expert], apply_router_weight_on_input=True
    )


@dataclass
class Round:
    """The input of one rank on its device, and how it calls the stages."""

    ep: ExpertParallel
    x: Tensor
    ids: Tensor
    weights: Tensor
    num_tokens: int | Tensor | None
    layout: Layout
    phases: bool
    weighted: bool
    aligned: bool
    extra: Tensor | None

    def dispatch(self) -> Dispatched:
        first = self.ep.dispatch_send if self.phases else self.ep.dispatch
        options = {
            "layout": self.layout,
            "apply_router_weight_on_input": self.weighted,
            "aligned": self.aligned,
        }
        d = first(
            self.x, self.ids, self.weights, num_tokens=self.num_tokens, extra=self.extra, **options
        )
        return self.ep.dispatch_recv(d) if self.phases else d

    def combine(self, rows: Tensor, d: Dispatched) -> Tensor:
        if self.phases:
            self.ep.combine_send(rows, d)
            return self.ep.combine_recv(d)
        return (self.ep.combine_partial if self.layout == "rank" else self.ep.combine)(rows, d)


@dataclass
class Checked:
    """A round that agreed with the references, with the outputs of its experts and y, to be run
    again.
    """

    round: Round
    d: Dispatched
    rows: Tensor
    y: Tensor

    def has_the_bits_of_other_phases(self) -> bool:
        """Plays it again, in one call a stage where its phases were calls of their own, and the
        other way round.
        """
        other = replace(self.round, phases=not self.round.phases)
        return torch.equal(other.combine(self.rows, other.dispatch()), self.y)


def alignment_of(ep: ExpertParallel, tokens: list[Tokens]) -> int:
    """Returns the alignment of an aligned round on this rank, where ranks bring these tokens."""
    sizes = ep.exchange.plan.sizes
    all_ll = all(len(each.x) <= sizes["ll_max_tokens"] for each in tokens)
    few = len(tokens[ep.rank].x) <= sizes["small_alignment_tokens"]
    return sizes["small_alignment" if all_ll and few else "alignment"]


def check_round(
    ep: ExpertParallel,
    tokens: list[Tokens],
    layout: Layout,
    *,
    calls: EPConfig | None = None,
    num_tokens: int | Tensor | None = None,
    phases: bool = False,
    weighted: bool = False,
    aligned: bool = False,
    extras: list[Tensor] | None = None,
) -> Checked:
    """One round on poisoned windows: dispatched rows are bitwise equal, y is within its roundings.

    Args:
        ep: of this rank.
        tokens: of every rank.
        layout: of dispatch.
        calls: describes calls whose hidden size, top_k or dtype is smaller than in the config of
            `ep`.
        num_tokens: real tokens of this rank, for dispatch.
        phases: whether send and receive phases are calls of their own.
        weighted: whether dispatch applies the weights, so that combine only adds.
        aligned: as in dispatch.
        extras: the `extra` of every rank.
    """
    config = calls or ep.config
    mine = tokens[ep.rank]
    fp8 = config.exchange.payload == "fp8"
    # What this rank must get, computed without asking anyone.
    slabs = expected_slabs(config, ep.placement, tokens, ep.rank)
    x, ids, weights = (t.to(ep.device) for t in (mine.x, mine.ids, mine.weights))
    extra = extras and extras[ep.rank].to(ep.device)
    this = Round(ep, x, ids, weights, num_tokens, layout, phases, weighted, aligned, extra)
    # Buffers are poisoned, so that nothing of a former round passes for this one.
    poison(ep)
    d = this.dispatch()
    assert torch.equal(d.recv.counts.cpu(), slabs.counts)
    # What has arrived, and what the experts make of it.
    if layout == "rank":
        assert_slabs(d.recv, slabs, fp8)
        want = None
        rows = run_fused_experts(ep, d)
    else:
        alignment = alignment_of(ep, tokens) if d.alignment > 1 else 1
        assert alignment % d.alignment == 0
        want = expected_rows(config, ep.placement, slabs, ep.rank, alignment)
        zero_gaps = ep.config.capacity.gap_rows == "zero"
        assert_rows(d, want, fp8, weight_of_rows(want, slabs) if weighted else None, zero_gaps)
        rows = run_experts(ep, d)
    # What travels beside the rows.
    if extras:
        assert_extra(
            d, extras, slabs, want, ep.device.type == "cpu" or ep.config.capacity.gap_rows == "zero"
        )
    else:
        assert (d.recv if layout == "rank" else d).extra is None
    # The sums that come back.
    y = this.combine(rows, d)
    if weighted:
        assert_close(y[: mine.real], y_of_weighted_rows(config, mine))
        assert y[mine.real :].eq(0).all()
    else:
        assert_y(y, config, mine)
    return Checked(this, d, rows, y)
