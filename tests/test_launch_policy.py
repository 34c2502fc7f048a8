"""The launch policy: its table, and the variants that docs/kernels.md lists."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch
from helpers import ROOT

import epmoe
from epmoe.exchange.launch_policy import launches, shared_bytes_needed
from epmoe.exchange.memory import MemoryPlan
from epmoe.native.build import CUDA_FLAGS
from epmoe.native.formats import WIRE_FORMATS

KERNELS = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
BF16 = torch.bfloat16


def plan_of(
    R: int = 8, D: int = 7168, K: int = 8, E: int = 256, M: int = 4096, **exchange: object
) -> MemoryPlan:
    config = epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "bfloat16"},
        topology={"ep_size": R},
        capacity={"max_num_tokens_per_rank": M},
        exchange={"transport": "nvlink", **exchange},
    )
    return MemoryPlan.build(config, rank=0, nvlink=True)


# R, payload, T -> dispatch: lines sent / received, exclusive, blocks, send, notify; combine: lines,
# blocks, send, team.
TABLE = [
    (8, "auto", 1, (1, 1, 1, 24, 3, 2), (1, 1, 22, 19, 4)),
    (8, "auto", 8, (1, 1, 0, 171, 19, 2), (1, 1, 151, 132, 4)),
    (8, "auto", 16, (1, 4, 1, 86, 28, 2), (1, 1, 170, 132, 4)),
    (8, "auto", 64, (1, 2, 1, 132, 39, 5), (1, 1, 255, 105, 4)),
    (8, "auto", 128, (1, 2, 1, 132, 33, 9), (2, 1, 132, 55, 4)),
    (8, "auto", 200, (1, 4, 1, 132, 33, 14), (2, 1, 132, 66, 4)),
    (8, "auto", 1024, (1, 4, 1, 132, 39, 65), (2, 1, 132, 66, 4)),
    (8, "auto", 1025, (0, 0, 0, 264, 198, 1), (0, 0, 264, 165, 4)),
    (1, "auto", 1, (1, 1, 1, 8, 3, 2), (1, 1, 6, 3, 4)),
    (1, "auto", 16, (1, 2, 1, 44, 28, 2), (1, 1, 76, 38, 4)),
    (1, "auto", 64, (2, 2, 1, 91, 30, 5), (2, 2, 57, 1, 4)),
    (1, "auto", 256, (4, 4, 1, 132, 30, 17), (2, 2, 132, 1, 4)),
    (1, "auto", 1024, (4, 4, 1, 132, 30, 65), (2, 2, 132, 1, 4)),
    (1, "auto", 4096, (0, 0, 0, 264, 262, 1), (0, 0, 264, 1, 2)),
    (1, "fp8", 1, (1, 1, 1, 6, 2, 2), (1, 1, 4, 2, 4)),
    (1, "fp8", 16, (1, 2, 1, 23, 14, 2), (1, 1, 38, 19, 4)),
    (1, "fp8", 64, (1, 2, 1, 89, 56, 5), (1, 1, 150, 75, 4)),
    (1, "fp8", 256, (2, 2, 1, 132, 58, 17), (2, 1, 132, 112, 4)),
    (1, "fp8", 1024, (2, 2, 1, 132, 58, 65), (2, 1, 132, 113, 4)),
    (1, "fp8", 4096, (0, 0, 0, 264, 262, 1), (0, 0, 264, 165, 2)),
    (2, "auto", 1, (1, 1, 1, 10, 3, 2), (1, 1, 8, 5, 4)),
    (2, "auto", 16, (1, 2, 1, 56, 26, 2), (1, 1, 113, 75, 4)),
    (2, "auto", 64, (4, 4, 1, 87, 26, 5), (2, 2, 108, 52, 4)),
    (2, "auto", 256, (4, 4, 1, 132, 26, 17), (2, 2, 132, 52, 4)),
    (2, "auto", 1024, (4, 4, 1, 132, 26, 65), (2, 2, 132, 52, 4)),
    (2, "auto", 4096, (0, 0, 0, 264, 165, 1), (0, 0, 264, 231, 4)),
    (2, "fp8", 1, (1, 1, 1, 7, 2, 2), (1, 1, 5, 3, 4)),
    (2, "fp8", 16, (1, 2, 1, 30, 14, 2), (1, 1, 57, 38, 4)),
    (2, "fp8", 64, (1, 2, 1, 113, 52, 5), (1, 1, 222, 147, 4)),
    (2, "fp8", 256, (2, 2, 1, 132, 52, 17), (2, 1, 132, 105, 4)),
    (2, "fp8", 1024, (2, 2, 1, 132, 52, 65), (2, 1, 132, 105, 4)),
    (2, "fp8", 4096, (0, 0, 0, 264, 205, 1), (0, 0, 264, 231, 2)),
    (4, "auto", 64, (1, 2, 1, 132, 39, 5), (1, 1, 255, 105, 4)),
    (4, "auto", 4096, (0, 0, 0, 264, 198, 1), (0, 0, 264, 165, 4)),
    (4, "fp8", 64, (1, 2, 1, 132, 49, 5), (1, 1, 222, 147, 4)),
    (4, "fp8", 4096, (0, 0, 0, 264, 198, 1), (0, 0, 264, 165, 1)),
    (8, "fp8", 1, (1, 1, 1, 14, 2, 2), (1, 1, 12, 10, 4)),
    (8, "fp8", 16, (1, 2, 1, 72, 14, 2), (1, 1, 166, 147, 4)),
    (8, "fp8", 64, (1, 2, 1, 132, 49, 5), (1, 1, 222, 147, 4)),
    (8, "fp8", 256, (1, 2, 1, 132, 33, 17), (2, 1, 132, 92, 4)),
    (8, "fp8", 1024, (1, 2, 1, 132, 49, 65), (2, 1, 132, 92, 4)),
    (8, "fp8", 4096, (0, 0, 0, 264, 198, 1), (0, 0, 264, 165, 1)),
]


def row(R: int, payload: str, T: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = plan_of(R, payload=payload, combine_payload=payload)
    d, c = launches(plan, T)
    out = (d.send_lines, d.recv_lines, d.exclusive, d.blocks, d.send_blocks, d.notify_blocks)
    return out, (c.send_lines, c.recv_lines, c.blocks, c.send_blocks, c.team)


@pytest.mark.parametrize(("R", "payload", "T", "dispatch", "combine"), TABLE)
def test_table_of_an_h200(R, payload, T, dispatch, combine):
    assert row(R, payload, T) == (dispatch, combine)


@pytest.mark.parametrize("K", [1, 2, 4, 8, 10])
def test_two_fifths_make_sums_of_expert_major_rows(K):
    """However many of a token's experts are on a rank: senders look at its slot all the same."""
    _, combine = launches(plan_of(2, K=K), 1024)
    assert (combine.own, combine.blocks, combine.send_blocks) == (1, 132, 52)


