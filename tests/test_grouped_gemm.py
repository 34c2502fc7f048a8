"""Which library computes the grouped GEMM, and what DeepGEMM gets. A stand-in replaces it where
there is no GPU.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import re
import sys
import types
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from expert_inputs import (
    BF16,
    BLOCK,
    FP8,
    MXFP4,
    OFFSETS,
    TOKENS,
    D,
    E,
    assert_right,
    inputs,
    real_rows,
    want,
    weights,
)
from helpers import NO_CUDA, ON_GPUS, alone, assert_close, captured, poison_, randn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import epmoe
from epmoe.local.adapters import ExpertAdapters
from epmoe.local.gemm import deep_gemm as module
from epmoe.local.gemm import torch_grouped
from epmoe.local.gemm.gemm import Segments, Weights
from epmoe.local.gemm.hopper import problem_of_build
from epmoe.local.gemm.table import GEMMS
from epmoe.local.gemm.torch_grouped import TorchGrouped
from epmoe.local.weight_formats import dequantize_weights

pytestmark = pytest.mark.usefixtures("serving")


class StandIn(types.ModuleType):
    """DeepGEMM by its contract: a segment starts at the next multiple of the block behind the end
    of the last one.

    Attributes:
        block: rows, as set.
        calls: the block and the ends of each call.
    """

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
        self.block = 128
        self.calls = []
        self.utils = types.SimpleNamespace(layout=self)

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.block

    def set_mk_alignment_for_contiguous_layout(self, rows: int) -> None:
        self.block = rows

    def m_grouped_bf16_gemm_nt_contiguous(
        self, rows: Tensor, weights: Tensor, out: Tensor, ends: Tensor, **options: bool
    ) -> None:
        assert options == {"use_psum_layout": True, "ensure_zero_padding": False}
        assert rows.is_contiguous() and weights.is_contiguous() and out.dtype == BF16
        assert ends.dtype == torch.int32 and ends.shape == weights.shape[:1]
        self.calls.append((self.block, ends))
        poison_(out)
        start = 0
        for end, expert in zip(ends.tolist(), weights, strict=True):
            start = -(-start // self.block) * self.block
            out[start:end] = (rows[start:end].float() @ expert.float().T).to(BF16)
            start = end

    def m_grouped_fp8_gemm_nt_contiguous(
        self,
        rows: tuple[Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        out: Tensor,
        ends: Tensor,
        **options: bool,
    ) -> None:
        n, k = rows[0].shape
        assert (
            rows[0].dtype == weights[0].dtype == FP8
            and rows[1].dtype == weights[1].dtype == torch.float32
        )
        assert (
            rows[1].shape == (n, k // BLOCK)
            and rows[1].stride(0) == 1
            and rows[1].stride(1) % 4 == 0
        )
        plain = rows[0].float() * rows[1].repeat_interleave(BLOCK, 1)
        dequantized = dequantize_weights(*weights, torch.float32)
        self.m_grouped_bf16_gemm_nt_contiguous(plain, dequantized, out, ends, **options)


@pytest.fixture
def deep_gemm(monkeypatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in)
    chosen = {"auto": ("deep_gemm", "torch"), "deep_gemm": ("deep_gemm",), "torch": ("torch",)}
    monkeypatch.setattr(epmoe.local.stage, "choose", lambda wanted, *_, **__: chosen[wanted])
    return stand_in


@pytest.mark.parametrize("alignment", [None, 64, 128, 192])
@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_deep_gemm_gets_its_layout(deep_gemm, dtype, alignment):
    """Later users of the library find the block that they have set."""
    experts = epmoe.GroupedExperts(**weights(dtype, torch.device("cpu")), gemm="deep_gemm")
    assert experts.alignment == 64
    # fp8 rounds what travels between the two GEMMs to three bits of mantissa.
    assert_right(
        experts,
        slack=12 if dtype == FP8 else 4,
        alignment=alignment,
        tokens_per_expert=torch.tensor(TOKENS).int(),
    )
    assert [block for block, _ in deep_gemm.calls] == [
        128 if alignment == 128 else 64
    ] * 2 and deep_gemm.block == 128
    assert all(ends.tolist() == OFFSETS[1:] for _, ends in deep_gemm.calls)
    with pytest.raises(ValueError, match="`alignment` must be a multiple of 64, got 96"):
        assert_right(experts, alignment=96)


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_deep_gemm_takes_fp8_rows(deep_gemm, dtype):
    """fp8 rows go to fp8 experts as they are; other experts get them dequantized."""
    experts = epmoe.GroupedExperts(**weights(dtype, torch.device("cpu")))
    rows, offsets = inputs(BF16, torch.device("cpu"))
    q, scales = epmoe.quantize_fp8(rows)
    got = experts(q, offsets, scales, alignment=BLOCK)
    plain = (q.float() * scales.repeat_interleave(BLOCK, 1)).double()
    assert_close(got[real_rows()], want(experts, plain), slack=12 if dtype == FP8 else 4)
    if dtype == FP8:
        assert torch.equal(experts(rows, offsets, alignment=BLOCK)[real_rows()], got[real_rows()])


@pytest.mark.parametrize("alignment", [None, 1, 32])
@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_deep_gemm_gets_no_segments_that_it_would_misread(deep_gemm, dtype, alignment):
    """A call may say nothing of its segments, or that they start anywhere: torch's GEMM then takes
    bf16 and fp8.
    """
    experts = epmoe.GroupedExperts(**weights(dtype, torch.device("cpu")))
    with pytest.warns(UserWarning, match="aligned=True") if dtype == FP8 else nullcontext():
        assert_right(experts, slack=4, alignment=alignment)
    assert not deep_gemm.calls


def test_a_gemm_may_fuse_the_stage_for_some_calls(monkeypatch):
    """The other calls go to the next one in the table."""

    class Fused(TorchGrouped):
        name = "fused"
        block = 128

        def experts(
            self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
        ) -> Tensor:
            return rows.new_full(rows.shape, segments.alignment)

    monkeypatch.setitem(GEMMS, "fused", Fused())
    experts = epmoe.GroupedExperts(**weights(BF16, torch.device("cpu")))
    experts.gemms = ("fused", "torch")
    rows, offsets = inputs(BF16, torch.device("cpu"))
    assert (experts(rows, offsets, alignment=256)[: OFFSETS[-1]] == 256).all()
    assert_right(experts, alignment=64)


def strided(*weights: Tensor) -> list[Tensor]:
    return [each[:, :, ::2] for each in weights]


def transposed(*weights: Tensor) -> list[Tensor]:
    return [each.transpose(1, 2).contiguous().transpose(1, 2) for each in weights]


def one_element_later(*weights: Tensor) -> list[Tensor]:
    """Contiguous weights of one expert, which begin at no multiple of 16 bytes."""
    return [each.view(-1)[1:].narrow(0, 0, each[0].numel()).view_as(each[:1]) for each in weights]


@pytest.mark.parametrize(
    ("gemm", "dtype", "sizes", "problem", "other"),
    [
        ("deep_gemm", FP8, (2, 256, 128), None, {}),
        ("deep_gemm", BF16, (2, 256, 64), None, {}),
        ("deep_gemm", BF16, (2, 256, 100), "multiples of 64", {}),
        ("deep_gemm", FP8, (2, 256, 192), "multiples of 128", {}),
        ("deep_gemm", torch.float16, (2, 256, 128), "in bfloat16 or float8_e4m3fn, got", {}),
        (
            "deep_gemm",
            BF16,
            (2, 256, 128),
            "GPUs of compute capability 9, got 8",
            {"capability": 8},
        ),
        (
            "deep_gemm",
            BF16,
            (2, 256, 128),
            "GPUs of compute capability 9, got 10",
            {"capability": 10},
        ),
        (
            "deep_gemm",
            FP8,
            (2, 256, 128),
            "GPUs of compute capability 9, got 10",
            {"capability": 10},
        ),
        (
            "deep_gemm",
            FP8,
            (2, 256, 128),
            r"not installed: `pip install epmoe\[deep_gemm\]`",
            {"installed": False},
        ),
        ("few_rows", FP8, (2, 256, 256), None, {}),
        ("few_rows", BF16, (2, 256, 256), None, {}),
        ("few_rows", BF16, (2, 256, 256), "contiguous", {"laid": transposed}),
        (
            "few_rows",
            FP8,
            (2, 256, 256),
            "contiguous weights that start",
            {"laid": one_element_later},
        ),
        ("few_rows", FP8, (2, 256, 192), "multiples of 128", {}),
        (
            "few_rows",
            torch.float32,
            (2, 256, 256),
            "in bfloat16 or float8_e4m3fn, got torch.float32",
            {},
        ),
        ("few_rows", MXFP4, (2, 160, 96), "float8_e4m3fn, got torch.float4", {}),
        ("few_rows", FP8, (2, 256, 256), "compute capability 9, got 10", {"capability": 10}),
        ("few_rows_mxfp4", MXFP4, (2, 160, 96), None, {}),
        ("few_rows_mxfp4", FP8, (2, 256, 256), "float4_e2m1fn_x2, got torch.float8", {}),
        ("few_rows_mxfp4", MXFP4, (2, 160, 96), "compute capability 9, got 10", {"capability": 10}),
        ("few_rows", BF16, (8193, 64, 64), "at most 8192 experts, got 8193", {}),
        ("few_rows_mxfp4", MXFP4, (8193, 32, 32), "at most 8192 experts, got 8193", {}),
        ("few_rows_by_tma", BF16, (513, 64, 64), None, {}),
        ("few_rows_by_tma", FP8, (2, 256, 256), None, {"installed": False}),
        ("invariant_few_rows", FP8, (2, 256, 256), "in bfloat16, got torch.float8_e4m3fn", {}),
        ("invariant_few_rows", BF16, (2, 256, 192), None, {}),
        ("invariant_few_rows", BF16, (513, 64, 64), "at most 512 experts, got 513", {}),
        ("invariant_few_rows", BF16, (2, 256, 256), None, {"installed": False}),
        ("invariant_few_rows", BF16, (2, 256, 256), "contiguous", {"laid": transposed}),
        ("invariant_few_rows", BF16, (2, 256, 256), "no kernel image", {"built": False}),
        ("few_rows_by_tma", FP8, (1, 27264, 128), None, {}),
        (
            "few_rows_by_tma",
            FP8,
            (1, 27392, 128),
            r"\(1024, 27264, 128768\) experts, D and F, got \(1, 27392",
            {},
        ),
        ("few_rows_by_tma", FP8, (1, 128, 128896), r"got \(1, 128, 128896\)", {}),
        ("few_rows_by_tma", FP8, (1025, 128, 128), r"got \(1025, 128, 128\)", {}),
        ("invariant_few_rows", BF16, (1, 27392, 64), None, {}),
        ("fused_experts", FP8, (1, 128, 128896), None, {}),
        ("fused_experts", FP8, (2, 256, 256), "contiguous", {"laid": transposed}),
        ("fused_experts", FP8, (2, 256, 256), None, {"installed": False}),
        ("fused_experts", FP8, (512, 128, 128), None, {}),
        ("fused_experts", FP8, (513, 128, 128), "at most 512 experts, got 513", {}),
        ("fused_experts", FP8, (2, 256, 256), "no kernel image", {"built": False}),
        ("fused_experts", FP8, (2, 256, 192), "multiples of 128", {}),
        ("fused_experts", BF16, (224, 64, 64), None, {}),
        ("fused_experts", BF16, (225, 64, 64), "at most 224 experts, got 225", {}),
        ("fused_experts", BF16, (2, 256, 96), "multiples of 64", {}),
        ("fused_experts", BF16, (2, 256, 256), "contiguous", {"laid": transposed}),
        (
            "fused_experts",
            MXFP4,
            (2, 256, 256),
            "in bfloat16 or float8_e4m3fn, got torch.float4_e2m1fn_x2",
            {},
        ),
        ("fused_experts_mxfp4", MXFP4, (1024, 192, 64), None, {}),
        ("fused_experts_mxfp4", MXFP4, (1025, 64, 64), "at most 1024 experts, got 1025", {}),
        ("fused_experts_mxfp4", MXFP4, (2, 192, 96), "multiples of 64", {}),
        ("fused_experts_mxfp4", FP8, (2, 256, 256), "float4_e2m1fn_x2, got torch.float8", {}),
        ("fused_experts_mxfp4", MXFP4, (2, 64, 64), "no kernel image", {"built": False}),
        ("hopper", BF16, (4, 24, 8), None, {}),
        ("hopper", BF16, (4, 24, 8), None, {"laid": transposed}),
        (
            "hopper",
            torch.float32,
            (4, 24, 8),
            "in bfloat16 or float4_e2m1fn_x2, got torch.float32",
            {},
        ),
        ("hopper", BF16, (4, 24, 12), "multiples of 8", {}),
        ("hopper", BF16, (513, 8, 8), "at most 512 experts, got 513", {}),
        ("hopper", BF16, (4, 48, 16), "contiguous weights", {"laid": strided}),
        ("hopper", BF16, (4, 24, 8), "compute capability 9, got 10", {"capability": 10}),
        ("hopper", MXFP4, (4, 192, 64), None, {}),
        ("hopper", MXFP4, (4, 192, 96), "4-bit weights of multiples of 64", {}),
        ("hopper", MXFP4, (4, 384, 128), "contiguous weights", {"laid": strided}),
    ],
)
def test_what_a_gemm_takes(monkeypatch, gemm, dtype, sizes, problem, other):
    e, D, F = sizes
    packed = 2 if dtype == MXFP4 else 1
    weights = [torch.empty(e, n, k // packed, dtype=dtype) for n, k in ((2 * F, D), (D, F))]
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if other.get("installed", True) else None
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (other.get("capability", 9), 0)
    )
    monkeypatch.setattr(module, "_problem_with_version", lambda fp8, device: None)
    # What is installed, which GPU it is, and whether kernels were built.
    built = None if other.get("built", True) else RuntimeError("CUDA: no kernel image")
    for place in ("hopper", "few_rows_by_tma", "fused_experts", "fused_experts_mxfp4"):
        monkeypatch.setattr(f"epmoe.local.gemm.{place}.problem_of_build", lambda device: built)
    # Whether it takes the weights, and why not.
    found = GEMMS[gemm].problem_with(*other.get("laid", lambda *weights: weights)(*weights))
    assert (found is None) == (problem is None) and re.search(problem or "", str(found))


# torch's kernel for bf16 is there on compute capability 9 and 10 alone.
@pytest.mark.parametrize("major", [8, 9, 10, 11, 12])
@pytest.mark.parametrize(
    ("gemm", "dtype", "majors"),
    [
        ("torch", BF16, {9, 10}),
        ("torch", FP8, {9, 10}),
        ("torch", torch.float16, set()),
        ("torch", torch.float32, set()),
        ("loop", BF16, set()),
        ("deep_gemm", FP8, {8, 9, 10, 11, 12}),
    ],
)
def test_what_reads_on_the_host_refuses_a_capture(monkeypatch, gemm, dtype, majors, major):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    with FakeTensorMode():
        weights = torch.empty(4, 32, 16, dtype=dtype, device="cuda")
    assert GEMMS[gemm].is_capturable(weights) == (major in majors)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # Outside of a capture nothing is refused.
    GEMMS[gemm].refuse_capture(weights)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    # Within one it is, on other GPUs.
    if major in majors:
        GEMMS[gemm].refuse_capture(weights)
    else:
        said = rf"cannot capture these experts: {gemm}, .* on compute capability {major}\.0, reads"
        with pytest.raises(RuntimeError, match=said):
            GEMMS[gemm].refuse_capture(weights)


class DenseExperts(epmoe.GroupedExperts):
    """Experts of a user, with a product of their own."""

    def forward(self, rows_ND: Tensor, *_: object, **__: object) -> Tensor:
        return rows_ND


@pytest.mark.parametrize("kind", [epmoe.GroupedExperts, DenseExperts])
def test_a_forward_of_its_own_is_captured(monkeypatch, kind):
    """The GEMM that it would have had reads on the host, and does not run."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with FakeTensorMode():
        gate_up = torch.empty(4, 64, 16, dtype=BF16, device="cuda")
        down = torch.empty(4, 16, 32, dtype=BF16, device="cuda")
        experts = kind(gate_up, down)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if kind is DenseExperts:
        experts.refuse_capture()
    else:
        with pytest.raises(RuntimeError, match="cannot capture these experts: torch"):
            experts.refuse_capture()


