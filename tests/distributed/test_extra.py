"""What a token brings beside its row, `dispatch(…, extra=…)`. test_exchange.py has it among its
factors.
"""

from __future__ import annotations

import pytest
import torch
from checked_round import bits, check_round, make_extra
from exchanges import assert_round, given, make_tokens, run_experts
from helpers import ON_GPUS, captured

import epmoe
from epmoe.exchange.extra import Extra

ID = torch.int16, ()
WIDE = torch.int64, (3,)
HAS_ROOM = {"capacity": {"extra_bytes": 24}}


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("payload", ["auto", "fp8"])
def test_over_several_nodes(make_ep, rank, size, device, payload, layout):
    """It lies in the slot of its row; a rank brings no tokens, and the rounds with one follow
    rounds without.
    """
    if device.type == "cuda":
        pytest.skip("NCCL takes two nodes of one machine by tests/two_gpu_nodes.sh only")
    exchange = {"payload": payload}
    ep = make_ep(ranks_per_node=1, hidden=128, dtype="bfloat16", exchange=exchange, **HAS_ROOM)
    for seed, kind in enumerate((None, ID, WIDE, None, ID)):
        counts = [0 if r == seed % size else 9 - r for r in range(size)]
        tokens = [make_tokens(ep.config, r, T, seed=seed) for r, T in enumerate(counts)]
        extras = kind and [make_extra(kind, r, T, seed) for r, T in enumerate(counts)]
        check_round(ep, tokens, layout, extras=extras)


@pytest.mark.parametrize("payload", ["auto", "fp8"])
def test_other_calls_of_the_same_windows(make_ep, rank, size, payload):
    """Phases apart, a smaller D and dtype, rows that the caller has quantized, and combine of the
    rows themselves.
    """
    ep = make_ep(ll_max_tokens=8, hidden=256, exchange={"payload": payload}, **HAS_ROOM)
    # Phases apart.
    for T in (5, 16):
        tokens = [make_tokens(ep.config, r, T, seed=T) for r in range(size)]
        extras = [make_extra(WIDE, r, T) for r in range(size)]
        check_round(ep, tokens, "expert", phases=True, extras=extras)
    # A smaller D, and fp8 rows of the caller.
    x, ids, weights = given(ep, tokens[rank])
    extra = make_extra(ID, rank, 16).to(ep.device)
    small = x[:, :128].bfloat16()
    scales = None
    if payload == "fp8":
        small, scales = epmoe.quantize_fp8(small)
    d = ep.dispatch(small, ids, weights, scales=scales, extra=extra)
    assert (
        d.rows.shape[1] == 128
        and d.extra.shape == d.rows.shape[:1]
        and d.extra.dtype == extra.dtype
    )
    ep.combine(d.rows.to(d.dtype), d)
    # combine takes the rows of dispatch themselves.
    d = ep.dispatch(x, ids, weights, extra=extra)
    assert torch.equal(d.extra, d.extra) and d.extra.data_ptr() == d.extra.data_ptr(), "a view"
    rows = d.rows if payload == "auto" else d.rows.to(d.dtype)
    rows.mul_(1)
    assert ep.combine(rows, d).shape == x.shape
    assert_round(ep, tokens[rank])


@pytest.mark.parametrize("how", ["last", "named"])
def test_skip(make_ep, rank, size, how):
    """A rank takes part in a round with one, and in a round without; the others get through."""
    ep = make_ep(**HAS_ROOM)
    tokens = make_tokens(ep.config, rank, 6)
    extra = make_extra(WIDE, rank, 6).to(ep.device)
    # Rounds with `extra` and without, which rank 0 plays or skips.
    for with_one in (True, False, True):
        sent = extra if with_one else None
        for skips in (False, True):
            if skips and rank == 0:
                shape = ep.last_shape._replace(extra=None if sent is None else Extra.of(sent))
                ep.skip(None if how == "last" else shape)
                continue
            d = ep.dispatch(*given(ep, tokens), extra=sent)
            assert (d.extra is None) is not with_one
            y = ep.combine(run_experts(ep, d), d)
        ep.check()
    assert rank == 0 or y.shape == tokens.x.shape


@ON_GPUS
@pytest.mark.parametrize("kind", [ID, WIDE])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("ll_max_tokens", [8, 256])
def test_replays_of_a_graph_read_it_anew(make_ep, rank, size, ll_max_tokens, layout, kind):
    ep = make_ep(ll_max_tokens, top_k=2, dtype="bfloat16", **HAS_ROOM)
    x, ids, weights = given(ep, make_tokens(ep.config, rank, 12))
    extra = make_extra(kind, rank, 12).to(ep.device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        d = ep.dispatch(x, ids, weights, extra=extra, layout=layout)
        got, rows = (d.recv.extra, d.recv.x) if layout == "rank" else (d.extra, d.rows)
        got = got.clone()
        (ep.combine_partial if layout == "rank" else ep.combine)(rows, d)
        return got, d.recv.counts if layout == "rank" else d.expert_offsets

    # Each replay has what an eager round has, in slots or rows that are in use.
    replay, (got, ends) = captured(run)
    for seed in range(3):
        extra.copy_(make_extra(kind, rank, 12, seed))
        replay()
        replayed = bits(got)
        want = bits(run()[0])
        if layout == "rank":
            for r, count in enumerate(ends.tolist()):
                assert torch.equal(replayed[r, :count], want[r, :count])
        else:
            assert torch.equal(replayed[: ends[-1]], want[: ends[-1]])
    ep.check()