# D, E, T -> dispatch: send, tokens at once; combine: own, send, team, rows to a release. Of 4096
# tokens each block sends one batch of short rows, or five of long ones.
MANY_TOKENS = [
    (2048, 128, 4096, (256, 16), (0, 231, 2, 2)),
    (2048, 128, 2560, (197, 13), (0, 231, 2, 2)),
    (7168, 256, 4096, (205, 4), (0, 231, 4, 2)),
]


@pytest.mark.parametrize(("D", "E", "T", "dispatch", "combine"), MANY_TOKENS)
def test_many_tokens_of_two_h200(D, E, T, dispatch, combine):
    d, c = launches(plan_of(2, D, E=E, payload="fp8"), T)
    assert (d.send_blocks, d.batch_tokens) == dispatch
    assert (c.own, c.send_blocks, c.team, c.rows_per_release) == combine


# D, payload, T -> dispatch: lines sent / received, blocks, send, tokens at once;
# combine: lines, own, blocks, send, team.
RANK_MAJOR = [
    (7168, "auto", 1, (1, 1, 37, 3, 1), (1, 1, 0, 8, 5, 4)),
    (7168, "auto", 128, (2, 2, 132, 44, 1), (2, 2, 0, 132, 62, 4)),
    (7168, "auto", 512, (4, 4, 132, 44, 1), (2, 2, 1, 132, 40, 4)),
    (7168, "auto", 4096, (0, 0, 264, 198, 4), (0, 0, 0, 264, 198, 4)),
    (7168, "fp8", 128, (2, 2, 132, 56, 1), (2, 2, 0, 132, 62, 4)),
    (7168, "fp8", 4096, (0, 0, 264, 238, 4), (0, 0, 0, 264, 198, 4)),
    (2048, "auto", 1, (1, 1, 35, 1, 1), (1, 1, 0, 3, 2, 4)),
    (2048, "auto", 4096, (0, 0, 264, 256, 16), (0, 0, 0, 264, 198, 1)),
]


@pytest.mark.parametrize(("D", "payload", "T", "dispatch", "combine"), RANK_MAJOR)
def test_rank_major_of_two_h200(D, payload, T, dispatch, combine):
    d, c = launches(plan_of(2, D, payload=payload), T, expert_major=False)
    assert (d.send_lines, d.recv_lines, d.blocks, d.send_blocks, d.batch_tokens) == dispatch
    assert (c.send_lines, c.recv_lines, c.own, c.blocks, c.send_blocks, c.team) == combine