@pytest.mark.parametrize("gemm", ["torch", "loop"])
def test_compilers_trace_no_look_at_a_capture(monkeypatch, gemm):
    """It would be a break of the graph, and say nothing of a capture to come."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", Mock(side_effect=AssertionError))
    with FakeTensorMode():
        weights = torch.empty(4, 32, 16, dtype=torch.float32, device="cuda")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    GEMMS[gemm].refuse_capture(weights)


@torch.no_grad()
def grouped_mm_of_sm_80(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    """What torch does there. The rows past the last segment have no product."""
    ends = offs.cpu().tolist()
    if weights.dim() == 2:
        pairs = itertools.pairwise([0, *ends])
        return torch.stack([rows[:, begin:end] @ weights[begin:end] for begin, end in pairs])
    out = poison_(rows.new_empty(len(rows), weights.shape[2]))
    for i, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        torch.mm(rows[begin:end], weights[i], out=out[begin:end])
    return out


@ON_GPUS
@pytest.mark.parametrize("major", [8, 12])
@pytest.mark.parametrize("trains", [False, True])
def test_on_other_gpus_calls_are_right_and_captures_are_refused(
    device, serving, monkeypatch, major, trains
):
    """By the path of sm_80 and sm_120, forced here. The group goes on after the refusal."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    monkeypatch.setattr(torch_grouped.F, "grouped_mm", grouped_mm_of_sm_80)
    with epmoe.ExpertParallel(one_rank(None, "auto"), device=device) as ep:
        with torch.set_grad_enabled(trains):
            experts = epmoe.GroupedExperts(**weights(BF16, device))
            assert (experts.gemm, experts.is_capturable) == ("torch", False)
            router = randn(E, D).to(device)
            layer = epmoe.MoELayer(ep, router, experts).requires_grad_(trains)
            x = randn(8, D, dtype=BF16).to(device)
            # A call, a capture that is refused, and a call again.
            want = layer(x).detach()
            torch.cuda.synchronize()
            refused = pytest.raises(RuntimeError, match="a CUDA graph cannot capture these experts")
            with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
                layer(x)
            assert torch.equal(layer(x), want)
            ep.check()
            # The CPU agrees.
            on_cpu = epmoe.GroupedExperts(**weights(BF16, torch.device("cpu")))
        with epmoe.ExpertParallel(one_rank(None, "auto"), device=torch.device("cpu")) as there:
            assert_close(want, epmoe.MoELayer(there, router.cpu(), on_cpu)(x.cpu()), slack=4)


