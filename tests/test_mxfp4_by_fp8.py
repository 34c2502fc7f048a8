"""Experts in MXFP4 over rows in fp8: what they compute, by a decoder that shares nothing with
epmoe's, and in a layer whose rows travel as fp8.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from expert_inputs import BF16, FP8, GPT_OSS, MXFP4, real_outputs
from helpers import ON_GPUS, alone, generator, poison_, randn
from test_few_rows import segments
from torch import Tensor

import epmoe
from epmoe.local.gemm.table import GEMMS
from epmoe.local.quantize import dequantize_rows

pytestmark = pytest.mark.usefixtures("serving")

COUNTS = [1, 0, 8, 9, 3, 0, 17, 40]  # rows of each expert
E = len(COUNTS)
E8M0 = torch.float8_e8m0fnu
# Of codes, by their three bits behind the sign: two of exponent, one of fraction.
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# D and F: whole blocks of 128; a last block that is partly filled; gpt-oss's, in part.
SIZES = [(256, 128), (160, 96), (192, 320)]
# Error of a row, over its norm. h is bf16; or fp8 in a kernel for GPUs, which
# test_fused_experts_mxfp4.py compares with an h that is fp8, too.
LIMIT = {"cpu": 0.02, "cuda": 0.06}
# On GPUs, for calls with few rows in fp8: the first takes as few as leave most
# multiprocessors idle.
KERNELS = ("fewest_rows_mxfp4", "fused_experts_mxfp4")


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """fp64 [e, n, k] of bytes [e, n, k/2], the low four bits first, and e8m0 [e, n, k/32]."""
    e, n, half = codes.shape
    values = codes.new_empty(e, n, 2 * half, dtype=torch.float64)
    signed = values.new_tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    values[..., ::2] = signed[(codes % 16).long()]
    values[..., 1::2] = signed[(codes // 16).long()]
    powers = 2.0 ** (scales.double() - 127)
    powers[scales == 255] = math.nan
    return (values.view(e, n, -1, 32) * powers[..., None]).view(e, n, -1)


def as_fp8(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [N, k] in e4m3, a scale for each 128 of a row, and their product in fp64."""
    N, k = rows.shape
    blocks = torch.nn.functional.pad(rows.float(), (0, -k % 128)).view(N, -(-k // 128), 128)
    scales = blocks.abs().amax(2) / 448
    scales[scales == 0] = 1
    quantized = (blocks / scales[..., None]).to(FP8)
    values = quantized.double() * scales[..., None].double()
    return quantized.flatten(1)[:, :k], scales, values.flatten(1)[:, :k]


class Drawn:
    """Codes, scales and biases of experts, on the CPU."""

    def __init__(self, sizes: tuple[int, int], gpt_oss: bool) -> None:
        D, F = sizes
        drawn = generator(0)
        self.gpt_oss = gpt_oss
        self.codes, self.scales = [], []
        for n, k in ((2 * F, D), (D, F)):
            # Such that outputs are about as large as rows.
            one = 127 - round(math.log2(k) / 2)
            codes = torch.randint(256, (E, n, k // 2), generator=drawn, dtype=torch.uint8)
            scales = torch.randint(
                one - 6, one + 2, (E, n, k // 32), generator=drawn, dtype=torch.uint8
            )
            self.codes.append(codes)
            self.scales.append(scales)
        self.biases = []
        if gpt_oss:
            self.biases = [torch.randn(E, n, generator=drawn).to(BF16) for n in (2 * F, D)]

    def experts(self, device: torch.device, **options: object) -> epmoe.GroupedExperts:
        gate_up, down = (codes.view(MXFP4).to(device) for codes in self.codes)
        scales = [scales.view(E8M0).to(device) for scales in self.scales]
        if self.gpt_oss:
            biases = [bias.to(device) for bias in self.biases]
            options |= {"gate_up_bias": biases[0], "down_bias": biases[1], **GPT_OSS}
        return epmoe.GroupedExperts(
            gate_up, down, gate_up_scales=scales[0], down_scales=scales[1], **options
        )

    def outputs(self, values: Tensor, expert: int) -> Tensor:
        """In fp64, of rows that have these values."""
        gate_up, down = (
            decoded(codes[expert : expert + 1], scales[expert : expert + 1])[0]
            for codes, scales in zip(self.codes, self.scales, strict=True)
        )
        sums = values @ gate_up.T
        if not self.gpt_oss:
            gate, up = sums.chunk(2, 1)
            return (gate * torch.sigmoid(gate) * up) @ down.T
        sums = sums + self.biases[0][expert].double()
        gate = sums[:, ::2].clamp(max=7.0)
        up = sums[:, 1::2].clamp(-7.0, 7.0)
        h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        return h @ down.T + self.biases[1][expert].double()


class Rows:
    """Rows of segments, in fp8 or bf16, with NaN in gaps, behind the last, and behind each row."""

    def __init__(
        self, D: int, device: torch.device, in_fp8: bool = True, counts: list[int] = COUNTS
    ) -> None:
        starts, offsets, tokens = segments(counts)
        self.counts = counts
        self.offsets = offsets.to(device)
        self.tokens = tokens.to(device)
        self.real = torch.cat(
            [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        ).to(device)
        N = int(offsets[-1]) + 64
        plain = randn(sum(counts), D, seed=5, dtype=BF16)
        if not in_fp8:
            self.values = plain.double()
            self.scales = None
            self.rows = poison_(torch.empty(N, D, dtype=BF16, device=device))
            self.rows[self.real] = plain.to(device)
            return
        quantized, scales, self.values = as_fp8(plain)
        # As rows arrive whose last block is partly filled.
        longer = poison_(torch.empty(N, -(-D // 128) * 128, dtype=FP8, device=device))
        longer.view(torch.uint8)[self.real, :D] = quantized.view(torch.uint8).to(device)
        self.rows = longer[:, :D]
        self.scales = poison_(torch.empty(N, -(-D // 128), device=device))
        self.scales[self.real] = scales.to(device)

    def outputs(self, experts: epmoe.GroupedExperts, rows_per_expert: float | None) -> Tensor:
        """Of the real rows."""
        options = {"rows_per_expert": rows_per_expert}
        segments = self.offsets, self.tokens
        return real_outputs(experts, self.rows, self.scales, segments, self.real, **options)

    def wanted(self, drawn: Any) -> Tensor:
        """What `drawn.outputs` says of the rows of each expert."""
        parts = self.values.split(self.counts)
        return torch.cat([drawn.outputs(part, expert) for expert, part in enumerate(parts)])


def errors(got: Tensor, want: Tensor) -> Tensor:
    want = want.cpu()
    return (got.double().cpu() - want).norm(dim=1) / want.norm(dim=1)


@pytest.mark.parametrize("rows_per_expert", [None, 1.0])
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_are_those_of_the_codes(device, sizes, gpt_oss, rows_per_expert):
    drawn = Drawn(sizes, gpt_oss)
    rows = Rows(sizes[0], device)
    got = rows.outputs(drawn.experts(device), rows_per_expert)
    assert (errors(got, rows.wanted(drawn)) <= LIMIT[device.type]).all()


def assert_same_as_dequantized(experts: epmoe.GroupedExperts, rows: Rows, each: float) -> None:
    """Kernels for few rows give rows in fp8 the bits of these rows in bf16, `each` of an expert."""
    if "few_rows_mxfp4" not in experts.gemms:
        pytest.skip("no Hopper")
    experts._stage = experts._stage._replace(gemms=("few_rows_mxfp4", experts.gemm), most_rows={})
    got = rows.outputs(experts, each)
    plain = copy.copy(rows)
    plain.rows = dequantize_rows(rows.rows, rows.scales, BF16)
    plain.scales = None
    assert torch.equal(got.view(torch.int16), plain.outputs(experts, each).view(torch.int16))
    assert not got.isnan().any()


@ON_GPUS
@pytest.mark.parametrize("rows_per_expert", [1.0, 8.0, 20.0])
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, (2880, 64)])
def test_few_rows_in_fp8_are_those_dequantized(device, sizes, gpt_oss, rows_per_expert):
    experts = Drawn(sizes, gpt_oss).experts(device)
    assert_same_as_dequantized(experts, Rows(sizes[0], device), rows_per_expert)


@ON_GPUS
def test_so_few_rows_take_the_kernels_for_few(device, monkeypatch):
    """As few as leave most multiprocessors without a tile of the other kernel."""
    experts = Drawn((256, 128), gpt_oss=False).experts(device)
    if KERNELS[0] not in experts.gemms:
        pytest.skip("no Hopper")
    rows = Rows(256, device)
    outputs = torch.zeros_like(rows.rows, dtype=BF16)
    taken = []
    for name in KERNELS:
        monkeypatch.setattr(
            type(GEMMS[name]), "experts", lambda gemm, *_: taken.append(gemm.name) or outputs
        )
    for rows_per_expert in (0.5, 1.5, None):
        rows.outputs(experts, rows_per_expert)
    assert taken == [KERNELS[0], KERNELS[1], KERNELS[1]]


def test_a_row_depends_on_no_other_row(device):
    """Bitwise, with `batch_invariant`; NaN stays in its row, and that of a scale in its expert."""
    drawn = Drawn((192, 320), gpt_oss=True)
    experts = drawn.experts(device, batch_invariant=True)
    rows = Rows(192, device)
    got = rows.outputs(experts, None)
    bad = rows.real[::7]
    rows.rows.view(torch.uint8)[bad, 5] = 0x7F
    is_bad = torch.isin(rows.real, bad)
    again = rows.outputs(experts, None)
    assert again[is_bad].isnan().all()
    assert torch.equal(again[~is_bad], got[~is_bad])
    # Expert 2 has the rows behind that of expert 0.
    experts.down_scales.view(torch.uint8)[2, 3, 2] = 255
    again = rows.outputs(experts, None)
    of_expert = torch.zeros_like(is_bad)
    of_expert[1:9] = True
    assert again[of_expert, 3].isnan().all()
    assert torch.equal(again[~of_expert & ~is_bad], got[~of_expert & ~is_bad])


@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_layer_whose_rows_travel_as_fp8(device, sizes, gpt_oss):
    """Outputs are those of rows that this test has quantized."""
    D = sizes[0]
    T = 16
    drawn = Drawn(sizes, gpt_oss)
    config = alone(E, 2, D, "bfloat16", T, exchange={"payload": "fp8"})
    # Two experts for each token, which differ.
    ids = torch.stack([torch.arange(T) % E, (torch.arange(T) * 3 + 1) % E], 1)
    ids[ids[:, 0] == ids[:, 1], 1] += 1
    ids %= E
    weights = torch.rand(T, 2, generator=generator(3))
    x = randn(T, D, seed=4, dtype=BF16)
    # By the layer's stages.
    with epmoe.ExpertParallel(config, device=device) as ep:
        experts = drawn.experts(ep.device)
        d = ep.dispatch(x.to(ep.device), ids.int().to(ep.device), weights.to(ep.device))
        assert d.rows.shape[1] == D and d.scales.shape[1] == -(-D // 128)
        y = ep.combine(experts(d.rows, d.expert_offsets, d.scales), d).cpu()
    # In fp64, from the values that fp8 has.
    values = as_fp8(x)[2]
    want = torch.zeros(T, D, dtype=torch.float64)
    for t in range(T):
        for expert, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            want[t] += weight * drawn.outputs(values[t : t + 1], expert)[0]
    assert (errors(y, want) <= LIMIT[device.type]).all()
