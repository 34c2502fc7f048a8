"""Training: the operators over rows. Gradients of rows and of their weights, against fp64; rows
packed as fp8.
"""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, NO_CUDA, assert_close, poisoned_memory, randn, random_bits

import epmoe
from epmoe.native import ops
from epmoe.native.formats import WIRE_FORMATS

N = 16
# Row 3 is a gap, and rows from 12 on lie past the end.
OFFSETS = [0, 4, 4, 12, 12]
TOKENS = [3, 0, 10**6, 0]
REAL = [t for t in range(12) if t != 3]
PACKED = WIRE_FORMATS["packed_fp8"]


def inputs(D: int, dtype: torch.dtype, device: torch.device):
    """grad, rows and weights, with NaN in rows of no pair, then offsets and counts."""
    grad = randn(N, D).to(dtype)
    rows = randn(N, D, seed=1).to(dtype)
    weights = randn(N, seed=2)
    for given in (grad, rows, weights):
        given[3] = torch.nan
        given[12:] = torch.nan
    segments = (torch.tensor(v, dtype=torch.int32) for v in (OFFSETS, TOKENS))
    return [t.to(device) for t in (grad, rows, weights, *segments)]


# A scalar at a time; a warp a row, a vector a lane and more; a block a row, a vector a thread and
# more.
@pytest.mark.parametrize("D", [1, 6, 136, 1288, 7168])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_weighted_rows(device, dtype, weighted, D):
    """Rows of no pair are neither read nor written, and gaps say 0 of their weights; the sums have
    the same bits.
    """
    grad, rows, weights, offsets, tokens = inputs(D, dtype, device)
    want = (grad.double() * rows.double()).sum(1)[REAL]
    want_grad = grad.clone()
    if weighted:
        want_grad[REAL] = (grad.float() * weights[:, None])[REAL].to(dtype)
    results = []
    # Twice, with the same bits.
    for _ in range(2):
        got = grad.clone()
        with poisoned_memory():
            by_weights = ops.weighted_rows_backward_(
                got, rows, weights if weighted else None, offsets, tokens
            )
        assert got.isnan().equal(grad.isnan()) and got.nan_to_num().equal(want_grad.nan_to_num())
        assert by_weights[3] == 0 and by_weights[12:].isnan().all()
        results.append(by_weights[REAL])
    assert torch.equal(*results)
    assert_close(results[0], want, torch.float32, slack=2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_any_stride_and_no_counts(device, dtype):
    grad, rows, weights, offsets, _ = inputs(2048, dtype, device)
    dense = torch.tensor([0, 3, 3], dtype=torch.int32, device=device)
    want = ops.weighted_rows_backward_(grad.clone(), rows, weights, dense, None)
    beside = torch.full((N, 2051), torch.nan, dtype=dtype, device=device)
    # Rows that begin at any address.
    for first in (0, 1):
        view = beside[:, first : first + 2048]
        view.copy_(rows)
        got = ops.weighted_rows_backward_(again := grad.clone(), view, weights, dense, None)
        assert_close(got[:3], want[:3].double(), torch.float32)
        assert (
            torch.equal(again[:3], (grad.float() * weights[:, None])[:3].to(dtype))
            and again[3].isnan().all()
        )
    one = rows[:1].expand(N, -1)  # a stride of 0
    got = ops.weighted_rows_backward_(grad.clone(), one, None, dense, None)
    assert_close(got[:3], (grad[:3].double() * one[:3].double()).sum(1), torch.float32, slack=2)


@pytest.mark.parametrize("N, e", [(0, 3), (5, 0), (0, 0)])
def test_no_rows_and_no_experts(device, N, e):
    grad = torch.full((N, 24), 7.0, device=device)
    offsets = torch.zeros(e + 1, dtype=torch.int32, device=device)
    tokens = torch.zeros(e, dtype=torch.int32, device=device)
    assert ops.weighted_rows_backward_(grad, grad.clone(), None, offsets, tokens).shape == (N,)
    assert grad.eq(7.0).all()


@pytest.mark.parametrize("D", [128, 896, 7168])
@pytest.mark.parametrize("dtype", FLOATS)
def test_packed_rows_hold_what_quantize_says(device, dtype, D):
    """And come back as its values, in rows of segments."""
    # Any bits, and eight rows of ordinary values.
    x = random_bits(N, D, dtype=dtype)
    x[:8] = randn(8, D, dtype=dtype, seed=1)
    x = torch.cat([x, x], 1).to(device)[:, :D]  # with a stride
    real = torch.tensor(13, dtype=torch.int32, device=device)
    want = epmoe.quantize_fp8(x.contiguous(), num_tokens=13, granularity="block")
    # The number of real rows is an int, or a tensor.
    with poisoned_memory():
        packed = [ops.pack_fp8(x, None, 13), ops.pack_fp8(x, real, N)]
    for got in packed:
        assert (
            got.shape == (N, PACKED.row_bytes(D, dtype))
            and got.dtype == torch.float8_e4m3fn
            and got.shape[1] % 16 == 0
        )
        q, scales = got.view(torch.uint8)[:13].split([D, got.shape[1] - D], 1)
        assert torch.equal(q, want.q.view(torch.uint8)[:13])
        assert torch.equal(scales[:, : D // 32].contiguous().view(torch.float32), want.scales[:13])
    assert not packed[0][13:, :D].view(torch.uint8).any()
    # They come back as values.
    offsets = torch.tensor([0, 4, 4, 12], dtype=torch.int32, device=device)
    with poisoned_memory():
        rows = ops.unpack_fp8(packed[0], x, offsets)
    values = (want.q.float() * want.scales.repeat_interleave(128, 1)).to(dtype)
    assert (
        rows.dtype == dtype
        and rows[12:].isnan().all()
        and torch.equal(rows[:12].isnan(), values[:12].isnan())
    )
    assert torch.equal(rows[:12].nan_to_num(), values[:12].nan_to_num())


def test_no_rows_to_pack(device):
    x = torch.empty(0, 256, device=device)
    offsets = torch.zeros(3, dtype=torch.int32, device=device)
    packed = ops.pack_fp8(x, None, 0)
    assert packed.shape == (0, PACKED.row_bytes(256, x.dtype)) and ops.unpack_fp8(
        packed, x, offsets
    ).shape == (0, 256)
    assert ops.unpack_fp8(packed.new_empty(7, packed.shape[1]), x, offsets[:1]).shape == (7, 256)


@pytest.mark.gpu
@NO_CUDA
def test_rows_with_gaps_are_refused():
    grad, rows, weights, offsets, _ = inputs(256, torch.float32, torch.device("cuda"))
    with pytest.raises(RuntimeError, match="`rows` must be 2-D with contiguous rows"):
        ops.weighted_rows_backward_(grad, rows[:, :1].expand(-1, 256), weights, offsets, None)


def test_opcheck(device):
    grad, rows, weights, *_ = (t.nan_to_num() for t in inputs(64, torch.float32, device))
    offsets = torch.tensor([0, 5, N], dtype=torch.int32, device=device)
    for given in ((weights, offsets, None), (None, offsets, offsets[:2] + 9)):
        torch.library.opcheck(
            ops.weighted_rows_backward_, (grad, rows, *given), test_utils="test_schema"
        )


@pytest.mark.gpu
@NO_CUDA
def test_more_than_2_to_the_31_elements():
    N = 300_001
    D = 7168
    grad = torch.ones(N, D, dtype=torch.bfloat16, device="cuda")
    weights = torch.full((N,), 2.0, device="cuda")
    rows = (
        torch.arange(N, device="cuda").remainder(64).bfloat16()[:, None].expand(-1, D).contiguous()
    )
    offsets = torch.tensor([0, N - 1], dtype=torch.int32, device="cuda")
    # Sums of rows, and rows times their weights.
    dots = ops.weighted_rows_backward_(grad, rows, weights, offsets, None)
    assert torch.equal(dots[:-1], D * torch.arange(N - 1, device="cuda").remainder(64).float())
    assert (grad[:-1] == 2).all() and (grad[-1] == 1).all()
    del grad, rows
    # Rows in fp8 and back.
    x = torch.randint(-100, 100, (1, D), device="cuda").bfloat16().expand(N, -1)
    unpacked = ops.unpack_fp8(ops.pack_fp8(x, None, N), x, offsets)
    assert (unpacked[:-1] == unpacked[0]).all() and (
        unpacked[0].float() - x[0].float()
    ).abs().max() <= 4
