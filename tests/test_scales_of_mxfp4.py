"""Scales of MXFP4 at the ends of e8m0, over rows in fp8: each of them is a power of two, sums may
be as small as 2^-140, and NaN stays where it belongs. CPUs multiply bf16, and count its subnormal
numbers as 0.
"""

from __future__ import annotations

import pytest
import torch
from expert_inputs import GPT_OSS
from helpers import ON_GPUS
from test_drawn_mxfp4 import Case, Options, errors
from torch import Tensor

pytestmark = pytest.mark.usefixtures("serving")

# Tiles of few rows and of many, and an expert that has none.
COUNTS = [3, 0, 17, 70, 1]
NAN = 255
ONE = 127
# Above it the kernel for rows in fp8 counts a scale as Inf. Products of a step are scaled before
# their rows are, so sums of such weights may be Inf from about 2^110 on.
LARGEST = ONE + 121


# What the host says of all cases.
SAID: dict[str, float] = {}


@pytest.fixture(autouse=True, params=[8.0, 200.0], ids=["few", "many"])
def rows_per_expert(request: pytest.FixtureRequest) -> None:
    """Either kernel for rows in fp8 takes all cases."""
    SAID["rows_per_expert"] = request.param


def few(device: torch.device, D: int = 192, F: int = 320, **options: object) -> Case:
    case = Case(Options(COUNTS, D, F, **SAID, **options), device)
    assert device.type == "cpu" or case.keeps_fp8(case.experts())
    return case


def times(case: Case, power: int) -> None:
    """Multiplies the rows by a power of two."""
    case.row_scales *= 2.0**power
    case.values *= 2.0**power


def assert_right(case: Case) -> None:
    found, limits = errors(case)
    assert all(error <= limit for error, limit in zip(found, limits, strict=True)), found


