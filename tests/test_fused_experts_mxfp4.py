"""The kernel for experts in MXFP4 over rows in fp8, with NaN all around, by the decoder of
test_mxfp4_by_fp8.py, which has the tests that run without the kernel, too.
"""

from __future__ import annotations

import math

import pytest
import torch
from expert_inputs import BF16, FP8, GPT_OSS, MXFP4, real_outputs
from helpers import ON_GPUS, captured, generator, poison_, randn
from test_few_rows import segments
from test_mxfp4_by_fp8 import E8M0, as_fp8, decoded, errors
from torch import Tensor

import epmoe
from epmoe.local.gemm.fused_experts_mxfp4 import FusedExpertsOfMxfp4, has_many_rows
from epmoe.local.gemm.gemm import Segments
from epmoe.local.gemm.table import CHOICES, GEMMS

pytestmark = pytest.mark.usefixtures("serving")

KERNEL = "fused_experts_mxfp4"
COUNTS = [1, 0, 8, 9, 3, 0, 17, 100]  # rows of each expert
# D and F: whole blocks of 128; a last block that is partly filled; gpt-oss's.
SIZES = [(512, 256), (192, 320), (2880, 2880)]
# Errors of rows, over their norms: the largest and the mean. What lies between the products has
# three bits of fraction, and the order of sums changes some of these numbers. With 64 columns of h
# one of them may be an eighth of a row's norm. Outputs are bf16.
LIMIT = 0.1
MEAN = 0.006
ON_BOTH = pytest.mark.parametrize("gpt_oss", [False, True])
# Rows of an expert as the host says them: of the form for few rows, and of that for many.
FORMS = pytest.mark.parametrize("rows_per_expert", [8.0, 200.0], ids=["few", "many"])


