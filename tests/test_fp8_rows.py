"""Mistakes with rows that are already fp8: each is one sentence, before anything is sent. Rounds: tests/distributed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import alone, distinct_ids, randn

import epmoe
from epmoe.native import ops

E, D, K, T = 12, 384, 3, 5
FP8 = torch.float8_e4m3fn
Q, SCALES = epmoe.quantize_fp8(randn(T, D))
IDS, WEIGHTS = distinct_ids(T, E, K), torch.full((T, K), 1 / K)


def make_ep(payload: str = "fp8") -> epmoe.ExpertParallel:
    return epmoe.ExpertParallel(alone(E, K, D, "bfloat16", 16, exchange={"payload": payload}))


@pytest.fixture
def ep() -> Iterator[epmoe.ExpertParallel]:
    with make_ep() as ep:
        yield ep


def test_combine_takes_the_dtype_of_the_config(ep):
    d = ep.dispatch(Q, IDS, WEIGHTS, scales=SCALES)
    assert (d.dtype, d.rows.dtype, d.hidden_size) == (torch.bfloat16, FP8, D)
    with pytest.raises(TypeError, match="`expert_rows` must be bfloat16"):
        ep.combine(torch.zeros(d.rows.shape), d)
    ep.combine(torch.zeros(d.rows.shape, dtype=torch.bfloat16), d)


def test_rows_and_scales_of_any_stride(ep):
    """Slices of wider tensors need no copy of the caller's."""
    wide, wide_scales = torch.zeros(T, 1000).to(FP8), torch.zeros(T, 10)
    wide[:, 16 : 16 + D], wide_scales[:, 3:6] = Q, SCALES
    for x, scales in ((Q, SCALES), (wide[:, 16 : 16 + D], wide_scales[:, 3:6])):
        d = ep.dispatch(x, IDS, WEIGHTS, scales=scales)
        used = int(d.expert_offsets[-1])
        assert torch.equal(d.rows[:used].float().sum(0), Q.float().sum(0) * K)
        assert torch.equal(d.scales[:used].sort(0).values, SCALES.repeat(K, 1).sort(0).values)
        ep.abort(d)


def test_no_tokens(ep):
    d = ep.dispatch(Q[:0], IDS[:0], WEIGHTS[:0], scales=SCALES[:0])
    assert ep.combine(torch.zeros(d.rows.shape, dtype=d.dtype), d).shape == (0, D)


def test_the_operator_checks_what_would_be_a_wild_pointer(ep):
    d = ep.dispatch(Q, IDS, WEIGHTS, scales=SCALES)
    ep.abort(d)
    rest = (None, T, *ep.exchange.memory, d.sent.descriptor)
    for x, scales in ((Q, None), (Q.bfloat16(), SCALES), (Q, SCALES[:, :2]), (Q, SCALES.double())):
        with pytest.raises(RuntimeError, match="scales"):
            ops.dispatch(x, IDS, WEIGHTS, scales, *rest)
