"""The experts in one kernel: which weights and calls it takes, and on GPUs its bits, with NaN all
around.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from busy import Holder
from expert_inputs import BF16, FP8, MXFP4
from helpers import ON_GPUS, ROOT, captured, is_right_in_a_fork, poison_
from test_few_rows import COUNTS, FEW_AND_MANY, LIMITS, MIDDLE, WIDTH, Rows, built
from test_fused_experts_mxfp4 import Case
from torch import Tensor

import epmoe
from epmoe.local.gemm import fused_experts, fused_experts_mxfp4
from epmoe.local.gemm.gemm import Segments
from epmoe.local.gemm.table import CHOICES, GEMMS

pytestmark = pytest.mark.usefixtures("serving")

FUSED = "fused_experts"


def fused(device: torch.device, gpt_oss: bool = False, **options: object) -> epmoe.GroupedExperts:
    """Experts whose calls all take the kernel."""
    experts = built(FP8, device, gpt_oss, batch_invariant=True, **options)
    assert experts.gemms == (FUSED,) and experts.alignment == 1
    return experts


@ON_GPUS
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_outputs_agree_with_fp64(device, gpt_oss):
    experts = fused(device, gpt_oss)
    rows = Rows(COUNTS, FP8, device)
    errors = rows.errors(experts, rows.outputs(experts, None))
    assert (errors <= LIMITS[FP8]).all(), errors.max()


# Tiles have 128 columns of h, 256 outputs, and up to 80 rows or up to 144, as the launch chooses.
# Every width of either kind has a loop of its own. From 97 rows on tokens are the rows of the
# tensor core, but those beyond 128.
FULL = [121, 250, 5, 128, 0, 383, 112, 113]
# The last tile of an expert has up to 16 rows more than 128.
OVERFULL = [129, 144, 145, 272, 0, 273, 136, 96]
SMALL = [1, 0, 8, 9, 3, 0, 17, 80]
TILES = [
    *FEW_AND_MANY,
    # Also the last rows that there are; and half of the last tile of outputs is empty.
    (FULL, (WIDTH, MIDDLE)),
    (FULL, (640, 384)),
    ([16, 32, 48, 64, 80, 79, 65, 1], (WIDTH, MIDDLE)),
    # One expert has four tiles of up to 80 rows, where three larger ones were enough: ten in all,
    # and not nine, which is a ninth more.
    ([300, 80, 64, 48, 16, 1, 0, 33], (WIDTH, MIDDLE)),
    # One tile more than eight is too many.
    ([300, 80, 64, 48, 16, 0, 0, 33], (WIDTH, MIDDLE)),
    ([127, 128, 129, 256, 0, 257, 113, 96], (WIDTH, MIDDLE)),
    (OVERFULL, (WIDTH, MIDDLE)),
    (OVERFULL, (640, 384)),
    ([16, 32, 48, 64, 80, 81, 97, 112], (WIDTH, MIDDLE)),
    # Half of the last tile of outputs is empty.
    (COUNTS, (640, 384)),
    (COUNTS, (128, 128)),
    # Tiles of up to 80 rows load two steps of k at once: an odd number of them, and one alone.
    (SMALL, (640, 384)),
    (SMALL, (128, 128)),
]


def only(name: str, experts: epmoe.GroupedExperts) -> epmoe.GroupedExperts:
    """The experts, whose calls of 32 rows an expert take this GEMM."""
    experts._stage = experts._stage._replace(gemms=(name, experts.gemm), most_rows={})
    return experts


@ON_GPUS
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("other", ["few_rows_by_tma", "deep_gemm"])
@pytest.mark.parametrize(("counts", "sizes"), TILES)
def test_bits_are_those_of_other_kernels(device, counts, sizes, other, gpt_oss):
    """Also beside rows that are NaN; on each of three runs."""
    if other == "deep_gemm":
        pytest.importorskip("deep_gemm")
    # The same rows lie at multiples of 64 for DeepGEMM, and anywhere for the kernel.
    theirs = Rows(counts, FP8, device, width=sizes[0], alignment=64)
    ours = Rows(counts, FP8, device, width=sizes[0])
    for rows in (theirs, ours):
        rows.rows.view(torch.uint8)[rows.real[::7], 5] = 0x7F
    wanted = theirs.outputs(only(other, built(FP8, device, gpt_oss, sizes)), 32.0)
    assert wanted[::7].isnan().all()
    experts = fused(device, gpt_oss, sizes=sizes)
    for _ in range(3):
        got = ours.outputs(experts, None)
        assert torch.equal(got.isnan(), wanted.isnan())
        differing = (got.nan_to_num() != wanted.nan_to_num()).sum(1)
        assert not differing.any(), (
            f"{int(differing.sum())} elements of {int(differing.count_nonzero())} rows"
        )


def test_python_and_kernels_take_as_many_experts():
    text = (ROOT / "csrc/args.h").read_text()
    found = {name: int(n) for name, n in re.findall(r"(kFused\w*Experts\w*) = (\d+);", text)}
    names = {BF16: "kFusedExpertsBf16", FP8: "kFusedFp8Experts", MXFP4: "kFusedExperts"}
    most = fused_experts._MOST_EXPERTS | {MXFP4: fused_experts_mxfp4._MOST_EXPERTS}
    assert most == {dtype: found[name] for dtype, name in names.items()}


@ON_GPUS
@pytest.mark.parametrize("experts_of_rank", [1, 40, 512])
def test_any_number_of_experts(device, experts_of_rank):
    """One, which has all rows; more than a warp lists at once; and as many as it takes."""
    D = 256
    F = 128
    weights = {
        "w_gate_up": torch.randn(experts_of_rank, 2 * F, D, device=device).to(FP8),
        "w_down": torch.randn(experts_of_rank, D, F, device=device).to(FP8),
        "gate_up_scales": torch.rand(experts_of_rank, 2, 2, device=device),
        "down_scales": torch.rand(experts_of_rank, 2, 1, device=device),
    }
    counts = [3 + 1000 // experts_of_rank] * experts_of_rank
    rows = Rows(counts, FP8, device, width=D, alignment=64)
    wanted = rows.outputs(only("few_rows_by_tma", epmoe.GroupedExperts(**weights)), 32.0)
    got = rows.outputs(epmoe.GroupedExperts(**weights, batch_invariant=True), None)
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


class DrawnBatches:
    """Batches of rows from a pool, with other numbers of rows, places and gaps in each. They are
    drawn on the GPU, so that a graph plays a batch.
    """

    POOL = 256
    MOST_GAP = 8

    def __init__(self, device: torch.device, most_log2: float) -> None:
        self.experts = fused(device)
        # Rows of an expert are a power of two at random, less one.
        self.most_log2 = most_log2
        e = len(COUNTS)
        # Outputs of all rows of the pool by each expert, and behind them a row of NaN.
        pool = Rows([self.POOL] * e, FP8, device, alignment=64)
        wanted = pool.outputs(only("few_rows_by_tma", built(FP8, device)), 32.0)
        self.rows = poison_(torch.empty(e * self.POOL + 1, WIDTH, dtype=FP8, device=device))
        self.rows.view(torch.uint8)[:-1] = pool.rows.view(torch.uint8)[pool.real]
        self.scales = poison_(torch.empty(len(self.rows), WIDTH // 128, device=device))
        self.scales[:-1] = pool.scales[pool.real]
        self.wanted = poison_(torch.empty_like(wanted[:1])).repeat(len(self.rows), 1)
        self.wanted[:-1] = wanted
        self.N = e * (int(2**self.most_log2) + self.MOST_GAP)
        self.differing = torch.zeros((), dtype=torch.int64, device=device)
        self.played = torch.zeros((), dtype=torch.int64, device=device)

    def play(self) -> None:
        """Counts rows, and those of them that have other bits than the pool's."""
        e = len(COUNTS)
        device = self.rows.device
        tokens = (torch.rand(e, device=device) * self.most_log2).exp2().int() - 1
        gaps = torch.randint(self.MOST_GAP, (e,), dtype=torch.int32, device=device)
        offsets = torch.nn.functional.pad((tokens + gaps).cumsum(0), (1, 0)).int()
        # A row of the pool for each place that is real.
        places = torch.arange(self.N, dtype=torch.int32, device=device)
        expert = torch.searchsorted(offsets[1:], places, right=True).clamp(max=e - 1)
        is_real = places - offsets[expert] < tokens[expert]
        drawn = expert * self.POOL + torch.randint(self.POOL, (self.N,), device=device)
        drawn = drawn.where(is_real, len(self.rows) - 1)
        got: Tensor = self.experts(
            self.rows.view(torch.uint8)[drawn].view(FP8),
            offsets,
            self.scales[drawn],
            tokens_per_expert=tokens,
            alignment=1,
        )
        differs = (got.view(torch.int16) != self.wanted[drawn].view(torch.int16)).any(1)
        self.differing += (differs & is_real).sum()
        self.played += is_real.sum()


