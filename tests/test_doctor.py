"""`epmoe doctor`: what it finds, and what it advises."""

from __future__ import annotations

import errno
import os
import re
from types import SimpleNamespace

import pytest
import torch
from test_cli import DEMO, epmoe, write

from epmoe.cli import doctor as doctor_module
from epmoe.cli.console import human_bytes
from epmoe.config.config import EPConfig
from epmoe.exchange.memory import MemoryPlan
from epmoe.native import build


def test_doctor_passes_on_this_machine():
    result = epmoe("doctor", DEMO)
    assert result.exit_code == 0, result.output
    for subject in ("compiler", "torch", "native library", "GPUs", "memory", "/dev/shm"):
        assert subject in result.output


def test_doctor_fails_where_the_plan_does_not_fit(monkeypatch):
    """The plan of all ranks, which take turns where there are fewer cores."""
    config = EPConfig.load(DEMO)
    some = 2 * MemoryPlan.build(config).total_bytes  # of four ranks
    monkeypatch.setattr(doctor_module, "available_memory_bytes", lambda: some)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    result = epmoe("doctor", DEMO)
    assert result.exit_code == 1
    assert (
        f"{human_bytes(2 * some)} planned for 4 ranks; {human_bytes(some)} available"
        in result.output
    )
    assert "lower `capacity.max_num_tokens_per_rank`" in result.output
    assert "4 ranks on 2 cores: works, but they take turns" in result.output


def test_ranks_without_experts_count_by_themselves(monkeypatch):
    """On GPUs, each of which has room for one rank."""
    config = EPConfig.load("h200x8_deepseek_service")
    least, most = (MemoryPlan.build(config, rank).total_bytes for rank in (0, 7))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (most, most))
    [finding] = doctor_module._memory(config)
    planned = f"{human_bytes(least)} to {human_bytes(most)} planned on each GPU"
    assert (finding.level, finding.detail) == ("ok", f"{planned}, {human_bytes(most)} free")


def test_doctor_fails_where_there_are_no_windows(monkeypatch):
    def refused(_: str) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    [finding] = [one for one in doctor_module.diagnose(None) if one.subject == "CPU windows"]
    assert (finding.level, finding.detail) == (
        "fail",
        "memfd_create fails: Operation not permitted",
    )


@pytest.mark.parametrize("gpus", [0, 1])
def test_doctor_counts_the_gpus(tmp_path, monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    result = epmoe("doctor", write(tmp_path, exchange={"transport": "nvlink"}))
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if "GPUs" in line]
    assert line.startswith("fail")
    assert (
        f"torch sees {gpus}, and `exchange.transport` nvlink wants one for each of 2 ranks" in line
    )


CARDS = [
    ("T4", (7, 5), "fail", "epmoe needs sm_80 or newer"),
    ("A100", (8, 0), "warn", "which waits for the host: no CUDA graph of a layer"),
    ("L40S", (8, 9), "warn", "which waits for the host: no CUDA graph of a layer"),
    ("H200", (9, 0), "ok", "every kernel"),
    ("B200", (10, 0), "warn", "by torch's grouped_mm in bf16"),
    ("Thor", (11, 0), "warn", "never run or compiled"),
    ("RTX PRO 6000", (12, 0), "warn", "which waits for the host: no CUDA graph of a layer"),
]


@pytest.mark.parametrize(("name", "capability", "level", "gets"), CARDS)
def test_doctor_says_what_a_card_gets(
    name,
    capability,
    level,
    gets,
    monkeypatch,
):
    major, minor = capability
    card = SimpleNamespace(name=name, major=major, minor=minor, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(doctor_module, "_problem_with_kernels", lambda index: None)
    finding = doctor_module._card(1)
    assert (finding.level, finding.subject) == (level, "cuda:1")
    assert finding.detail == f"{name}, sm_{major}{minor}, 80.0 GiB" and gets in finding.advice


@pytest.mark.parametrize(
    ("capability", "problem", "level", "detail"),
    [
        ((8, 0), None, "ok", "torch's grouped GEMM: other ones need"),
        ((9, 0), None, "ok", "a kernel of epmoe's own .* bf16 and fp8; DeepGEMM with adapters"),
        ((9, 0), ImportError("not installed"), "warn", "adapters slower ones, since not installed"),
    ],
)
def test_doctor_says_what_computes_experts(capability, problem, level, detail, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "empty", lambda *shape, **given: None)
    monkeypatch.setattr(doctor_module.DeepGemm, "problem_with", lambda *weights: problem)
    found = doctor_module._experts_gemm()
    assert found.level == level and re.search(detail, found.detail)


def test_doctor_says_why_kernels_do_not_run_on_a_card(monkeypatch):
    """The library was made for others."""

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA: no kernel runs on this GPU")

    card = SimpleNamespace(name="Thor", major=11, minor=0, total_memory=128 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch, "zeros", refused)
    finding = doctor_module._card(0)
    assert (finding.level, finding.advice) == ("warn", "CUDA: no kernel runs on this GPU")


@pytest.mark.parametrize(
    ("reached", "linked", "level", "detail"),
    [
        (True, True, "ok", "between all 3 GPUs, over NVLink"),
        (True, False, "warn", "between all 3 GPUs, without NVLink: 0–2, 1–2"),
        (False, True, "fail", "missing: 0→2, 1→2, 2→0, 2→1"),
    ],
)
def test_doctor_says_how_gpus_reach_one_another(reached, linked, level, detail, monkeypatch):
    """GPU 2 is reached and linked as the parameters say, the others are."""
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda a, b: reached or 2 not in (a, b)
    )
    monkeypatch.setattr(doctor_module, "uuid_of", str)
    monkeypatch.setattr(doctor_module, "are_linked", lambda a, b: linked or "2" not in (a, b))
    finding = doctor_module._peer_access(3)
    assert (finding.level, finding.detail) == (level, detail)


def test_doctor_asks_for_no_compiler_where_the_library_is_prebuilt(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "AHEAD_OF_TIME", tmp_path)  # exists
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "/nowhere")
    result = epmoe("doctor")
    assert result.exit_code == 0, result.output
    assert "compiler" not in result.output and "nvcc" not in result.output
    assert f"built at installation: {tmp_path}" in result.output


@pytest.mark.parametrize("variable", ["HOME", "EPMOE_CACHE_DIR"])
def test_doctor_names_the_variable_of_a_cache_that_cannot_be_written(variable, monkeypatch):
    for other in ("XDG_CACHE_HOME", "EPMOE_CACHE_DIR", "EPMOE_LIBRARY"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, "/proc/nowhere")
    result = epmoe("doctor")
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("fail")]
    assert "native library" in line and "/proc/nowhere" in line
    assert "set EPMOE_CACHE_DIR to a folder that can be written" in line


def test_doctor_names_a_missing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = epmoe("doctor")
    assert result.exit_code == 1
    assert "`no-such-compiler` is not on the PATH" in result.output
    assert "install g++ 11" in result.output