@ON_GPUS
def test_every_scale_is_a_power_of_two(device):
    """The bits of an output are those with scale 1 but for its exponent."""
    case = few(device, D=512, F=128)
    plain = case.scales[1].fill_(ONE)
    experts = case.experts()
    got = case.outputs(experts).double()
    # Output i has the scale i / 2.
    plain.copy_(torch.arange(512, device=device)[:, None].expand_as(plain) // 2)
    scales = plain[0, :, 0].double()
    want = got * torch.exp2(scales - ONE)
    again = case.outputs(case.experts()).double()
    assert again[:, scales == NAN].isnan().all()
    # What bf16 does not have, as it is below its normal numbers, is rounded.
    real = (scales != NAN) & (scales <= LARGEST - 8)
    normal = (want.abs() >= 2.0**-126) | (want == 0)
    assert torch.equal(again[:, real][normal[:, real]], want[:, real][normal[:, real]])
    assert ((again - want).abs()[:, real][~normal[:, real]] <= 2.0**-133).all()
    # Nothing is wrong and finite.
    large = (scales != NAN) & ~real
    is_finite = again[:, large].isfinite()
    assert torch.equal(again[:, large][is_finite], want[:, large][is_finite])


def fill(case: Case, gate_up: int, down: int) -> None:
    """Sets scales of both weights; every other one is the next larger."""
    for scales, byte in zip(case.scales, (gate_up, down), strict=True):
        scales.copy_(byte + scales % 2)


ON_BOTH = pytest.mark.parametrize("activation", [{}, {"interleaved": True}])


@ON_GPUS
@ON_BOTH
@pytest.mark.parametrize(
    ("gate_up", "down", "rows"), [(0, ONE + 40, 105), (ONE + 20, 0, 0), (0, 0, 125)]
)
def test_the_smallest_scales(device, activation, gate_up, down, rows):
    case = few(device, activation=activation)
    fill(case, gate_up, down)
    times(case, rows)
    assert_right(case)


@ON_BOTH
@pytest.mark.parametrize(
    ("gate_up", "down", "rows"), [(ONE + 108, ONE - 6, -112), (ONE - 40, ONE + 100, 30)]
)
def test_large_scales(device, activation, gate_up, down, rows):
    case = few(device, activation=activation)
    fill(case, gate_up, down)
    times(case, rows)
    assert_right(case)


def test_both_ends_in_one_row(device):
    """The larger scales decide."""
    case = few(device)
    for scales in case.scales:
        scales[..., ::3] = 0
    assert_right(case)


@pytest.mark.parametrize("activation", [{}, GPT_OSS])
def test_products_of_2_to_the_minus_140_are_0(device, activation):
    """bf16 has no such numbers. The bias of gate and up counts as it is."""
    case = few(device, activation=activation, has_biases=(activation == GPT_OSS, False))
    case.scales[0].fill_(ONE - 40)
    times(case, -104)
    if activation == GPT_OSS:
        assert_right(case)
        return
    got = case.outputs(case.experts())
    assert (got == 0).all()


def test_h_of_2_to_the_minus_140_is_no_nan(device):
    """Its scale is the smallest normal number, so that h is 0, or off by less than 2^-135."""
    case = few(device)
    case.scales[0].fill_(ONE - 40)
    times(case, -36)
    case.scales[1].fill_(ONE + 90)
    got = case.outputs(case.experts()).double()
    want, _ = case.wanted(False)
    down = case.weights()[1].abs().sum(2)
    allowed = down.repeat_interleave(torch.tensor(COUNTS, device=device), 0) * 2.0**-135
    assert got.isfinite().all()
    assert ((got - want).abs() <= allowed).all()


@ON_GPUS
def test_outputs_of_2_to_the_minus_130(device):
    """bf16 has them as subnormal numbers."""
    case = few(device)
    case.scales[1].fill_(0)
    got = case.outputs(case.experts()).double()
    want, sizes = case.wanted(case.keeps_fp8(case.experts()))
    assert (got != 0).any()
    assert ((got - want).abs() <= 0.25 * sizes + 2.0**-133).all()


def places_of(case: Case) -> list[tuple[int, int, int, int]]:
    """Weight, expert, row and group of some scales: at both ends, in the last block, which is
    partly filled, and of gates, ups and outputs.
    """
    D = case.options.D
    F = case.options.F
    rows = [0, F - 1, F, 2 * F - 1]
    places = [(0, expert, row, group) for expert in (2, 3) for row in rows for group in (0, -1)]
    return places + [
        (1, expert, row, g) for expert in (2, 3) for row in (0, D - 1) for g in (3, -1)
    ]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("beside", [ONE - 4, ONE + 2])
def test_a_scale_of_nan(device, interleaved, beside):
    """NaN of gate or up is that of all outputs of its expert, and NaN of down that of one. Other
    outputs have the bits that they had. `beside` are the scales: those from 2 on take a branch.
    """
    case = few(device, activation={"interleaved": interleaved})
    for scales in case.scales:
        scales.fill_(beside)
    want = case.outputs(case.experts())
    assert want.isfinite().all()
    of_expert = torch.arange(len(COUNTS), device=device)
    of_expert = of_expert.repeat_interleave(torch.tensor(COUNTS, device=device))
    for weight, expert, row, group in places_of(case):
        case.scales[weight][expert, row, group] = NAN
        got = case.outputs(case.experts())
        case.scales[weight][expert, row, group] = beside
        is_nan = torch.zeros_like(want, dtype=torch.bool)
        is_nan[of_expert == expert, slice(None) if weight == 0 else row] = True
        assert torch.equal(got.isnan(), is_nan), (weight, expert, row, group)
        assert same_bits(got[~is_nan], want[~is_nan])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_a_scale_of_nan_in_an_expert_without_rows(device):
    case = few(device)
    want = case.outputs(case.experts())
    for scales in case.scales:
        scales[1] = NAN
    assert same_bits(case.outputs(case.experts()), want)
