"""Experts in MXFP4 and NVFP4, drawn: shapes, rows of each expert, scales, biases, activations,
strides and NaN, against fp64 by decoders that share nothing with epmoe's.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from expert_inputs import BF16, FP8, GPT_OSS, MXFP4, real_outputs
from helpers import ON_GPUS, long, poison_
from test_few_rows import segments
from test_mxfp4_by_fp8 import E8M0, MAGNITUDES, as_fp8
from test_nvfp4 import SCALES
from torch import Tensor

import epmoe
from epmoe.local.gemm.gemm import Segments

pytestmark = pytest.mark.usefixtures("serving")

# The kernels that keep rows in fp8 between the products have names that begin so. Others have bf16.
OF_FP8_ROWS = "fused_experts_mxfp4"
ACTIVATIONS: list[dict[str, Any]] = [{}, {"interleaved": True}, {"limit": 2.0}, GPT_OSS]
SPACES = [(0, 0), (48, 16)]  # columns behind a row, and in front of it
EXPONENTS = [(-3, 2), (-20, 3), (4, 12)]
SIZES = [(64, 64), (128, 128), (192, 320), (448, 704), (512, 256), (2880, 320)]
COUNTS = [
    [1, 0, 8, 9, 3, 0, 17, 100],
    [15, 16, 17, 31, 32, 33, 64, 65],
    [47, 48, 49, 64, 66, 128, 240, 300],
    [0, 0, 0, 513, 0, 2, 0, 1],
]


class Limits(NamedTuple):
    """The largest errors, over the size that a sum of random terms has."""

    element: float
    row: float
    mean: float
    """of the rows of a case"""


# e4m3 between the products has three bits of fraction, and the order of sums changes some of them.
LIMITS_OF_FP8 = Limits(0.25, 0.12, 0.012)
LIMITS_OF_BF16 = Limits(0.12, 0.08, 0.012)


class Options(NamedTuple):
    """What a case has."""

    counts: list[int]
    D: int
    F: int
    activation: dict[str, Any] = {}  # noqa: RUF012
    has_biases: tuple[bool, bool] = (False, False)
    exponents: tuple[int, int] = (-3, 2)
    """of scales in MXFP4, about such that outputs are as large as rows"""
    spaces: tuple[int, int] = (0, 0)
    has_gaps: bool = True
    nan_rows: float = 0.0
    """the share of rows that have a NaN"""
    rows_per_expert: float | None = None
    is_nvfp4: bool = False
    in_fp8: bool = True
    """whether rows are fp8"""
    is_exact: bool = False
    """rows are small integers times powers of two, so that the first sums are exact in fp32"""
    seed: int = 0


def drawn_options(seed: int, *, largest: int, most_rows: int, is_nvfp4: bool) -> Options:
    draw = random.Random(seed)
    counts = []
    for _ in range(draw.randint(1, 12)):
        low, high = draw.choice([(0, 0), (1, 16), (17, 64), (65, 300)])
        counts.append(min(draw.randint(low, high), most_rows))
    D, F = (64 * draw.randint(1, largest // 64) for _ in range(2))
    # One of gpt-oss's size now and then, with few experts.
    if largest > 512 and draw.randrange(50) == 0:
        D = F = 2880
        counts = counts[:3]
    low = draw.randint(-12, 2)
    mean = max(sum(counts) / len(counts), 0.1)
    return Options(
        counts,
        D,
        F,
        activation=draw.choice([*ACTIVATIONS, {"alpha": 1.702}, {"up_offset": 0.5, "limit": 3.0}]),
        has_biases=(draw.random() < 0.5, draw.random() < 0.5),
        exponents=(low, low + draw.randint(0, 12)),
        spaces=(16 * draw.randint(0, 8), 16 * draw.randint(0, 2)),
        has_gaps=draw.random() < 0.8,
        nan_rows=draw.choice([0.0, 0.0, 0.2]),
        rows_per_expert=draw.choice([None, 8.0, mean]),
        is_nvfp4=is_nvfp4,
        in_fp8=not is_nvfp4 or draw.random() < 0.7,
        seed=seed,
    )


class Case:
    """Experts and rows of `Options`, drawn on the device, with NaN in gaps, behind the last row,
    and around each row.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.drawn = torch.Generator(device).manual_seed(options.seed)
        e = len(options.counts)
        D = options.D
        F = options.F
        self.codes = [self._bytes(0, 256, e, 2 * F, D // 2), self._bytes(0, 256, e, D, F // 2)]
        self.scales = [self._scales(e, 2 * F, D), self._scales(e, D, F)]
        self.tensor_scales: Tensor | None = None
        if options.is_nvfp4:
            sizes = torch.tensor([D, D, F], device=device)
            factors = torch.rand(e, 3, generator=self.drawn, device=device) + 0.5
            self.tensor_scales = factors / (300 * sizes.sqrt())
        self.biases = [
            self._normal(e, n) if has_bias else None
            for n, has_bias in zip((2 * F, D), options.has_biases, strict=True)
        ]
        self._draw_rows()

    def _bytes(self, low: int, end: int, *shape: int) -> Tensor:
        return torch.randint(
            low, end, shape, generator=self.drawn, device=self.device, dtype=torch.uint8
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.drawn, device=self.device).to(BF16)

    def _scales(self, e: int, n: int, k: int) -> Tensor:
        """Bytes of the scales of e matrices [n, k]."""
        if self.options.is_nvfp4:
            # From 2 to 448, and some subnormal ones and zeros.
            scales = self._bytes(64, 127, e, n, k // 16)
            is_small = self._bytes(0, 10, *scales.shape) == 0
            return torch.where(is_small, scales % 8, scales)
        one = 127 - round(math.log2(k) / 2)
        low, high = self.options.exponents
        return self._bytes(one + low, one + high + 1, e, n, k // 32)

    def _draw_rows(self) -> None:
        counts = self.options.counts
        D = self.options.D
        gap = 5 if self.options.has_gaps else 0
        starts, offsets, tokens = segments(counts, gap=gap)
        self.offsets = offsets.to(self.device)
        self.tokens = tokens.to(self.device) if gap else None
        self.real = torch.cat(
            [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        ).to(self.device)
        N = int(offsets[-1]) + 64
        plain = self._normal(sum(counts), D)
        behind, before = self.options.spaces
        is_nan = self._bytes(0, 100, sum(counts)) < 100 * self.options.nan_rows
        self.is_nan = is_nan
        # Values of rows that have a NaN count as 0.
        if not self.options.in_fp8:
            self.row_scales = None
            self.rows = poison_(torch.empty(N, D, dtype=BF16, device=self.device))
            self.rows[self.real] = plain
            self.rows[self.real[is_nan], D // 3] = torch.nan
            self.values = plain.double().masked_fill(is_nan[:, None], 0)
            return
        quantized, scales, values = as_fp8(plain)
        if self.options.is_exact:
            quantized = plain.clamp(-3, 3).round().to(FP8)
            scales = torch.exp2(self._bytes(0, 4, *scales.shape).float() - 2)
            values = quantized.double() * scales.double().repeat_interleave(128, 1)[:, :D]
        self.values = values.masked_fill(is_nan[:, None], 0)
        longer = poison_(torch.empty(N, before + D + behind, dtype=FP8, device=self.device))
        self.rows = longer[:, before : before + D]
        rows = self.rows.view(torch.uint8)
        rows[self.real] = quantized.view(torch.uint8)
        rows[self.real[is_nan], D // 3] = 0x7F
        # Scales lie in wider rows, too, where rows do.
        blocks = scales.shape[1]
        longer = poison_(torch.empty(N, blocks + behind // 16, device=self.device))
        self.row_scales = longer[:, :blocks]
        self.row_scales[self.real] = scales

    def experts(self) -> epmoe.GroupedExperts:
        scale = FP8 if self.options.is_nvfp4 else E8M0
        gate_up, down = (codes.view(MXFP4) for codes in self.codes)
        scales = [scales.view(scale) for scales in self.scales]
        return epmoe.GroupedExperts(
            gate_up,
            down,
            gate_up_scales=scales[0],
            down_scales=scales[1],
            tensor_scales=self.tensor_scales,
            gate_up_bias=self.biases[0],
            down_bias=self.biases[1],
            **self.options.activation,
        )

    def outputs(self, experts: epmoe.GroupedExperts) -> Tensor:
        """Of the real rows."""
        options = {"rows_per_expert": self.options.rows_per_expert}
        segments = self.offsets, self.tokens
        return real_outputs(experts, self.rows, self.row_scales, segments, self.real, **options)

    def keeps_fp8(self, experts: epmoe.GroupedExperts) -> bool:
        """Whether the kernel that this call takes has fp8 between the products."""
        given = Segments(self.offsets, self.tokens, 1, self.options.rows_per_expert)
        gemm = experts.stage._gemm_for(self.rows, self.row_scales, given, experts._weights(None))
        return gemm.name.startswith(OF_FP8_ROWS)

    def weights(self) -> list[Tensor]:
        """Gate and up, and down, in fp64."""
        signed = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=self.device).double()
        decoded = []
        for codes, scales in zip(self.codes, self.scales, strict=True):
            values = torch.stack([signed[(codes & 15).long()], signed[(codes >> 4).long()]], -1)
            if self.options.is_nvfp4:
                factors = SCALES.to(self.device)[scales.long()]
            else:
                factors = torch.exp2(scales.double() - 127)
            by_group = values.flatten(2).unflatten(2, (factors.shape[2], -1))
            decoded.append((by_group * factors[..., None]).flatten(2))
        if self.tensor_scales is not None:
            gate, up, down = self.tensor_scales.double().T[..., None, None]
            gates, ups = self._halves(decoded[0])
            gates *= gate
            ups *= up
            decoded[1] *= down
        return decoded

    def _halves(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Views of gates and ups, of [e, 2F, k]."""
        if self.options.activation.get("interleaved"):
            return gate_up[:, ::2], gate_up[:, 1::2]
        gates, ups = gate_up.chunk(2, 1)
        return gates, ups

    def _activated(self, sums: Tensor) -> Tensor:
        """h of products with biases."""
        gate, up = (half.mT for half in self._halves(sums.mT))
        activation = self.options.activation
        limit = activation.get("limit", math.inf)
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit) + activation.get("up_offset", 0.0)
        return gate * torch.sigmoid(activation.get("alpha", 1.0) * gate) * up

    def wanted(self, keeps_fp8: bool) -> tuple[Tensor, Tensor]:
        """Outputs in fp64, and how large a sum of their terms is where signs are random."""
        counts = torch.tensor(self.options.counts, device=self.device)
        gate_up, down = self.weights()
        # Each expert has as many rows, of which some are not there.
        places = torch.arange(max(self.options.counts), device=self.device) < counts[:, None]
        rows = self.values.new_zeros(*places.shape, self.options.D)
        rows[places] = self.values
        sums = rows @ gate_up.mT
        # Rows that are dequantized are rounded to bf16, and tensor cores add fp8 in 13 bits.
        # Some of a million sums are off by more than four times what is usual.
        noise = (2.0**-9 if keeps_fp8 else 2.0**-6) * (rows**2 @ (gate_up**2).mT).sqrt()
        if keeps_fp8:
            # Products are rounded before the bias is added.
            sums = sums.to(BF16).double()
        if self.biases[0] is not None:
            sums += self.biases[0].double()[:, None]
        h = self._activated(sums)
        # What h may be off where sums are, and where they are rounded the other way.
        noise = noise + 2.0**-8 * sums.abs()
        off = torch.maximum(
            (self._activated(sums + noise) - h).abs(), (self._activated(sums - noise) - h).abs()
        )
        of_terms = h**2 + (20 * off) ** 2
        if keeps_fp8:
            _, scales, values = as_fp8(h.flatten(0, 1))
            h = values.view_as(h)
            # Steps of e4m3 near 0, of which a term may be some off.
            steps = scales.double().repeat_interleave(128, 1)[:, : h.shape[2]] * 2.0**-9
            of_terms = of_terms + (4 * steps.view_as(h)) ** 2
        out = h @ down.mT
        sizes = (of_terms @ (down**2).mT).sqrt()
        if self.biases[1] is not None:
            out += self.biases[1].double()[:, None]
        return out[places], sizes[places]


class Errors(NamedTuple):
    """Of elements and rows, over the size that a sum of random terms has."""

    of_elements: Tensor
    of_rows: Tensor


def measured(case: Case) -> tuple[Errors, Limits]:
    """The errors of real rows without NaN, and what they may be."""
    experts = case.experts()
    keeps_fp8 = case.keeps_fp8(experts)
    got = case.outputs(experts).double()
    assert got[case.is_nan].isnan().all()
    want, sizes = case.wanted(keeps_fp8)
    is_real = ~case.is_nan
    off = (got - want)[is_real].abs()
    sizes = sizes[is_real]
    # Outputs, and products before a bias is added, are rounded to bf16.
    slack = 2.0**-8 * want[is_real].abs()
    bias = case.biases[1]
    if bias is not None:
        slack += 2.0**-8 * bias.double().abs().amax()
    of_elements = (off - slack) / sizes.clamp(min=1e-300)
    of_rows = off.norm(dim=1) / torch.hypot(sizes.norm(dim=1), want[is_real].norm(dim=1))
    return Errors(of_elements, of_rows), LIMITS_OF_FP8 if keeps_fp8 else LIMITS_OF_BF16


def errors(case: Case) -> tuple[Limits, Limits]:
    """The largest errors of a case, and what they may be."""
    found, limits = measured(case)
    if not found.of_rows.numel():
        return Limits(0.0, 0.0, 0.0), limits
    largest = found.of_elements.amax(), found.of_rows.amax(), found.of_rows.mean()
    return Limits(*torch.stack(largest).tolist()), limits


def check(cases: list[Options], device: torch.device) -> None:
    """Print the largest errors of all cases that have fp8 between the products, and of others."""
    worst: dict[Limits, list[float]] = {}
    counted: dict[Limits, int] = {}
    for options in cases:
        found, limits = errors(Case(options, device))
        fits = all(error <= limit for error, limit in zip(found, limits, strict=True))
        assert fits, f"{options}: {found}"
        before = worst.get(limits, [0.0, 0.0, 0.0])
        worst[limits] = [max(pair) for pair in zip(before, found, strict=True)]
        counted[limits] = counted.get(limits, 0) + 1
    for limits, most in worst.items():
        kind = "fp8" if limits == LIMITS_OF_FP8 else "bf16"
        print(f"{counted[limits]} cases with h in {kind}: at most", *(f"{x:.4f}" for x in most))


def all_pairs() -> list[Options]:
    """1,152 cases: all of sizes, rows, activations, biases, spaces and exponents."""
    products = itertools.product(
        COUNTS, SIZES, ACTIVATIONS, [(False, False), (True, True)], SPACES, EXPONENTS
    )
    return [
        Options(counts, *sizes, activation, biases, exponents, spaces, seed=seed)
        for seed, (counts, sizes, activation, biases, spaces, exponents) in enumerate(products)
    ]


@pytest.mark.parametrize("number", [12])
@pytest.mark.parametrize("is_nvfp4", [False, True])
def test_few_drawn_cases(device, is_nvfp4, number):
    largest = 256 if device.type == "cpu" else 768
    most_rows = 20 if device.type == "cpu" else 300
    given = {"largest": largest, "most_rows": most_rows, "is_nvfp4": is_nvfp4}
    check([drawn_options(seed, **given) for seed in range(number)], device)


@pytest.mark.parametrize("is_gpt_oss", [False, True])
def test_exact_sums(device, is_gpt_oss):
    """Where the first sums are exact, h differs in few rows only, by a number next to a tie. So
    each code and each scale counts.
    """
    for counts in COUNTS[:1] if device.type == "cpu" else COUNTS:
        given = {"exponents": (-2, 1), "is_exact": True, "has_biases": (is_gpt_oss, is_gpt_oss)}
        activation = GPT_OSS if is_gpt_oss else {}
        case = Case(Options(counts, 320, 192, activation, **given), device)
        found, _ = measured(case)
        is_off = (found.of_elements > 0.01).any(1)
        assert is_off.sum() <= max(2, 0.05 * len(is_off)), is_off.double().mean()


@ON_GPUS
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [100, long(4140)])
@pytest.mark.parametrize("is_nvfp4", [False, True])
def test_drawn_cases(device, is_nvfp4, number):
    given = {"largest": 768, "most_rows": 300, "is_nvfp4": is_nvfp4}
    check([drawn_options(seed, **given) for seed in range(number)], device)


@ON_GPUS
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_of_some_options(device):
    cases = all_pairs()
    assert len(cases) == 1152
    check(cases, device)
