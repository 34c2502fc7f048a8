"""Rows that the caller has quantized: they and their scales arrive bit by bit, by every path of
dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checked_round import weight_of_rows
from exchanges import (
    FP8,
    Tokens,
    assert_y,
    dequantized,
    expected_rows,
    expected_slabs,
    make_tokens,
    nodes_of,
    poison,
    quantized,
    run_experts,
    run_fused_experts,
    run_round,
    slab_shape,
)
from helpers import ON_GPUS, captured, generator
from torch import Tensor

import epmoe
from epmoe import Dispatched, ExpertParallel

PLACEMENT = {"strategy": "round_robin", "num_redundant_experts": 3}
# Tokens of rank 0, of all others, ll_max_tokens, hidden size, num_sms. On GPUs: LL with one line a
# lane, with two, and with coarse senders (on up to 2 ranks); Simple; sources of both protocols in
# one round; rows of several chunks.
SHAPES = [
    (5, 3, 256, 256, None),
    (70, 70, 256, 1152, None),
    (70, 64, 256, 1152, 2),
    (70, 70, 32, 1152, None),
    (16, 70, 32, 256, None),
    (0, 70, 32, 256, 20),
    (60, 50, 32, 20480, 2),
    # The last block of a row is partly filled: as that of gpt-oss, and one line of it.
    (5, 3, 256, 144, None),
    (70, 64, 32, 2880, None),
    (70, 70, 256, 1248, None),
    (70, 70, 256, 1248, 2),
    (60, 50, 32, 20512, 2),
]
# The last block of a row is partly filled: tokens of rank 0 and of all others, ll_max_tokens,
# hidden size, num_sms.
PARTLY_FILLED = [
    (5, 3, 256, 144, None),
    (5, 3, 256, 2880, None),
    (70, 70, 256, 1248, None),
    (70, 64, 256, 2880, 2),
    (70, 64, 32, 2880, None),
    (16, 70, 32, 352, None),
    (60, 50, 32, 10272, 2),
]


def make_fp8_ep(
    make_ep: Callable[..., ExpertParallel], ll_max_tokens: int = 256, **options: object
) -> ExpertParallel:
    exchange = {"payload": "fp8", "num_sms": options.pop("num_sms", None)}
    shape = {"top_k": 6, "hidden": 256, "dtype": "bfloat16", "max_tokens": 70}
    return make_ep(ll_max_tokens, placement=PLACEMENT, exchange=exchange, **shape | options)


def random_rows(T: int, D: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bytes of fp8 rows [T, D] and bits of scales [T, ⌈D/128⌉]: any, but for those that mark an LL
    line as empty.
    """
    rows = torch.randint(0, 256, (T, D), dtype=torch.uint8, generator=generator(seed))
    scales = torch.randint(
        -(2**31), 2**31, (T, -(-D // 128)), dtype=torch.int64, generator=generator(seed + 1)
    ).int()
    assert not rows.view(torch.int32).eq(-1).any() and not scales.eq(-1).any()
    return rows, scales


def dispatched(
    ep: ExpertParallel, rows: Tensor, scales: Tensor, mine: Tokens, phases: bool, **options
) -> Dispatched:
    """`mine` with fp8 rows and scales, given as their bits."""
    x, ids, weights = (t.to(ep.device) for t in (rows.view(FP8), mine.ids, mine.weights))
    options |= {"scales": scales.view(torch.float32).to(ep.device), "num_tokens": mine.real}
    if phases:
        return ep.dispatch_recv(ep.dispatch_send(x, ids, weights, **options))
    return ep.dispatch(x, ids, weights, **options)


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8 if tensor.dtype == FP8 else torch.int32)


@pytest.mark.parametrize("phases", [False, True])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize(("first", "others", "ll_max_tokens", "hidden", "num_sms"), SHAPES)
def test_every_bit_arrives(
    make_ep, rank, size, first, others, ll_max_tokens, hidden, num_sms, layout, phases
):
    """Any bits: NaN of both signs, scales that are negative, infinite or NaN."""
    if hidden % 128 and nodes_of(size):
        pytest.skip("a block that is partly filled travels within a node")
    alignment = {"alignment": 8}
    ep = make_fp8_ep(make_ep, ll_max_tokens, hidden=hidden, num_sms=num_sms, capacity=alignment)
    for seed in range(2):
        tokens = [
            make_tokens(
                ep.config, r, others if r else first, seed=seed, kind="adversarial", padded=2
            )
            for r in range(size)
        ]
        given = [random_rows(len(t.x), hidden, seed=10 * r + seed) for r, t in enumerate(tokens)]
        poison(ep)
        d = dispatched(ep, *given[rank], tokens[rank], phases, layout=layout)
        assert d.dtype == torch.bfloat16
        for part, name in enumerate(("rows", "scales")):
            # The references move bits.
            slabs = expected_slabs(
                ep.config,
                ep.placement,
                [replace(t, x=g[part]) for t, g in zip(tokens, given, strict=True)],
                rank,
            )
            assert torch.equal(d.recv.counts.cpu(), slabs.counts)
            if layout == "rank":
                got = bits(d.recv.scales if part else d.recv.x).flatten(0, 1)
                slots = slab_shape(ep.config)[1]
                used = torch.arange(got.shape[0]) % slots < slabs.counts.repeat_interleave(slots)
                assert torch.equal(got[used], slabs.x[used])
                continue
            want = expected_rows(ep.config, ep.placement, slabs, rank)
            if part:  # of gaps
                one = torch.ones(1).view(torch.int32)
                gaps = torch.ones(len(want.rows), dtype=torch.bool)
                gaps[want.row_of_pair[want.row_of_pair >= 0].long()] = False
                want.rows[gaps] = one
            assert torch.equal(bits(getattr(d, name)[: len(want.rows)]), want.rows)
        ep.abort(d)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("phases", [False, True])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize(("first", "others", "ll_max_tokens", "hidden", "num_sms"), PARTLY_FILLED)
def test_dispatch_quantizes_a_block_that_is_partly_filled(
    make_ep, rank, size, first, others, ll_max_tokens, hidden, num_sms, layout, dtype, phases
):
    """The bits of `epmoe.quantize_fp8`, and zeros up to the end of the block. Dispatch takes x as
    it is, and reads nothing behind its rows.
    """
    if nodes_of(size):
        pytest.skip("a block that is partly filled travels within a node")
    ep = make_fp8_ep(make_ep, ll_max_tokens, hidden=hidden, num_sms=num_sms, dtype=dtype)
    tokens = [make_tokens(ep.config, r, others if r else first, padded=2) for r in range(size)]
    slabs, of_scales = (
        expected_slabs(
            ep.config,
            ep.placement,
            [replace(t, x=epmoe.quantize_fp8(t.x, num_tokens=t.real)[part]) for t in tokens],
            rank,
        )
        for part in range(2)
    )
    mine = tokens[rank]
    x = torch.full((len(mine.x), hidden + 128), 1e4, dtype=mine.x.dtype, device=ep.device)
    x = x[:, :hidden]
    x.copy_(mine.x)
    poison(ep)
    ids, weights = mine.ids.to(ep.device), mine.weights.to(ep.device)
    if phases:
        sent = ep.dispatch_send(x, ids, weights, num_tokens=mine.real, layout=layout)
        assert sent.operands.x.data_ptr() == x.data_ptr()
        d = ep.dispatch_recv(sent)
    else:
        d = ep.dispatch(x, ids, weights, num_tokens=mine.real, layout=layout)
    if layout == "rank":
        got, scales = d.recv.x.flatten(0, 1), d.recv.scales.flatten(0, 1)
        slots = slab_shape(ep.config)[1]
        used = torch.arange(len(got)) % slots < slabs.counts.repeat_interleave(slots)
        want, want_scales = slabs.x, of_scales.x
    else:
        got, scales = d.rows, d.scales
        rows = expected_rows(ep.config, ep.placement, slabs, rank)
        want = rows.rows
        want_scales = expected_rows(ep.config, ep.placement, of_scales, rank).rows
        used = torch.zeros(len(got), dtype=torch.bool)
        used[rows.row_of_pair[rows.row_of_pair >= 0].long()] = True
        want, want_scales = (F.pad(t, (0, 0, 0, len(got) - len(t))) for t in (want, want_scales))
    assert torch.equal(bits(got)[used], bits(want)[used])
    assert torch.equal(bits(scales)[used], bits(want_scales)[used])
    behind = -hidden % 128
    tail = got.as_strided((len(got), behind), (got.stride(0), 1), got.storage_offset() + hidden)
    assert not bits(tail)[used].any()
    ep.abort(d)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("T", [6, 70])
def test_the_layer_is_that_of_rows_which_dispatch_quantizes(make_ep, rank, size, T, layout):
    """The same bits of y from a caller that quantizes by `epmoe.quantize_fp8`, with and without a
    stride.
    """
    ep = make_fp8_ep(make_ep, 32)
    mine = make_tokens(ep.config, rank, T, padded=2)
    # What dispatch quantizes itself.
    at_once = run_round(ep, mine, layout, num_tokens=mine.real)
    assert_y(at_once, ep.config, mine)
    # The same rows, quantized by the caller, as they are and with a stride.
    q, scales = epmoe.quantize_fp8(mine.x.to(ep.device), num_tokens=mine.real)
    ids = mine.ids.to(ep.device)
    weights = mine.weights.to(ep.device)
    wide = torch.zeros(T, 400, device=ep.device)
    wide_rows = torch.zeros(T, 1000, device=ep.device).to(FP8)
    wide[:, 16:18] = scales
    wide_rows[:, 16 : 16 + q.shape[1]] = q
    for x, its in ((q, scales), (wide_rows[:, 16 : 16 + q.shape[1]], wide[:, 16:18])):
        d = ep.dispatch(x, ids, weights, scales=its, num_tokens=mine.real, layout=layout)
        rows, combine = (
            (run_fused_experts(ep, d), ep.combine_partial)
            if layout == "rank"
            else (run_experts(ep, d), ep.combine)
        )
        assert torch.equal(combine(rows, d), at_once)


@pytest.mark.parametrize("T", [6, 70])
def test_scales_are_weighted_on_arrival(make_ep, rank, size, T):
    ep = make_fp8_ep(make_ep, 32)
    tokens = [make_tokens(ep.config, r, T, kind="adversarial") for r in range(size)]
    q, scales = quantized(tokens[rank].x)
    d = dispatched(
        ep,
        q.view(torch.uint8),
        scales.view(torch.int32),
        tokens[rank],
        False,
        apply_router_weight_on_input=True,
    )
    slabs = expected_slabs(ep.config, ep.placement, tokens, rank)
    want = expected_rows(ep.config, ep.placement, slabs, rank)
    rows, scales = quantized(want.rows)
    assert torch.equal(d.rows[: len(rows)].cpu().float(), rows.float())
    assert torch.equal(d.scales[: len(rows)].cpu(), scales * weight_of_rows(want, slabs))
    ep.abort(d)


@ON_GPUS
def test_a_captured_round(make_ep, rank, size, device):
    """Replays read the rows and scales of the buffers that were captured."""
    ep = make_fp8_ep(make_ep)
    T = 32
    D = ep.config.model.hidden_size
    mine = make_tokens(ep.config, rank, T)
    ids = mine.ids.to(device)
    weights = mine.weights.to(device)
    q = torch.zeros(T, D, device=device).to(FP8)
    scales = torch.ones(T, D // 128, device=device)

    def one_round() -> Tensor:
        d = ep.dispatch(q, ids, weights, scales=scales)
        return ep.combine(dequantized(d.rows, d.scales, d.dtype), d)

    # Replays over other rows are eager rounds over them.
    replay, y = captured(one_round)
    for seed in range(3):
        new = make_tokens(ep.config, rank, T, seed=seed)
        rows, new_scales = quantized(new.x)
        q.copy_(rows)
        scales.copy_(new_scales)
        replay()
        torch.cuda.synchronize()
        replayed = y.clone()
        assert torch.equal(one_round(), replayed)
    ep.check()