def test_memory_that_lacks_says_nothing_of_kernels(monkeypatch):
    """It would count as their problem until the process ends, on this rank alone."""
    errors = iter([torch.OutOfMemoryError("no memory"), RuntimeError("no kernel image")])
    monkeypatch.setattr("epmoe.local.gemm.hopper.ops.hopper_gemm", Mock(side_effect=errors))
    with pytest.raises(torch.OutOfMemoryError):
        problem_of_build(torch.device("cpu"))
    assert str(problem_of_build(torch.device("cpu"))) == "no kernel image"
    problem_of_build.cache_clear()


def one_rank(alignment: int | None, payload: str = "fp8") -> epmoe.EPConfig:
    return alone(
        E, 2, D, "bfloat16", 8, capacity={"alignment": alignment}, exchange={"payload": payload}
    )


@pytest.mark.parametrize("alignment", [32, 128, None])
def test_a_layer_sees_to_the_alignment_of_deep_gemm(deep_gemm, alignment):
    with epmoe.ExpertParallel(one_rank(alignment)) as ep:
        given = weights(FP8, ep.device)
        router = randn(E, D)
        x = randn(8, D, dtype=BF16)
        dequantized = epmoe.MoELayer(ep, router, epmoe.GroupedExperts(**given, gemm="torch"))(x)
        layer = epmoe.MoELayer(ep, router, epmoe.GroupedExperts(**given))
        if alignment == 32:
            with pytest.raises(
                ValueError, match="`capacity.alignment` must be a multiple of 64, or unset, got 32"
            ):
                layer(x)
        else:
            assert_close(layer(x), dequantized.double(), slack=4)
            assert deep_gemm.calls[0][0] == (alignment or 64)