class Case:
    """Experts, and rows of their segments with NaN in gaps and behind the last."""

    def __init__(
        self,
        counts: list[int],
        sizes: tuple[int, int],
        gpt_oss: bool,
        device: torch.device,
        *,
        exponents: tuple[int, int] = (-3, 2),
        seed: int = 0,
        stride: int | None = None,
        rows_per_expert: float = 8.0,
    ) -> None:
        D, F = sizes
        e = len(counts)
        self.gpt_oss = gpt_oss
        self.rows_per_expert = rows_per_expert
        drawn = generator(seed)

        # Codes, and scales in a range of exponents, about such that outputs are as large as rows.
        self.codes, self.scales = [], []
        for n, k in ((2 * F, D), (D, F)):
            one = 127 - round(math.log2(k) / 2)
            low, high = (min(max(one + power, 0), 254) for power in exponents)
            codes = torch.randint(256, (e, n, k // 2), generator=drawn, dtype=torch.uint8)
            scales = torch.randint(
                low, high + 1, (e, n, k // 32), generator=drawn, dtype=torch.uint8
            )
            self.codes.append(codes)
            self.scales.append(scales)
        self.biases: list[Tensor | None] = [None, None]
        if gpt_oss:
            self.biases = [torch.randn(e, n, generator=drawn, dtype=BF16) for n in (2 * F, D)]

        # Rows, and where they lie.
        self.counts = counts
        starts, offsets, tokens = segments(counts)
        self.offsets, self.tokens = offsets.to(device), tokens.to(device)
        self.real = torch.cat(
            [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        ).to(device)
        N = int(offsets[-1]) + 64
        values, scales, self.values = as_fp8(randn(sum(counts), D, seed=seed + 1, dtype=BF16))
        longer = poison_(torch.empty(N, stride or D, dtype=FP8, device=device))
        longer.view(torch.uint8)[self.real, :D] = values.view(torch.uint8).to(device)
        self.rows = longer[:, :D]
        self.row_scales = poison_(torch.empty(N, -(-D // 128), device=device))
        self.row_scales[self.real] = scales.to(device)
        self.experts = self.built(device)

    def built(self, device: torch.device, **options: object) -> epmoe.GroupedExperts:
        gate_up, down = (codes.view(MXFP4).to(device) for codes in self.codes)
        scales = [scales.view(E8M0).to(device) for scales in self.scales]
        biases = [None if bias is None else bias.to(device) for bias in self.biases]
        return epmoe.GroupedExperts(
            gate_up,
            down,
            gate_up_scales=scales[0],
            down_scales=scales[1],
            gate_up_bias=biases[0],
            down_bias=biases[1],
            **(GPT_OSS if self.gpt_oss else {}) | options,
        )

    def outputs(self, kernel: str = KERNEL) -> Tensor:
        """Of the real rows, by this kernel."""
        experts = self.experts
        experts._stage = experts._stage._replace(gemms=(kernel, experts.gemm), most_rows={})
        options = {"rows_per_expert": self.rows_per_expert}
        segments = self.offsets, self.tokens
        return real_outputs(experts, self.rows, self.row_scales, segments, self.real, **options)

    def wanted(self) -> Tensor:
        """In fp64, of the values of the codes, with fp8 between the products."""
        outputs = []
        device = self.rows.device
        gate_up, down = (
            decoded(codes.to(device), scales.to(device))
            for codes, scales in zip(self.codes, self.scales, strict=True)
        )
        biases = [None if bias is None else bias.to(device).double() for bias in self.biases]
        for expert, rows in enumerate(self.values.to(device).split(self.counts)):
            # Products are rounded before the bias is added.
            sums = (rows @ gate_up[expert].T).to(BF16).double()
            if self.gpt_oss:
                sums = sums + biases[0][expert]
                gate = sums[:, ::2].clamp(max=7.0)
                up = sums[:, 1::2].clamp(-7.0, 7.0)
                h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                gate, up = sums.chunk(2, 1)
                h = gate * torch.sigmoid(gate) * up
            if len(h):
                h = as_fp8(h)[2]
            out = h @ down[expert].T
            if self.gpt_oss:
                out = out + biases[1][expert]
            outputs.append(out)
        return torch.cat(outputs)


def check(case: Case) -> None:
    of_rows = errors(case.outputs(), case.wanted())
    assert (of_rows <= LIMIT).all(), of_rows.max()
    assert not len(of_rows) or of_rows.mean() <= MEAN


@ON_GPUS
@FORMS
@ON_BOTH
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "counts",
    [
        COUNTS,
        [15, 16, 17, 31, 32, 33, 64, 65],
        [47, 48, 49, 64, 66, 128, 240, 300],
        [81, 97, 113, 127, 143, 144, 145, 290],
        [0, 0, 0, 2000, 0, 2, 0, 1],
        [0] * 8,
    ],
)
def test_the_kernel_agrees_with_fp64(device, counts, sizes, gpt_oss, rows_per_expert):
    stride = -(-sizes[0] // 128) * 128
    case = Case(counts, sizes, gpt_oss, device, stride=stride, rows_per_expert=rows_per_expert)
    check(case)


@ON_GPUS
@FORMS
@pytest.mark.parametrize("exponents", [(-13, -2), (-20, 3), (-200, 0), (4, 12)])
def test_scales_of_any_distance(device, exponents, rows_per_expert):
    """Also 2^-127, which is no normal number, and those above 2."""
    case = Case(
        COUNTS, (704, 448), False, device, exponents=exponents, rows_per_expert=rows_per_expert
    )
    check(case)


@ON_GPUS
@FORMS
def test_a_power_of_two_in_all_scales_of_a_row_is_one_in_its_output(device, rows_per_expert):
    """It changes no other output."""
    sizes = (512, 256)
    case = Case([3, 150], sizes, False, device, rows_per_expert=rows_per_expert)
    got = case.outputs()
    power = 40
    scales = case.experts.down_scales.view(torch.uint8)
    scales[:, ::3] += power
    again = case.outputs()
    columns = torch.arange(sizes[0], device=device)
    is_far = columns % 3 == 0
    assert torch.equal(again[:, ~is_far], got[:, ~is_far])
    assert torch.equal(again[:, is_far].double(), got[:, is_far].double() * 2.0**power)


@ON_GPUS
@pytest.mark.parametrize("below", [14, 15, 16, 40])
def test_many_rows_round_what_is_far_below_the_largest_scale(device, below):
    """1 is exact 15 powers of two below the largest scale of its row of weights."""
    case = Case([200], (256, 128), False, device, rows_per_expert=200.0)
    # In the second group of each gate and up the first code is 1. All others are 0.
    case.codes[0].zero_()
    case.codes[0][:, :, 16] = 2
    case.experts = case.built(device)
    wanted = case.outputs()
    assert (wanted != 0).any()
    scales = case.experts.gate_up_scales.view(torch.uint8)
    scales[:, :, 2:] = scales[:, :, 1:2]
    scales[:, :, 0] = scales[:, :, 1] + below
    if below > 15:
        wanted.zero_()
    assert torch.equal(case.outputs(), wanted)


@ON_GPUS
@FORMS
@ON_BOTH
def test_by_the_kernel_a_row_depends_on_no_other_row(device, gpt_oss, rows_per_expert):
    """Bitwise, on three runs; NaN of rows stays there, and that of weights in its expert."""
    case = Case(
        [47, 48, 49, 64, 66, 128, 240, 300],
        (704, 448),
        gpt_oss,
        device,
        rows_per_expert=rows_per_expert,
    )
    got = case.outputs()
    bad = case.real[::7]
    case.rows.view(torch.uint8)[bad, 5] = 0x7F
    is_bad = torch.isin(case.real, bad)
    for _ in range(3):
        again = case.outputs()
        assert again[is_bad].isnan().all()
        assert torch.equal(again[~is_bad], got[~is_bad])
    # A scale of NaN.
    case.experts.down_scales.view(torch.uint8)[1, 3, 2] = 255
    again = case.outputs()
    of_expert = torch.zeros_like(is_bad)
    of_expert[47:95] = True
    assert again[of_expert, 3].isnan().all()
    assert torch.equal(again[~of_expert & ~is_bad], got[~of_expert & ~is_bad])


@ON_GPUS
@FORMS
def test_fewer_rows_have_the_bits_of_more(device, rows_per_expert):
    """A tile has as many columns as rows need."""
    sizes = (512, 320)
    most = [224, 112, 300, 64]
    many = Case(most, sizes, True, device, rows_per_expert=rows_per_expert)
    wanted = many.outputs()
    few = Case([1, 16, 17, 3], sizes, True, device, rows_per_expert=rows_per_expert)
    few.experts = many.experts
    firsts = torch.tensor([0, *most[:-1]], device=device).cumsum(0)
    keep = torch.cat(
        [torch.arange(n, device=device) + s for n, s in zip(few.counts, firsts, strict=True)]
    )
    few.rows.view(torch.uint8)[few.real] = many.rows.view(torch.uint8)[many.real[keep]]
    few.row_scales[few.real] = many.row_scales[many.real[keep]]
    assert torch.equal(few.outputs(), wanted[keep])


@ON_GPUS
@FORMS
def test_a_row_has_the_same_bits_in_a_tile_of_any_width(device, rows_per_expert):
    """All experts have the weights of the last one, and as many of its rows as they have."""
    counts = [1, 8, 9, 16, 33, 48, 64, 80, 96, 97, 128, 129, 144, 300]
    case = Case(counts, (512, 320), True, device, rows_per_expert=rows_per_expert)
    experts = case.experts
    for name in ("gate_up", "down"):
        for of_experts in (
            getattr(experts, f"w_{name}").view(torch.uint8),
            getattr(experts, f"{name}_scales").view(torch.uint8),
            getattr(experts, f"{name}_bias"),
        ):
            of_experts[:-1] = of_experts[-1]
    firsts = case.real.split(counts)
    rows = case.rows.view(torch.uint8)
    for own in firsts[:-1]:
        rows[own] = rows[firsts[-1][: len(own)]]
        case.row_scales[own] = case.row_scales[firsts[-1][: len(own)]]
    *others, longest = case.outputs().split(counts)
    assert longest.isfinite().all()
    for got in others:
        assert torch.equal(got, longest[: len(got)])


@ON_GPUS
@FORMS
def test_a_graph_takes_other_segments(device, rows_per_expert):
    case = Case(COUNTS, (512, 256), False, device, rows_per_expert=rows_per_expert)
    case.outputs()
    given = {"tokens_per_expert": case.tokens, "rows_per_expert": rows_per_expert}
    replay, out = captured(lambda: case.experts(case.rows, case.offsets, case.row_scales, **given))
    other = Case(COUNTS[::-1], (512, 256), False, device, seed=9, rows_per_expert=rows_per_expert)
    other.experts = case.experts
    wanted = other.outputs()
    case.offsets.copy_(other.offsets)
    case.tokens.copy_(other.tokens)
    case.rows.view(torch.uint8).copy_(other.rows.view(torch.uint8))
    case.row_scales.copy_(other.row_scales)
    for _ in range(2):
        poison_(out)
        replay()
        assert torch.equal(out[other.real], wanted)


@ON_GPUS
@FORMS
def test_wild_segments_reach_no_other_memory(device, rows_per_expert):
    case = Case(COUNTS, (512, 256), False, device, rows_per_expert=rows_per_expert)
    wild = [-5, 2**30, 3, -(2**31), 40, 2**31 - 1, 0, 7, 9]
    counts = [2**31 - 1, -1, 2**30, 5, -(2**31), 2**31 - 1, 2, 3]
    case.offsets.copy_(torch.tensor(wild, dtype=torch.int32))
    case.tokens.copy_(torch.tensor(counts, dtype=torch.int32))
    case.real = case.real[:1]
    case.outputs()
    torch.cuda.synchronize()
    assert torch.ones(8, device=device).sum() == 8


@ON_GPUS
@FORMS
@pytest.mark.parametrize("e", [1, 40, 1024])
def test_any_number_of_experts(device, e, rows_per_expert):
    """As many as the kernel takes, too."""
    counts = [3 + 1000 // e] * e
    case = Case(counts, (64, 64), False, device, rows_per_expert=rows_per_expert)
    check(case)


def test_which_calls_take_the_kernel():
    """Those with rows in fp8, also where the host does not know how many."""
    gemm = GEMMS[KERNEL]
    assert isinstance(gemm, FusedExpertsOfMxfp4)
    plain = torch.zeros(4, 64, dtype=BF16)
    rows = torch.zeros(4, 80).to(FP8)
    scales = torch.zeros(4, 1)
    assert not gemm.takes_rows(plain, None)
    assert gemm.takes_rows(rows, scales) and gemm.takes_rows(rows[:, :64], scales)
    assert not gemm.takes_rows(torch.zeros(4, 72).to(FP8), scales)
    for rows_per_expert in (None, 1.0, 1000.0):
        segments = Segments(torch.zeros(3), None, 1, rows_per_expert)
        assert gemm.takes(segments, gemm.most_rows(plain, plain))
    assert KERNEL not in CHOICES


@pytest.mark.parametrize(
    ("rows_per_expert", "N", "many"),
    [
        (1.0, 4096, False),
        (27.0, 4096, False),
        (28.0, 4096, True),
        (None, 64, False),
        (None, 512, True),
    ],
)
def test_which_calls_have_many_rows(rows_per_expert, N, many):
    """If the host does not know how many rows are real, all count."""
    assert has_many_rows(Segments(torch.zeros(9), None, 1, rows_per_expert), N, 8) is many
