"""The experts in one kernel: which weights and calls it takes, and on GPUs its bits, with NaN all
around.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from expert_inputs import FP8
from helpers import ON_GPUS, ROOT, captured, poison_
from test_few_rows import COPIED_GB_PER_S, COUNTS, FEW_AND_MANY, LIMITS, MIDDLE, WIDTH, Rows, built

import epmoe
from epmoe.local.gemm.deep_gemm import DeepGemm
from epmoe.local.gemm.few_rows import Reading
from epmoe.local.gemm.few_rows_by_tma import most_rows_by_tma
from epmoe.local.gemm.fused_experts import FusedExperts, fewest_rows_fused, most_rows_fused
from epmoe.local.gemm.gemm import Segments
from epmoe.local.gemm.table import CHOICES, GEMMS

pytestmark = pytest.mark.usefixtures("serving")

FUSED = "fused_experts"
BY_TMA = "few_rows_by_tma"


def by(name: str, experts: epmoe.GroupedExperts) -> epmoe.GroupedExperts:
    """The experts, whose calls that know the rows of an expert take this GEMM."""
    experts._stage = experts._stage._replace(gemms=(name, experts.gemm), most_rows={})
    return experts


@ON_GPUS
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_outputs_agree_with_fp64(device, gpt_oss):
    experts = by(FUSED, built(FP8, device, gpt_oss))
    rows = Rows(COUNTS, FP8, device)
    errors = rows.errors(experts, rows.outputs(experts, 32.0))
    assert (errors <= LIMITS[FP8]).all(), errors.max()


# Tiles have up to 128 rows, 128 columns of h and 256 outputs. Every width has a loop of its own.
TILES = [
    *FEW_AND_MANY,
    ([127, 128, 129, 256, 0, 257, 113, 96], (WIDTH, MIDDLE)),
    ([16, 32, 48, 64, 80, 81, 97, 112], (WIDTH, MIDDLE)),
    # Half of the last tile of outputs is empty.
    (COUNTS, (640, 384)),
    (COUNTS, (128, 128)),
]


@ON_GPUS
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize(("counts", "sizes"), TILES)
def test_bits_are_those_of_few_rows_by_tma(device, counts, sizes, gpt_oss):
    """Also of rows that are NaN; on each of three runs."""
    experts = built(FP8, device, gpt_oss, sizes)
    rows = Rows(counts, FP8, device, width=sizes[0])
    bad = rows.real[::7]
    rows.rows.view(torch.uint8)[bad, 5] = 0x7F
    wanted = rows.outputs(by(BY_TMA, experts), 32.0)
    assert torch.equal(rows.real[wanted.isnan().any(1)], bad)
    for _ in range(3):
        got = rows.outputs(by(FUSED, experts), 32.0)
        differing = (got.view(torch.int16) != wanted.view(torch.int16)).sum(1)
        assert not differing.any(), (
            f"{int(differing.sum())} elements of {int(differing.count_nonzero())} rows"
        )


@ON_GPUS
@pytest.mark.parametrize("experts_of_rank", [1, 40, 1024])
def test_any_number_of_experts(device, experts_of_rank):
    """One, which has all rows; more than a warp lists at once; and as many as it takes."""
    sizes = (256, 128)
    weights = {
        "w_gate_up": torch.randn(experts_of_rank, 2 * sizes[1], sizes[0], device=device).to(FP8),
        "w_down": torch.randn(experts_of_rank, *sizes, device=device).to(FP8),
        "gate_up_scales": torch.rand(experts_of_rank, 2, 2, device=device),
        "down_scales": torch.rand(experts_of_rank, 2, 1, device=device),
    }
    experts = epmoe.GroupedExperts(**weights)
    counts = [3 + 1000 // experts_of_rank] * experts_of_rank
    rows = Rows(counts, FP8, device, width=sizes[0])
    wanted = rows.outputs(by(BY_TMA, experts), 32.0)
    got = rows.outputs(by(FUSED, experts), 32.0)
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


@ON_GPUS
def test_a_graph_takes_other_segments(device):
    experts = by(FUSED, built(FP8, device))
    rows = Rows(COUNTS, FP8, device)
    given = {"tokens_per_expert": rows.tokens, "alignment": 1, "rows_per_expert": 32.0}
    replay, out = captured(lambda: experts(rows.rows, rows.offsets, rows.scales, **given))
    other = Rows(COUNTS[::-1], FP8, device, seed=9)
    wanted = other.outputs(experts, 32.0)
    rows.offsets.copy_(other.offsets)
    rows.tokens.copy_(other.tokens)
    rows.rows.view(torch.uint8).copy_(other.rows.view(torch.uint8))
    rows.scales.copy_(other.scales)
    # Counters of the last replay are cleared by the next one.
    for _ in range(2):
        poison_(out)
        replay()
        assert torch.equal(out[other.real], wanted)


@ON_GPUS
def test_wild_segments_reach_no_other_memory(device):
    """What they say is clamped to the rows that there are, and to the tiles that have counters."""
    experts = by(FUSED, built(FP8, device))
    rows = Rows(COUNTS, FP8, device)
    wild = [-5, 2**30, 3, -(2**31), 40, 2**31 - 1, 0, 7, 9]
    counts = [2**31 - 1, -1, 2**30, 5, -(2**31), 2**31 - 1, 2, 3]
    rows.offsets.copy_(torch.tensor(wild, dtype=torch.int32))
    rows.tokens.copy_(torch.tensor(counts, dtype=torch.int32))
    rows.outputs(experts, 32.0)
    torch.cuda.synchronize()
    assert torch.ones(8, device=device).sum() == 8


@ON_GPUS
def test_no_rows_at_all(device):
    experts = by(FUSED, built(FP8, device))
    offsets = torch.zeros(len(COUNTS) + 1, dtype=torch.int32, device=device)
    none = torch.empty(0, WIDTH, dtype=FP8, device=device)
    scales = torch.empty(0, WIDTH // 128, device=device)
    assert experts(none, offsets, scales, rows_per_expert=0.0).shape == (0, WIDTH)


def test_which_calls_take_the_kernel():
    for rows, takes in ((None, False), (0.0, True), (96.0, True), (96.1, False)):
        segments = Segments(torch.zeros(3), None, 1, rows)
        assert GEMMS[FUSED].takes(segments, most_rows=96.0) is takes
    assert FUSED not in CHOICES


# Experts of one of two ranks, D, F.
SHAPES = {
    "DeepSeek-V3": (128, 7168, 2048),
    "Qwen3-235B": (64, 4096, 1536),
    "Qwen3-30B-A3B": (64, 2048, 768),
}


# Heads of the page's tables, and the GEMMs of a cell; of another program there is no choice.
HEADS = {
    "| one kernel / by TMA / DeepGEMM": (FUSED, BY_TMA, "deep_gemm"),
    "| one kernel / before / DeepGEMM": (FUSED, None, "deep_gemm"),
}


def measured() -> list[tuple[str, float, dict[str | None, float]]]:
    """Model, rows of an expert, and µs by each GEMM on one H200: the page's tables, and their
    routing by zipf.
    """
    page = (ROOT / "docs/experiments.md").read_text()
    found = []
    for head, names in HEADS.items():
        tables = re.findall(rf"^{re.escape(head)}.*?\n\n", page, re.DOTALL | re.MULTILINE)
        assert tables, head
        for table in tables:
            lines = [
                [cell.strip() for cell in line.strip("|").split("|")]
                for line in table.strip().split("\n")
            ]
            _, *counts = lines[0]
            for who, *cells in lines[2:]:
                model = who.removesuffix(", zipf")
                for count, cell in zip(counts, cells, strict=True):
                    if cell == "–":
                        continue
                    times = dict(zip(names, map(float, cell.split(" / ")), strict=True))
                    times.pop(None, None)
                    found.append((model, float(count), times))
    return found


def test_the_choice_is_within_3_percent_of_the_fastest():
    """On H200, with more rows than the kernels for few rows take."""
    checked = 0
    for model, rows, times in measured():
        e, D, F = SHAPES[model]
        memory = COPIED_GB_PER_S["H200"]
        reading = Reading.of(3 * e * D * F, memory, multiprocessors=132)
        chosen = "deep_gemm"
        if rows <= most_rows_fused(reading):
            chosen = FUSED
        if rows <= min(most_rows_by_tma(FP8, reading), fewest_rows_fused(reading)):
            chosen = BY_TMA
        # Up to 4 rows others are the choice, and a table need not have all.
        if rows <= 4 or chosen not in times:
            continue
        fastest = min(times.values())
        assert times[chosen] <= 1.03 * fastest, (model, rows, chosen)
        checked += 1
    assert checked > 30


def test_h100_takes_the_kernels_that_it_took():
    """There the kernel was not measured."""
    memory = COPIED_GB_PER_S["H100"]
    for e, D, F in SHAPES.values():
        reading = Reading.of(3 * e * D * F, memory, multiprocessors=132)
        assert most_rows_fused(reading) == 0
        assert fewest_rows_fused(reading) == math.inf


@pytest.mark.parametrize(
    ("deep_gemm", "fused", "borders"),
    [
        (None, None, (20, 1024)),
        # Without DeepGEMM weights would be dequantized.
        (ImportError("none"), None, (20, 1024)),
        (None, ValueError("too many experts"), (35, 1024)),
    ],
)
def test_borders_of_given_weights(monkeypatch, deep_gemm, fused, borders):
    """Of Qwen3-30B-A3B on H200, by which of the kernels take the weights."""
    reading = Reading.of(3 * 64 * 2048 * 768, COPIED_GB_PER_S["H200"], multiprocessors=132)
    monkeypatch.setattr(Reading, "on_gpu", lambda *weights: reading)
    monkeypatch.setattr(DeepGemm, "problem_with", lambda *weights: deep_gemm)
    monkeypatch.setattr(FusedExperts, "problem_with", lambda *weights: fused)
    weights = torch.zeros(0, 256, 128).to(FP8), torch.zeros(0, 128, 128).to(FP8)
    found = [math.floor(GEMMS[name].most_rows(*weights)) for name in (BY_TMA, FUSED)]
    assert tuple(found) == borders
    # Those of small experts, and of `batch_invariant` ones, stay.
    small = Reading(20.0, fast=True)
    assert most_rows_fused(small) < 20 < most_rows_by_tma(FP8, small) < fewest_rows_fused(small)
    invariant = GEMMS["invariant_few_rows"].most_rows(*weights)
    assert math.floor(invariant) == (96 if deep_gemm else 35)