def test_a_launch_holds_together():
    """Every launch has blocks for each role, and fits the multiprocessors that the kernel is bound
    to.
    """
    for R in (1, 2, 3, 8, 32):
        for payload in ("auto", "fp8"):
            plan = plan_of(R, payload=payload, combine_payload=payload)
            for T in (0, 1, 7, 9, 65, 257, 1024, 1025, 2048, 2049, 4096):
                for sms in (1, 2, 24, 132):
                    for phases in ((True, True), (True, False), (False, True)):
                        send, receive = phases
                        d, c = launches(plan, T, multiprocessors=sms, send=send, receive=receive)
                        most = sms * (2 if d.recv_lines < 2 else 1)
                        assert (d.send_blocks > 0, d.notify_blocks > 0) == (send, send)
                        assert (
                            d.send_blocks + max(d.notify_blocks, 1)
                            <= d.blocks
                            <= max(most, d.send_blocks + 1)
                        )
                        assert 0 < c.blocks <= sms * (2 if c.send_lines < 2 else 1)
                        assert (c.send_blocks > 0) == send and c.send_blocks <= max(c.blocks, 1)
                        assert c.threads // 32 % c.team == 0 or c.send_lines
                        assert d.threads in (384, 512) and c.threads in (384, 512)
                        assert max(d.shared_bytes, c.shared_bytes) <= shared_bytes_needed(plan)
                        takes_ll = plan.sizes["ll_max_tokens"] >= T
                        assert (d.recv_lines > 0) == (c.send_lines > 0) == takes_ll
                        # A receiver waits: at most 3/4 of the GPU, and one line a lane.
                        if not send:
                            assert max(d.blocks, c.blocks) <= max(sms * 3 // 4, 1)
                            assert max(d.recv_lines, c.send_lines) <= 1


# KiB of shared memory of a multiprocessor -> blocks of the Simple protocol on each: sm_120, sm_89
# and sm_86 have 100, sm_80 has 164, sm_90 and sm_100 have 228.
@pytest.mark.parametrize(("kib", "resident"), [(100, 1), (164, 2), (228, 2)])
@pytest.mark.parametrize("R", [1, 2, 8])
@pytest.mark.parametrize("expert_major", [True, False])
def test_a_launch_counts_on_blocks_that_find_room(kib, resident, R, expert_major):
    for payload in ("auto", "fp8"):
        plan = plan_of(R, payload=payload, combine_payload=payload)
        d, c = launches(plan, 4096, expert_major=expert_major, shared_bytes=kib << 10)
        assert (d.protocol, c.protocol) == ("Simple", "Simple")
        assert (d.blocks, c.blocks) == (132 * resident, 132 * resident)
        # All that send are there at once, and some that receive.
        assert d.send_blocks + d.notify_blocks < d.blocks and c.send_blocks < c.blocks
        assert max(d.shared_bytes, c.shared_bytes) + (13 << 10) <= (kib << 10) // resident


def test_without_lines_every_call_takes_the_simple_protocol():
    """Those of GPUs that PCIe connects. A call without tokens sends none, whatever its name is."""
    config = epmoe.EPConfig(
        model={"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 512, "dtype": "bfloat16"},
        topology={"ep_size": 2},
        capacity={"max_num_tokens_per_rank": 512},
        exchange={"transport": "nvlink"},
    )
    plan = MemoryPlan.build(config, nvlink=True, lines=False)
    for T in (1, 8, 512):
        d, c = launches(plan, T, shared_bytes=100 << 10)
        assert (d.protocol, c.protocol) == ("Simple", "Simple")
        assert 0 < d.send_blocks < d.blocks and 0 < c.send_blocks <= c.blocks


@pytest.mark.parametrize("R", [2, 8])
@pytest.mark.parametrize("T", [16, 1024, 4096])
def test_rows_that_are_fp8_already(R, T):
    """They take the protocol and the lines of rows that become fp8. Their senders do not quantize,
    so fewer send.
    """
    plan = plan_of(R, payload="fp8")
    here, there = (launches(plan, T, dtype)[0] for dtype in (torch.float8_e4m3fn, BF16))
    assert (here.protocol, here.recv_lines) == (there.protocol, there.recv_lines)
    assert here.send_blocks <= there.send_blocks
    assert here.chunk_bytes == (3584 if T == 4096 else 0)


def test_a_forced_launch_holds():
    """As tests of the kernels force it."""
    plan = plan_of()
    plan.sizes.update(dispatch_senders=17, combine_senders=23, combine_team=8)
    d, c = launches(plan, 4096)
    assert (d.send_blocks, c.send_blocks, c.team) == (17, 23, 8)


def documented_variants() -> set[str]:
    """The variant table of docs/kernels.md, a row for each compiled kernel."""
    variants = set()
    for name, compiled in re.findall(r"^\| `(\w+<.*?>)` \|.*\| (.*?) \|$", KERNELS, re.MULTILINE):
        for group in compiled.split("; "):
            wire, types = group.split(": ")
            for dtype in types.split(", "):
                variants.add(re.sub(r"\bF\b", wire, re.sub(r"\b[ST]\b", dtype, name)))
    return variants


WIRES = [f"k{name.capitalize()}" for name in WIRE_FORMATS]
MANGLED = {"v": "void", "f": "float", "6__half": "__half", "13__nv_bfloat16": "__nv_bfloat16"}


def compiled(stage: str, *options: str) -> str:
    """What nvcc says of csrc/cuda/<stage>/<stage>.cu."""
    command = ["nvcc", *CUDA_FLAGS, "-arch=sm_90", "-I.", *options, f"cuda/{stage}/{stage}.cu"]
    return subprocess.run(
        command, cwd=ROOT / "csrc", check=True, capture_output=True, text=True
    ).stderr


def compiled_variants(stage: str, folder) -> set[str]:
    """The kernels that nvcc makes of csrc/cuda/<stage>/<stage>.cu, by their mangled names."""
    ptx = folder / f"{stage}.ptx"
    # Names need no optimiser, which takes most of the time.
    compiled(stage, "-ptx", "-o", str(ptx), "-Xcicc", "-O0")
    found = set()
    for arguments in re.findall(rf"\.entry \w*?{stage}_kernelI(\w*?)EEvNS", ptx.read_text()):
        words = r"Li(\d+)E|Lb([01])E|LNS_10WireFormatE(\d)E|(6__half|13__nv_bfloat16|v|f)"
        values = re.findall(words, arguments + "E")
        names = [
            n or b and ("false", "true")[int(b)] or w and WIRES[int(w)] or MANGLED[t]
            for n, b, w, t in values
        ]
        found.add(f"{stage}_kernel<{{{', '.join(names[:-1])}}}, {names[-1]}>")
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on the PATH")
@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_the_variant_table_is_what_is_compiled(stage, tmp_path):
    documented = {name for name in documented_variants() if name.startswith(stage)}
    assert compiled_variants(stage, tmp_path) == documented


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on the PATH")
@pytest.mark.parametrize(
    ("stage", "variants", "kernels", "most_spilled", "most_registers"),
    [
        ("dispatch", r"Li[124]ELb[01]ELNS_10WireFormatE\dELi1E", 22, 0, 96),
        ("combine", r"Li2ELb[01]ELb[01]ELNS_10WireFormatE\dELb[01]E", 21, 24, 120),
    ],
)
def test_a_round_finds_a_place_beside_a_foreign_block(
    stage, variants, kernels, most_spilled, most_registers, tmp_path
):
    """The variants with a multiprocessor to themselves: dispatch beside 1024 threads with 16
    registers each, combine beside 128 with 32; see docs/protocol.md, 'A kernel that finds no
    place'.
    """
    said = compiled(stage, "-cubin", "-o", str(tmp_path / "cubin"), "--resource-usage")
    entry = rf"properties for \w*{stage}_kernel\w*?VariantE{variants}.*\n"
    used = re.findall(rf"{entry}.* (\d+) bytes spill stores.*\n.*Used (\d+) registers", said)
    assert len(used) == kernels
    assert max(int(spilled) for spilled, _ in used) <= most_spilled
    assert max(int(registers) for _, registers in used) <= most_registers


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on the PATH")
def test_a_vector_in_memory_is_one_access(tmp_path):
    """Rows of bf16 that dispatch quantizes were read a byte at a time: the compiler had made that
    of a memcpy from shared memory.
    """
    source = tmp_path / "vectors.cu"
    source.write_text("""
        #include "cuda/device/vector.cuh"
        using namespace epmoe::cuda;
        __global__ void sums(float* out, int stride) {
          extern __shared__ char rows[];
          auto* row = reinterpret_cast<const Vector<__nv_bfloat16, 8>*>(rows + blockIdx.x * stride);
          float values[8], sum = 0.0f;
          to_floats(row[threadIdx.x], values);
          for (float value : values) sum += value;
          out[threadIdx.x] = sum;
        }
    """)
    ptx = tmp_path / "vectors.ptx"
    command = ["nvcc", *CUDA_FLAGS, "-arch=sm_90", "-I.", "-ptx", "-o", str(ptx), str(source)]
    subprocess.run(command, cwd=ROOT / "csrc", check=True, capture_output=True)
    loads = re.findall(r"ld\.shared\.\S+", ptx.read_text())
    assert loads == ["ld.shared.v4.u32"]