def test_rounds_are_aligned_where_they_ask_for_it():
    ids = torch.tensor([[0, 1], [1, 3]])
    weights = torch.ones(2, 2)
    for alignment, aligned, starts in (
        (None, False, 1),
        (None, True, 64),
        (5, False, 5),
        (5, True, 5),
    ):
        with epmoe.ExpertParallel(one_rank(alignment, "auto")) as ep:
            # Segments begin at multiples.
            d = ep.dispatch(randn(2, D, dtype=BF16), ids, weights, aligned=aligned)
            assert d.alignment == starts
            tokens = torch.tensor([1, 2, 0, 1])
            assert d.tokens_per_expert.tolist() == tokens.tolist()
            assert (
                d.expert_offsets.diff().tolist()
                == ((tokens + starts - 1) // starts * starts).tolist()
            )
            ep.combine(d.rows, d)
            with pytest.raises(TypeError, match="`aligned` must be a bool, got int"):
                ep.dispatch(randn(2, D, dtype=BF16), ids, weights, aligned=64)


HAS_DEEP_GEMM = pytest.mark.skipif(
    importlib.util.find_spec("deep_gemm") is None, reason="DeepGEMM is not installed"
)


@HAS_DEEP_GEMM
@ON_GPUS
@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_deep_gemm_itself(device, dtype):
    experts = epmoe.GroupedExperts(**weights(dtype, device), gemm="deep_gemm")
    auto = epmoe.GroupedExperts(**weights(dtype, device))
    assert experts.gemm == "deep_gemm" and "deep_gemm" in auto.gemms
    tokens = torch.tensor(TOKENS, dtype=torch.int32, device=device)
    for call in ({}, {"alignment": 128}, {"alignment": 128, "tokens_per_expert": tokens}):
        assert_right(experts, slack=12 if dtype == FP8 else 4, **call)
    rows, offsets = inputs(BF16, device)
    eager = experts(rows, offsets)
    replay, out = captured(lambda: experts(rows, offsets))
    replay()
    real = real_rows().to(device)
    assert torch.equal(out[real], eager[real])


@NO_CUDA
@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("deep_gemm") is not None, reason="DeepGEMM is installed"
)
def test_without_deep_gemm():
    """On compute capability 9.0 fp8 needs none, except for adapters."""
    given = weights(FP8, torch.device("cuda"))
    with pytest.raises(ImportError, match="pip install epmoe"):
        epmoe.GroupedExperts(**given, gemm="deep_gemm")
    experts = epmoe.GroupedExperts(**given)
    assert experts.gemms[-2:] == ("fused_experts", "torch")
    assert_right(experts, slack=12)
    with pytest.warns(UserWarning, match="adapters.*dequantized.*pip install epmoe"):
        ExpertAdapters(experts, 1, 4)
