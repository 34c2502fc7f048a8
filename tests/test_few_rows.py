"""Our kernels for experts with few rows: which calls take them, and on GPUs what they compute, with
NaN all around.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from expert_inputs import BF16, FP8, GPT_OSS, MXFP4, random_mxfp4, real_outputs, weights
from helpers import ON_GPUS, ROOT, alone, captured, poison_, randn
from torch import Tensor

import epmoe
from epmoe.local.gemm.few_rows import (
    MOST_ROWS_OF_MXFP4,
    FewRows,
    Reading,
    most_rows,
    most_rows_of_fp8,
)
from epmoe.local.gemm.few_rows_by_tma import most_rows_by_tma
from epmoe.local.gemm.gemm import SWIGLU, Segments, Weights
from epmoe.local.gemm.table import CHOICES, GEMMS, choose
from epmoe.local.quantize import dequantize_rows
from epmoe.local.weight_formats import dequantize_weights
from epmoe.native import ops

pytestmark = pytest.mark.usefixtures("serving")

WIDTH, MIDDLE = 512, 256  # D and F
COUNTS = [1, 0, 8, 9, 3, 0, 17, 100]  # rows of each expert
# GB/s of the memory of each card, bytes read plus bytes written, of a plain copy.
COPIED_GB_PER_S = {"H100": 2980, "H200": 4262}
# Error of a row, over its norm: fp8 has three bits of mantissa between the products.
LIMITS = {BF16: 0.02, FP8: 0.06, MXFP4: 0.02}


def built(
    dtype: torch.dtype,
    device: torch.device,
    gpt_oss: bool = False,
    sizes: tuple[int, int] = (WIDTH, MIDDLE),
    **options: object,
) -> epmoe.GroupedExperts:
    e = len(COUNTS)
    width, middle = sizes
    given: dict[str, object] = {**weights(dtype, torch.device("cpu"), e, *sizes)}
    if dtype == MXFP4:
        # Scales also lie above 2.
        given["w_down"], given["down_scales"] = random_mxfp4(
            e, width, middle, seed=2, scales=(-3, 8)
        )
    if gpt_oss:
        biases = randn(e, 2 * middle, seed=3, dtype=BF16), randn(e, width, seed=4, dtype=BF16)
        given |= {"gate_up_bias": biases[0], "down_bias": biases[1], **GPT_OSS}
    return epmoe.GroupedExperts(**given | options).to(device)


def segments(
    counts: list[int], alignment: int = 1, gap: int = 5
) -> tuple[list[int], Tensor, Tensor]:
    """Starts, offsets and counts, with a gap behind each segment."""
    starts = [0]
    for count in counts:
        starts.append(-(-(starts[-1] + count + gap) // alignment) * alignment)
    return (
        starts[:-1],
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
    )


class Rows:
    """Rows of segments, NaN in gaps and behind the last; for weights in fp8 in fp8 with scales."""

    def __init__(
        self,
        counts: list[int],
        weights: torch.dtype,
        device: torch.device,
        seed: int = 5,
        width: int = WIDTH,
        alignment: int = 1,
    ) -> None:
        dtype = FP8 if weights == FP8 else BF16
        self.alignment = alignment
        # Where segments begin, and which rows are real.
        starts, offsets, tokens = segments(counts, alignment)
        self.offsets = offsets.to(device)
        self.tokens = tokens.to(device)
        self.real = torch.cat(
            [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        ).to(device)
        self.expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        N = int(self.offsets[-1]) + 64
        # Real rows in the dtype of the weights, between rows of NaN.
        self.plain = randn(len(self.real), width, seed=seed, dtype=BF16).to(device)
        self.rows = poison_(torch.empty(N, width, dtype=dtype, device=device))
        self.scales = None
        if dtype == FP8:
            self.scales = poison_(torch.empty(N, width // 128, device=device))
            self.rows.view(torch.uint8)[self.real], self.scales[self.real] = (
                t.view(torch.uint8) if t.dtype == FP8 else t for t in epmoe.quantize_fp8(self.plain)
            )
        else:
            self.rows[self.real] = self.plain

    def outputs(self, experts: epmoe.GroupedExperts, rows_per_expert: float | None) -> Tensor:
        """Of the real rows."""
        options = {"alignment": self.alignment, "rows_per_expert": rows_per_expert}
        segments = self.offsets, self.tokens
        return real_outputs(experts, self.rows, self.scales, segments, self.real, **options)

    def errors(self, experts: epmoe.GroupedExperts, got: Tensor) -> Tensor:
        """Of each real row, over its norm in fp64."""
        want = self.wanted(experts)
        return (got.double() - want).norm(dim=1) / want.norm(dim=1)

    def wanted(self, experts: epmoe.GroupedExperts) -> Tensor:
        """What experts in fp64 compute of the real rows, on the CPU."""
        # Rows and weights as values in fp64.
        rows = self.rows[self.real]
        plain = dict(experts.named_parameters())
        if experts.is_fp8:
            rows = dequantize_rows(rows, self.scales[self.real], torch.float64)
        if experts.is_quantized:
            for name in ("gate_up", "down"):
                weights = getattr(experts, f"w_{name}").data
                scales = getattr(experts, f"{name}_scales").data
                plain.pop(f"{name}_scales")
                plain[f"w_{name}"] = dequantize_weights(weights, scales, torch.float64)
        # Experts of these.
        options = {name: getattr(experts, name) for name in GPT_OSS}
        wide = epmoe.GroupedExperts(
            **{name: tensor.double().cpu() for name, tensor in plain.items()} | options
        )
        offsets = torch.nn.functional.pad(self.tokens.cpu().cumsum(0), (1, 0)).int()
        return wide(rows.double().cpu(), offsets).to(rows.device)


INVARIANT = {"batch_invariant": True}
BY_WIDTH = 0.1, 6.0, 32.0  # rows of an expert for tiles of 8, of 32 and of 64 rows
ALL_STAGES = pytest.mark.parametrize(
    ("dtype", "options"), [(BF16, {}), (FP8, {}), (MXFP4, {}), (BF16, INVARIANT), (FP8, INVARIANT)]
)
ALL_KERNELS = pytest.mark.parametrize(
    ("dtype", "rows_per_expert", "options"),
    [
        *((BF16, n, {}) for n in BY_WIDTH),
        *((FP8, n, {}) for n in (*BY_WIDTH, None)),
        *((MXFP4, n, {}) for n in (1.0, 8.0, MOST_ROWS_OF_MXFP4)),
        *((dtype, 1.0, INVARIANT) for dtype in (BF16, FP8)),
    ],
)


@ON_GPUS
@ALL_KERNELS
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_outputs_agree_with_fp64(device, dtype, rows_per_expert, options, gpt_oss):
    """Also where an expert has many more rows than were expected."""
    experts = built(dtype, device, gpt_oss, **options)
    rows = Rows(COUNTS, dtype, device)
    errors = rows.errors(experts, rows.outputs(experts, rows_per_expert))
    assert (errors <= LIMITS[dtype]).all(), errors.max()


# Rows of each expert, in tiles of 16, 32, 48 and 64, in several, and in parts of an expert; D and
# F.
FEW_AND_MANY = [
    (COUNTS, (WIDTH, MIDDLE)),
    ([0] * 8, (WIDTH, MIDDLE)),
    ([15, 16, 17, 31, 32, 33, 64, 65], (WIDTH, MIDDLE)),
    ([47, 48, 49, 63, 0, 128, 129, 96], (WIDTH, MIDDLE)),
    ([0, 0, 0, 2000, 0, 2, 0, 1], (WIDTH, MIDDLE)),
    ([0, 0, 0, 0, 0, 1, 0, 0], (2048, 768)),
    ([3, 1, 0, 12, 7, 20, 2, 5], (2048, 768)),
]


@ON_GPUS
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize(("counts", "sizes"), FEW_AND_MANY)
def test_few_rows_have_the_bits_of_many(device, counts, sizes, gpt_oss):
    """Of those that train, in bf16; on each of three runs with tiles of 32 and of 64 rows."""
    experts = built(BF16, device, gpt_oss, sizes, **INVARIANT)
    assert experts.gemms == ("invariant_few_rows", "hopper")
    rows = Rows(counts, BF16, device, width=sizes[0], alignment=64)
    many = rows.outputs(experts, None)
    assert not many.isnan().any()
    for few in (rows.outputs(experts, n) for n in BY_WIDTH[1:] for _ in range(3)):
        differing = (few.view(torch.int16) != many.view(torch.int16)).sum(1)
        assert not differing.any(), (
            f"{int(differing.sum())} elements of {int(differing.count_nonzero())} rows"
        )


@ON_GPUS
@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("rows_per_expert", BY_WIDTH[1:])
def test_by_tma_the_bias_of_outputs_is_added_as_torch_adds_it(device, dtype, rows_per_expert):
    """To outputs in bf16, where it is NaN or Inf, too."""
    experts = built(dtype, device, gpt_oss=True)
    rows = Rows(COUNTS, dtype, device)
    bias = experts.down_bias.clone()
    bias[2, 5] = torch.nan
    bias[3, 6] = torch.inf
    # Products without the bias, and outputs with it.
    experts.down_bias.zero_()
    products = rows.outputs(experts, rows_per_expert)
    experts.down_bias.copy_(bias)
    got = rows.outputs(experts, rows_per_expert)
    torch.testing.assert_close(
        got, products + bias[rows.expert.to(device)], rtol=0, atol=0, equal_nan=True
    )


@ON_GPUS
@pytest.mark.parametrize("rows_per_expert", [1.0, 8.0, MOST_ROWS_OF_MXFP4])
@pytest.mark.parametrize("sizes", [(32, 32), (160, 96), (1440, 288)])
def test_mxfp4_of_any_multiples_of_32(device, rows_per_expert, sizes):
    experts = built(MXFP4, device, gpt_oss=True, sizes=sizes)
    rows = Rows(COUNTS, MXFP4, device, width=sizes[0])
    got = rows.outputs(experts, rows_per_expert)
    assert (rows.errors(experts, got) <= LIMITS[MXFP4]).all()
    # NaN, and what lanes without a group would read.
    experts.gate_up_scales.view(torch.uint8)[0, 0, 0] = 255
    again = rows.outputs(experts, rows_per_expert)
    assert again[rows.expert == 0].isnan().all()
    assert torch.equal(again[rows.expert != 0], got[rows.expert != 0])


@ON_GPUS
def test_every_code_and_every_scale_of_mxfp4_on_gpus(device):
    """Bitwise those of the CPU."""
    codes = torch.arange(16, dtype=torch.uint8)
    weights = (codes | codes.flip(0) << 4).repeat(1, 256, 1).view(MXFP4)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).view(torch.float8_e8m0fnu)
    want = dequantize_weights(weights, scales, BF16)
    got = ops.dequantize_mxfp4(weights.to(device), scales.to(device)).cpu()
    assert torch.equal(got.isnan(), want.isnan()) and want.isnan().sum() == 32
    assert torch.equal(got.view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


@ON_GPUS
@ALL_KERNELS
def test_a_row_depends_on_no_other_row(device, dtype, rows_per_expert, options):
    """Bitwise, whatever its place is; NaN and Inf stay in their rows."""
    experts = built(dtype, device, **options)
    rows = Rows(COUNTS, dtype, device)
    whole = rows.outputs(experts, rows_per_expert)
    # The first two rows of each expert alone have the same bits.
    few = Rows([min(n, 2) for n in COUNTS], dtype, device)
    keep = torch.cat(
        [torch.arange(len(rows.expert))[rows.expert == i][:2] for i in range(len(COUNTS))]
    )
    few.rows.view(torch.uint8)[few.real] = rows.rows.view(torch.uint8)[rows.real[keep]]
    if dtype == FP8:
        few.scales[few.real] = rows.scales[rows.real[keep]]
    assert torch.equal(few.outputs(experts, rows_per_expert), whole[keep])
    # Rows of NaN and Inf change no other.
    bad = torch.tensor([0, 3, 20, 60])
    rows.rows[rows.real[bad], 7] = torch.tensor(float("nan"), device=device).to(rows.rows.dtype)
    if dtype != FP8:
        rows.rows[rows.real[3], 7] = torch.inf
    got = rows.outputs(experts, rows_per_expert)
    assert got[bad].isnan().all()
    others = torch.ones(len(got), dtype=torch.bool)
    others[bad] = False
    assert torch.equal(got[others], whole[others])


@ON_GPUS
@ALL_STAGES
def test_a_graph_takes_other_segments(device, dtype, options):
    experts = built(dtype, device, **options)
    rows = Rows(COUNTS, dtype, device)
    given = {"tokens_per_expert": rows.tokens, "alignment": 1, "rows_per_expert": 1.0}
    replay, out = captured(lambda: experts(rows.rows, rows.offsets, rows.scales, **given))
    # Rows of other segments come into the buffers of the capture.
    other = Rows(COUNTS[::-1], dtype, device, seed=9)
    wanted = other.outputs(experts, 1.0)
    for mine, its in (
        (rows.offsets, other.offsets),
        (rows.tokens, other.tokens),
        (rows.rows, other.rows),
    ):
        mine.view(torch.uint8).copy_(its.view(torch.uint8))
    if dtype == FP8:
        rows.scales.copy_(other.scales)
    poison_(out)
    replay()
    assert torch.equal(out[other.real], wanted)


@ON_GPUS
@ALL_STAGES
def test_wild_segments_reach_no_other_memory(device, dtype, options):
    """What they say is clamped to the rows that there are, and unused rows are not written."""
    experts = built(dtype, device, **options)
    rows = Rows(COUNTS, dtype, device)
    rows.offsets.copy_(
        torch.tensor([-5, 2**30, 3, -(2**31), 40, 2**31 - 1, 0, 7, 9], dtype=torch.int32)
    )
    rows.tokens.copy_(torch.tensor([2**31 - 1, -1, 2**30, 5, -(2**31), 1, 2, 3], dtype=torch.int32))
    rows.outputs(experts, 1.0)
    torch.cuda.synchronize()
    assert torch.ones(8, device=device).sum() == 8


@ON_GPUS
def test_calls_of_few_rows_take_the_kernels(device):
    experts = built(FP8, device)
    assert experts.gemms[:3] == ("few_rows", "few_rows_by_tma", "fused_experts")
    assert not experts.batch_invariant
    assert built(FP8, device, batch_invariant=True).gemms == ("fused_experts",)
    assert built(BF16, device).gemms[:2] == ("few_rows", "few_rows_by_tma")
    assert "few_rows" not in built(BF16, device, gemm="torch").gemms
    of_mxfp4 = ("fewest_rows_mxfp4", "fused_experts_mxfp4", "few_rows_mxfp4", "hopper")
    assert built(MXFP4, device).gemms[:4] == of_mxfp4


@pytest.mark.parametrize(
    "name",
    ["few_rows", "fewest_rows_mxfp4", "few_rows_mxfp4", "few_rows_by_tma", "invariant_few_rows"],
)
def test_which_calls_take_the_kernels(name):
    for rows, takes in ((None, False), (0.0, True), (1.0, True), (4.0, True), (4.1, False)):
        assert GEMMS[name].takes(Segments(torch.zeros(3), None, 1, rows), most_rows=4.0) is takes
    assert name not in CHOICES
    on_cpus = choose("auto", torch.zeros(2, 512, 256).to(BF16), torch.zeros(2, 256, 256).to(BF16))
    assert on_cpus == ("torch",)


FIT = {
    BF16: (
        "few_rows",
        "few_rows_by_tma",
        "invariant_few_rows",
        "fused_experts",
        "deep_gemm",
        "hopper",
    ),
    FP8: ("few_rows", "few_rows_by_tma", "fused_experts", "deep_gemm"),
}


@pytest.mark.parametrize(
    ("dtype", "invariant", "others"),
    [
        (
            BF16,
            ("invariant_few_rows", "hopper"),
            ("few_rows", "few_rows_by_tma", "fused_experts", "deep_gemm"),
        ),
        (FP8, ("fused_experts",), ("few_rows", "few_rows_by_tma", "fused_experts", "deep_gemm")),
    ],
)
def test_invariant_experts_take_few_rows_and_many_by_one_order(
    monkeypatch, dtype, invariant, others
):
    """bf16 by the GEMM that trains, fp8 by one kernel; all calls by the GEMM that a user names."""
    on_gpu = SimpleNamespace(is_cuda=True, dtype=dtype, device="cuda")
    # Some of the GEMMs take the weights.
    for name, gemm in GEMMS.items():
        problem = None if name in FIT[dtype] else ValueError(name)
        monkeypatch.setattr(gemm, "problem_with", lambda *_, problem=problem: problem)
        trains = dtype == BF16 and name == "hopper"
        monkeypatch.setattr(gemm, "trains", lambda *_, trains=trains: trains)
    assert choose("auto", on_gpu, on_gpu, batch_invariant=True) == invariant
    assert choose("auto", on_gpu, on_gpu)[: len(others)] == others
    assert choose("deep_gemm", on_gpu, on_gpu, batch_invariant=True) == ("deep_gemm",)
    # Without the first one the next takes all calls.
    monkeypatch.setattr(GEMMS[invariant[0]], "problem_with", lambda *_: ValueError("too many"))
    assert choose("auto", on_gpu, on_gpu, batch_invariant=True) == (
        *invariant[1:],
        *(["deep_gemm"] if dtype == FP8 else []),
    )


PAGE = (ROOT / "docs/experiments.md").read_text()
# Experts of one of two ranks, D, F.
SHAPES = {
    "Qwen3-30B-A3B": (64, 2048, 768),
    "Qwen3-235B": (64, 4096, 1536),
    "DeepSeek-V3": (128, 7168, 2048),
    "gpt-oss-120b": (64, 2880, 2880),
}


def measured() -> list[tuple[str, str, float, list[float]]]:
    """In bf16: card, model, rows of an expert, and µs by the kernels for few rows, by those by TMA
    and by DeepGEMM. In fp8 others have come since.
    """
    found = []
    # Each table of the page has a card and counts of rows in its head.
    for table in re.findall(r"^\| (H\d00 .*?)\n\n", PAGE, re.DOTALL | re.MULTILINE):
        lines = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")
        ]
        card, *counts = lines[0]
        for who, *cells in lines[2:]:
            model, dtype = who.split(", ")
            if dtype != "bf16":
                continue
            for count, cell in zip(counts, cells, strict=True):
                times = [math.inf if us == "–" else float(us) for us in cell.split(" / ")]
                found.append((card, model, float(Fraction(count)), times))
    return found


def borders(card: str, model: str) -> tuple[float, float]:
    """Rows of an expert up to which a call takes the kernels for few rows, and those by TMA."""
    e, D, F = SHAPES[model]
    reading = Reading.of(3 * e * D * F * BF16.itemsize, COPIED_GB_PER_S[card], multiprocessors=132)
    return most_rows(reading), most_rows_by_tma(reading)


def test_the_choice_is_within_2_percent_of_the_fastest_and_more_rows_take_no_less_time():
    """With 1, 2, 4, … 1024 tokens on each of two ranks."""
    taken: dict[tuple[str, str], list[float]] = {}
    for card, model, rows, times in measured():
        chosen = times[sum(rows > border for border in borders(card, model))]
        before = taken.setdefault((card, model), [0.0])
        assert chosen <= 1.02 * min(times), (card, model, rows)
        assert chosen >= 0.98 * before[-1], (card, model, rows)
        before.append(chosen)
    assert list(map(len, taken.values())) == [12] * 8


def test_borders_by_card_and_shape():
    assert borders("H100", "DeepSeek-V3")[0] < 0.1 < 0.5 == borders("H100", "Qwen3-30B-A3B")[0]
    assert borders("H200", "DeepSeek-V3")[0] == 4
    for card in ("H100", "H200"):
        by_tma = [borders(card, model)[1] for model in ("DeepSeek-V3", "Qwen3-30B-A3B")]
        assert 28 < by_tma[0] <= by_tma[1] <= 64


def test_borders_in_fp8():
    """Where the first tiles of the kernel for all experts are as many as the multiprocessors."""
    for model, border in (("DeepSeek-V3", 0.067), ("Qwen3-235B", 0.19), ("Qwen3-30B-A3B", 0.42)):
        e, _, F = SHAPES[model]
        most = most_rows_of_fp8(e, F, multiprocessors=132)
        assert most == pytest.approx(border, rel=0.02)
        assert e * (1 - math.exp(-most)) * F / 128 == pytest.approx(132)
    # Small weights never have so many.
    assert most_rows_of_fp8(16, 768, multiprocessors=132) == 1


def test_borders_by_what_the_driver_says_of_the_memory(monkeypatch):
    """Of H200, of H100, with a driver that does not know the clock as of H100, and on H100 without
    kernels by TMA.
    """
    # Weights of a rank without experts.
    weights = (torch.zeros(0, 128, 64, dtype=BF16), torch.zeros(0, 64, 64, dtype=BF16))
    h100 = 2_619_000, 5120
    cases = (
        ((3_201_000, 6144), None, 4, 48),
        (h100, None, 0.5, 64),
        ((0, 6144), None, 0.5, 64),
        (h100, "old", 4, 64),
    )
    for (clock_khz, width), problem, *most in cases:
        gpu = SimpleNamespace(
            memory_clock_rate=clock_khz, memory_bus_width=width, multi_processor_count=132
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
        monkeypatch.setattr(
            "epmoe.local.gemm.few_rows.problem_of_build", lambda device, problem=problem: problem
        )
        assert [GEMMS[name].most_rows(*weights) for name in ("few_rows", "few_rows_by_tma")] == most
    # In fp8 the number of multiprocessors counts, where the other kernels run.
    names = "few_rows", "few_rows_by_tma"
    fp8 = [torch.zeros(64, *shape).to(FP8) for shape in ((1536, 128), (128, 768))]
    assert [GEMMS[name].most_rows(*fp8) for name in names] == [4, 0]
    monkeypatch.setattr("epmoe.local.gemm.few_rows.problem_of_build", lambda device: None)
    assert [GEMMS[name].most_rows(*fp8) for name in names] == [pytest.approx(0.42, rel=0.02), 0]
    few = [each[:16] for each in fp8]
    assert [GEMMS[name].most_rows(*few) for name in names] == [1, 32]


def test_a_round_says_how_many_rows_an_expert_gets():
    """T · R · K / P."""
    with epmoe.ExpertParallel(alone()) as ep:
        ids = torch.tensor([[0, 1], [1, 3], [5, 6]])
        weights = torch.ones(3, 2)
        d = ep.dispatch(randn(3, 64), ids, weights)
        assert d.segments["rows_per_expert"] == 3 * 2 / 8
        assert ep.combine(d.rows, d).shape == (3, 64)


def test_the_kernels_get_contiguous_scales_and_biases(monkeypatch):
    """Those of `GroupedExperts` may be views."""
    seen = []
    monkeypatch.setattr("epmoe.local.gemm.few_rows.ops.few_rows", lambda *given: seen.extend(given))
    e = 2
    width = 256
    middle = 128
    # Scales and a bias that are views.
    wide = torch.zeros(2 * middle, e, dtype=BF16).t()
    scales = torch.zeros(e, 2, 4)[..., ::2], torch.zeros(e, 2, 2)[..., :1]
    weights = (
        torch.zeros(e, 2 * middle, width).to(FP8),
        torch.zeros(e, width, middle).to(FP8),
        *scales,
        wide,
        None,
    )
    offsets = torch.zeros(e + 1, dtype=torch.int32)
    FewRows().experts(
        Weights(*weights, SWIGLU),
        torch.zeros(3, width, dtype=FP8),
        torch.zeros(3, 2),
        Segments(offsets, None, 1, 1.0),
    )
    # The kernel gets none of them.
    assert (
        all(given.is_contiguous() for given in seen if isinstance(given, Tensor))
        and len(seen) == 16
    )


def test_a_warning_names_what_calls_of_many_rows_lack(monkeypatch):
    """Not why the kernels for few rows do not take the weights."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(GEMMS["torch"], "problem_with", lambda gate_up, down: None)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=FP8, device="cuda", shape=(2, 256, 256))
    with pytest.warns(UserWarning, match="dequantized in every call, which is slow: .* 9, got 10"):
        assert choose("auto", on_gpu, on_gpu) == ("torch",)
