"""zero_padding_rows_ and quantize_fp8: stale rows change neither real rows nor scales."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, poison_, poisoned_memory, randn, random_bits
from torch import Tensor

import epmoe
from epmoe.exchange.extra import Extra
from epmoe.native.formats import WireFormat

GRANULARITIES = ["tensor", "block"]


def padded(T: int, D: int, real: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`real` random rows, followed by stale rows that are NaN or large."""
    x = poison_(torch.empty(T, D, dtype=dtype))
    x[real + 1 :: 2] = 6e4
    x[:real] = randn(real, D, dtype=dtype) * 5
    return x.to(device)


def dequantized(quantized: epmoe.Quantized) -> Tensor:
    q = quantized.q.double().cpu()
    scales = quantized.scales.double().cpu()
    if scales.numel() == 1 and scales.dim() == 1:
        return q * scales
    return q * scales.repeat_interleave(128, 1)[:, : q.shape[1]]


def count_as(kind: str, n: int, device: torch.device) -> int | Tensor:
    return n if kind == "int" else torch.tensor(n, dtype=torch.int32, device=device)


@pytest.mark.parametrize("kind", ["int", "tensor"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
@pytest.mark.parametrize(("T", "real"), [(1024, 1), (128, 1), (4, 4), (5, 0), (0, 0)])
def test_padding_rows_become_zeros(device, T, real, dtype, kind):
    x = poison_(torch.empty(T, 96, dtype=dtype, device=device))
    x[:real] = 7
    assert epmoe.zero_padding_rows_(x, count_as(kind, real, device)) is x
    assert x[:real].eq(7).all() and x[real:].eq(0).all()


@pytest.mark.parametrize("tokens_per_request", [1, 4])
def test_padding_counts_tokens_of_all_requests(device, tokens_per_request):
    x = poison_(torch.empty(16, tokens_per_request, 40, device=device))
    x[:3] = 1.0
    epmoe.zero_padding_rows_(x, 3 * tokens_per_request)
    assert x[:3].eq(1).all() and x[3:].eq(0).all()


def test_padding_rows_with_a_stride_and_odd_sizes(device):
    beside = torch.ones(20, 11, dtype=torch.float16, device=device)
    epmoe.zero_padding_rows_(beside[:, 1:8], 13)
    assert beside[:13].eq(1).all() and beside[13:, 1:8].eq(0).all()
    assert beside[:, 0].eq(1).all() and beside[:, 8:].eq(1).all()


@pytest.mark.parametrize("num_tokens", [-1, 99])
def test_a_number_of_tokens_outside_the_batch_is_clamped(device, num_tokens):
    x = torch.ones(8, 16, device=device)
    epmoe.zero_padding_rows_(x, count_as("tensor", num_tokens, device))
    assert x.eq(float(num_tokens > 0)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("T", "real", "D"),
    [(1024, 1, 256), (128, 1, 7168), (32, 31, 128), (9, 9, 200), (6, 4, 77), (6, 0, 64)],
)
def test_quantizes_real_rows_only(device, T, real, D, granularity, dtype):
    x = padded(T, D, real, dtype, device)
    with poisoned_memory():
        got = epmoe.quantize_fp8(x, granularity=granularity, num_tokens=real)
    assert got.q.dtype == torch.float8_e4m3fn and got.q.shape == x.shape
    assert got.scales.isfinite().all() and got.scales.gt(0).all()
    assert got.q[real:].float().eq(0).all()
    if granularity == "block":
        assert got.scales[real:].eq(1).all()
    want = x[:real].double().cpu()
    blocks = (
        want
        if granularity == "tensor"
        else torch.nn.functional.pad(want, (0, -D % 128)).view(-1, 128)
    )
    if real:
        amax = blocks.abs().amax() if granularity == "tensor" else blocks.abs().amax(1)
        torch.testing.assert_close(
            got.scales[:real].double().cpu().flatten(), (amax / 448).flatten(), rtol=1e-6, atol=0
        )
    error = (dequantized(got)[:real] - want).abs()
    # Half a step of a normal e4m3 value, and one step of a subnormal.
    step = dequantized(got)[:real].abs() / 16 + got.scales.max().item() * 2**-9
    assert (error <= step * 1.01).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_any_bits_give_finite_scales(device, dtype, granularity):
    x = random_bits(40, 300, dtype=dtype).to(device)
    x[3] = torch.nan
    x[4] = torch.inf
    x[5, 7] = torch.nan
    got = epmoe.quantize_fp8(x, granularity=granularity)
    assert got.scales.isfinite().all() and got.scales.gt(0).all()
    values = got.q.float()
    assert torch.equal(values.isnan(), x.isnan())
    assert values[4].eq(448).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_and_tiny_values(device, granularity):
    x = torch.zeros(4, 256, device=device)
    assert epmoe.quantize_fp8(x, granularity=granularity).scales.eq(1).all()
    x[:] = 1e-45
    got = epmoe.quantize_fp8(x, granularity=granularity)
    assert got.scales.gt(0).all() and got.q.float().isfinite().all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_values_are_rounded_as_by_division(device, granularity):
    """q is x / scale rounded to e4m3. The x are midpoints of neighbouring e4m3 values, and floats
    next to them.
    """
    generator = torch.Generator().manual_seed(5)
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (numbers[1:] + numbers[:-1]) / 2
    for exponent in range(-133, 119, 1 if granularity == "block" else 23):
        scales = (1 + torch.rand(24, 1, generator=generator)) * 2.0**exponent
        # Midpoints times scales, or a float beside them.
        x = halfway * scales
        x = (
            x.view(torch.int32)
            + torch.randint(-1, 2, x.shape, generator=generator, dtype=torch.int32)
        ).view(x.dtype)
        # With the largest values, both signs and both zeros.
        x = torch.cat([x.clamp(min=0), 448 * scales, -448 * scales], 1)
        x[1::2] *= -1
        x[:, 0] = x.new_tensor([0.0, -0.0]).repeat(12)
        if granularity == "tensor":
            x = x[:1]
        got = epmoe.quantize_fp8(x.to(device), granularity=granularity)
        want = (x / got.scales.cpu()).to(torch.float8_e4m3fn)
        assert torch.equal(got.q.cpu().view(torch.uint8), want.view(torch.uint8)), f"2^{exponent}"


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_row_stride(device, granularity):
    wide = randn(20, 512).to(device)
    got = epmoe.quantize_fp8(wide[::2, 128:320], granularity=granularity)
    want = epmoe.quantize_fp8(wide[::2, 128:320].contiguous(), granularity=granularity)
    assert torch.equal(got.q.view(torch.uint8), want.q.view(torch.uint8)) and torch.equal(
        got.scales, want.scales
    )


def test_blocks_of_other_formats_on_the_cpu():
    """As rows of one block each. `extra` lies behind whole blocks."""
    x = randn(6, 96)
    given = torch.arange(6)
    wire = WireFormat("short", 1, torch.float8_e4m3fn, 8, torch.float32, 16)
    want = epmoe.quantize_fp8(x.view(-1, 16))
    rows, scales = Extra.of(given).behind(x, None, given, wire)
    assert rows.shape == (6, 112) and torch.equal(rows[:, :96].float(), want.q.view(6, 96).float())
    assert torch.equal(scales, torch.cat([want.scales.view(6, 6), torch.ones(6, 1)], 1))