@ON_GPUS
@pytest.mark.timeout(300)
@pytest.mark.parametrize("most_log2", [9.0, 6.5])
@pytest.mark.parametrize(
    "batches", [1000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_a_row_has_the_same_bits_in_every_batch(device, batches, most_log2):
    """Whatever else is in the batch, and so in tiles of any width: mostly of up to 144 rows where
    experts have up to 511, and of up to 80 where they have up to 89.
    """
    drawn = DrawnBatches(device, most_log2)
    replay, _ = captured(drawn.play)
    for _ in range(batches):
        replay()
    assert drawn.played > 50 * batches
    assert drawn.differing == 0


@ON_GPUS
def test_a_graph_takes_other_segments(device):
    experts = fused(device)
    rows = Rows(COUNTS, FP8, device)
    given = {"tokens_per_expert": rows.tokens, "alignment": 1}
    replay, out = captured(lambda: experts(rows.rows, rows.offsets, rows.scales, **given))
    other = Rows(COUNTS[::-1], FP8, device, seed=9)
    wanted = other.outputs(experts, None)
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
@pytest.mark.parametrize("counts", [COUNTS, FULL])
def test_wild_segments_reach_no_other_memory(device, counts):
    """What they say is clamped to the rows that there are, and to the tiles that have counters."""
    experts = fused(device)
    rows = Rows(counts, FP8, device)
    wild = [-5, 2**30, 3, -(2**31), 40, 2**31 - 1, 0, 7, 9]
    wild_counts = [2**31 - 1, -1, 2**30, 5, -(2**31), 2**31 - 1, 2, 3]
    rows.offsets.copy_(torch.tensor(wild, dtype=torch.int32))
    rows.tokens.copy_(torch.tensor(wild_counts, dtype=torch.int32))
    rows.outputs(experts, None)
    torch.cuda.synchronize()
    assert torch.ones(8, device=device).sum() == 8


@ON_GPUS
def test_no_rows_at_all(device):
    experts = fused(device)
    offsets = torch.zeros(len(COUNTS) + 1, dtype=torch.int32, device=device)
    none = torch.empty(0, WIDTH, dtype=FP8, device=device)
    scales = torch.empty(0, WIDTH // 128, device=device)
    assert experts(none, offsets, scales).shape == (0, WIDTH)


KERNELS = pytest.mark.parametrize(
    "kernel", ["fp8, tiles of 144", "fp8, tiles of 80", "bf16", "MXFP4, few", "MXFP4, many"]
)


def call_of(kernel: str, device: torch.device) -> Callable[[], Tensor]:
    """A call that the kernel takes. It returns the outputs of real rows."""
    if kernel.startswith("MXFP4"):
        said = 200.0 if kernel.endswith("many") else 1.0
        return Case(FULL, (WIDTH, MIDDLE), True, device, rows_per_expert=said).outputs
    dtype = BF16 if kernel == "bf16" else FP8
    experts = only(FUSED, built(dtype, device, gpt_oss=True))
    rows = Rows(SMALL if kernel.endswith("80") else FULL, dtype, device)
    return partial(rows.outputs, experts, 32.0)


@ON_GPUS
@KERNELS
def test_calls_on_two_streams_at_once(device, kernel):
    call = call_of(kernel, device)
    wanted = call()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outputs)


@ON_GPUS
@KERNELS
@pytest.mark.parametrize("free", [1, 12])
def test_a_kernel_that_holds_most_multiprocessors(device, kernel, free):
    """No block waits for one that cannot start."""
    call = call_of(kernel, device)
    wanted = call()
    hold = Holder()
    hold(torch.cuda.get_device_properties(device).multi_processor_count - free, 0.3)
    assert torch.equal(call(), wanted)


@ON_GPUS
@KERNELS
def test_a_call_in_a_forked_child_is_refused(device, kernel):
    """CUDA works in no such child. The parent goes on."""
    call = call_of(kernel, device)
    wanted = call()

    def refused() -> None:
        with pytest.raises(RuntimeError):
            call()

    assert is_right_in_a_fork(refused)
    assert torch.equal(call(), wanted)


def test_it_takes_calls_of_any_rows():
    for rows in (None, 0.0, 1e6):
        assert GEMMS[FUSED].takes(Segments(torch.zeros(3), None, 1, rows))
    assert FUSED not in CHOICES


# Experts of one of two ranks, and of one of eight, D, F.
SHAPES = {
    "DeepSeek-V3": (128, 7168, 2048),
    "DeepSeek-V3, 32 experts": (32, 7168, 2048),
    "Qwen3-235B": (64, 4096, 1536),
    "Qwen3-30B-A3B": (64, 2048, 768),
    "Qwen3-30B-A3B, 16 experts": (16, 2048, 768),
}
# Head of the page's tables, and the GEMMs of a cell.
HEAD = "| one kernel / by TMA / few rows"
CELL = FUSED, "few_rows_by_tma", "few_rows"
# The order in which a call asks them.
ORDER = "few_rows", "few_rows_by_tma", FUSED


def measured() -> list[tuple[str, float, dict[str, float]]]:
    """Model, rows of an expert, and µs by each GEMM on one H200: the page's tables, and their
    routing by zipf.
    """
    page = (ROOT / "docs/experiments.md").read_text()
    tables = re.findall(rf"^{re.escape(HEAD)}.*?\n\n", page, re.DOTALL | re.MULTILINE)
    assert tables
    found = []
    for table in tables:
        lines = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in table.strip().split("\n")
        ]
        _, *counts = lines[0]
        for who, *cells in lines[2:]:
            for count, cell in zip(counts, cells, strict=True):
                if cell == "–":
                    continue
                times = dict(zip(CELL, map(float, cell.split(" / ")), strict=True))
                found.append((who.removesuffix(", zipf"), float(Fraction(count)), times))
    return found


def test_the_choice_is_within_3_percent_of_the_fastest(monkeypatch):
    """On H200, by the number of first tiles and by rows."""
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr("epmoe.local.gemm.few_rows.problem_of_build", lambda device: None)
    checked = 0
    for model, rows, times in measured():
        e, _, F = SHAPES[model]
        # Weights that take no memory.
        weights = [torch.zeros(1, dtype=FP8).expand(e, n, k) for n, k in ((2 * F, 128), (128, F))]
        borders = {name: GEMMS[name].most_rows(*weights) for name in CELL}
        chosen = next(name for name in ORDER if rows <= borders[name])
        assert times[chosen] <= 1.03 * min(times.values()), (model, rows, chosen)
        checked += 1
    assert checked > 30
