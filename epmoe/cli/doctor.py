"""`epmoe doctor [CONFIG]`: checks whether this machine can build and run epmoe, and says what to do
if it cannot.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.markup import escape

from epmoe.cli.capacity import rank_plans
from epmoe.cli.console import console, human_bytes
from epmoe.cli.launch import CONFIG, load
from epmoe.config.config import EPConfig
from epmoe.exchange.links import are_linked, uuid_of
from epmoe.exchange.window import available_memory_bytes
from epmoe.local.gemm.deep_gemm import DeepGemm
from epmoe.local.gemm.gemm import on_hopper
from epmoe.native import build
from epmoe.native.package import EXTRAS

OLDEST_GPU = (8, 0)
# The state of GPUs on which epmoe has no GEMM of its own.
_TORCH_GEMM_ONLY = (
    "never run there; experts by torch's grouped_mm, which waits for the host: no CUDA graph of a "
    "layer"
)
# The state of each kind of GPU, by the major number of its compute capability, as in README.
_SUPPORT = {
    8: _TORCH_GEMM_ONLY,
    9: "tried; every kernel",
    10: "never run there; experts by torch's grouped_mm in bf16, to which weights of 4 and 8 bits "
    "are turned",
    12: _TORCH_GEMM_ONLY,
}
_ADVICE_OF_CACHE = (
    "EPMOE_CACHE_DIR names a folder to build the library in, EPMOE_LIBRARY one that is built"
)


_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The state of one part of the machine, and what to do about it."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    detail: str
    advice: str = ""


def doctor(config: Annotated[Path | None, CONFIG] = None) -> None:
    """Check compiler, torch, native library, GPUs and memory, and say what to do."""
    # One line for each finding, and its advice on a line below.
    parsed = load(config) if config else None
    failed = False
    for finding in diagnose(parsed):
        failed |= finding.level == "fail"
        colour = _COLOURS[finding.level]
        console.print(
            f"[{colour}]{finding.level:<4}[/]  {finding.subject:<15} {escape(finding.detail)}",
            soft_wrap=True,
        )
        if finding.advice:
            console.print(f"      {'':<15} [dim]→[/] {escape(finding.advice)}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def diagnose(config: EPConfig | None) -> Iterator[Finding]:
    """Check everything, in the order in which a user should correct problems."""
    # A library that is built already needs no compiler.
    if build.ready() is None:
        yield _compiler()
    yield _torch()
    with console.status("building and loading the native library ..."):
        native = _native_library()
    yield native
    yield from _gpus(config)
    if torch.cuda.is_available():
        yield _experts_gemm()
    yield _optional("transformers", "no `epmoe run --model`")
    yield _optional("matplotlib", "no `epmoe bench --plot`")
    yield _anonymous_memory()
    yield from _memory(config)


def _compiler() -> Finding:
    """Check that there is a C++ compiler."""
    compiler = os.environ.get("CXX") or "c++"
    advice = (
        "install g++ 11 or newer (Debian, Ubuntu: apt-get install g++), or point CXX to a compiler"
    )
    path = shutil.which(compiler)
    if path is None:
        return Finding("fail", "compiler", f"`{compiler}` is not on the PATH", advice)
    version = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=False
    ).stdout
    line = version.splitlines()[0] if version else path
    found = re.search(r"(\d+)\.\d+", line)
    if "clang" not in line.lower() and found and int(found[1]) < 11:
        return Finding("fail", "compiler", f"{line}: too old for C++20", advice)
    return Finding("ok", "compiler", line)


def _torch() -> Finding:
    """Check the version of torch. A version on which epmoe was never tried is a warning."""
    devices = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    detail = f"{torch.__version__}, {devices}"
    oldest = build.TRIED_TORCH[0]
    # Compare the first two numbers of a version such as 2.9.1+cpu.
    release = torch.__version__.split("+")[0].split(".")[:2]
    if tuple(map(int, release)) < oldest:
        return Finding("fail", "torch", detail, f"install torch ≥ {'.'.join(map(str, oldest))}")
    problem = build.problem_with_torch(torch.__version__)
    return Finding("warn" if problem else "ok", "torch", detail, problem or "")


def _native_library() -> Finding:
    """Check that the native library loads, and build it if need be."""
    try:
        # Any call of an operator loads the library.
        from epmoe.local.route import route

        route(torch.zeros(1, 2), 1)
        path = build.ready() or build.build()
    except (OSError, RuntimeError) as error:
        # The build has failed, or there is no home folder for the cache.
        advice = "" if "EPMOE_CACHE_DIR" in str(error) else _ADVICE_OF_CACHE
        return Finding("fail", "native library", " ".join(str(error).split())[:400], advice)
    how = "loads; built at installation" if path == build.AHEAD_OF_TIME else "loads"
    return Finding("ok", "native library", f"{how}: {path}")


def _gpus(config: EPConfig | None) -> Iterator[Finding]:
    """Check the GPUs that torch sees, and the compiler of their kernels."""
    count = torch.cuda.device_count()
    yield from _number_of_gpus(config, count)
    if not torch.cuda.is_available():
        return
    # Check each GPU, and that all GPUs reach one another.
    for index in range(count):
        yield _card(index)
    if count > 1:
        yield _peer_access(count)
    # Check that the kernels of the GPUs can be built.
    if shutil.which("nvcc") is None and build.ready() is None:
        advice = f"install the CUDA {torch.version.cuda} toolkit and put its bin/ on the PATH"
        yield Finding(
            "warn", "nvcc", "not on the PATH: the native library is built without CUDA", advice
        )


def _card(index: int) -> Finding:
    """Check one GPU, and say which kernels it has."""
    found = torch.cuda.get_device_properties(index)
    detail = f"{found.name}, sm_{found.major}{found.minor}, {human_bytes(found.total_memory)}"
    subject = f"cuda:{index}"
    if (found.major, found.minor) < OLDEST_GPU:
        return Finding("fail", subject, detail, "epmoe needs sm_80 or newer")
    problem = _problem_with_kernels(index)
    if problem is not None:
        return Finding("warn", subject, detail, problem)
    support = _SUPPORT.get(found.major, "never run or compiled for it")
    return Finding("ok" if found.major == 9 else "warn", subject, detail, advice=support)


def _problem_with_kernels(index: int) -> str | None:
    """Say why epmoe's kernels do not run on a GPU, or return None if they run. The library may have
    been built without kernels, or without kernels for this GPU.
    """
    try:
        from epmoe.local.route import route

        route(torch.zeros(1, 2, device=f"cuda:{index}"), 1)
        torch.cuda.synchronize(index)
    except (OSError, RuntimeError) as error:
        return " ".join(str(error).split())[:400]
    return None


def _peer_access(count: int) -> Finding:
    """Check that all GPUs reach one another, by NVLink or PCIe."""
    unreachable = []
    for a, b in itertools.permutations(range(count), 2):
        if not torch.cuda.can_device_access_peer(a, b):
            unreachable.append(f"{a}→{b}")
    if unreachable:
        advice = (
            "see `nvidia-smi topo -p2p r`; in a container or VM, all GPUs of one NVLink domain "
            "must be visible"
        )
        return Finding("fail", "peer access", f"missing: {', '.join(unreachable)}", advice)
    uuids = [uuid_of(index) for index in range(count)]
    over_pcie = []
    for a, b in itertools.combinations(range(count), 2):
        if not are_linked(uuids[a], uuids[b]):
            over_pcie.append(f"{a}–{b}")
    if over_pcie:
        detail = f"between all {count} GPUs, without NVLink: {', '.join(over_pcie)}"
        advice = "calls of few tokens take the Simple protocol, which is slower for them"
        return Finding("warn", "peer access", detail, advice)
    return Finding("ok", "peer access", f"between all {count} GPUs, over NVLink")


def _number_of_gpus(config: EPConfig | None, count: int) -> Iterator[Finding]:
    """Check that there are enough GPUs for a configuration, or say that there are none."""
    size = config.topology.ep_size if config else 0
    if config and config.exchange.transport == "nvlink" and count < size:
        detail = (
            f"torch sees {count}, and `exchange.transport` nvlink wants one for each of {size} "
            f"ranks"
        )
        advice = "EPMOE_EXCHANGE__TRANSPORT=shared_memory runs it on the CPU"
        yield Finding("fail", "GPUs", detail, advice)
    elif count == 0 and shutil.which("nvidia-smi"):
        advice = "install a torch build with CUDA; `nvidia-smi` says what the driver supports"
        yield Finding("warn", "GPUs", "there is a driver, but torch sees no GPU", advice)
    elif count == 0:
        yield Finding("ok", "GPUs", "none: epmoe runs on the CPU")


def _experts_gemm() -> Finding:
    """Say which grouped GEMMs compute experts with weights in bf16 and fp8."""
    if not on_hopper("cuda"):
        detail = "torch's grouped GEMM: other ones need compute capability 9.0"
        return Finding("ok", "experts", detail)
    own = "a kernel of epmoe's own for weights in bf16 and fp8"
    # DeepGEMM takes what that kernel does not, such as calls in which adapters add to products.
    gate_up = torch.empty(1, 512, 256, dtype=torch.bfloat16, device="cuda")
    down = torch.empty(1, 256, 256, dtype=torch.bfloat16, device="cuda")
    problem = DeepGemm().problem_with(gate_up, down)
    if problem is None:
        return Finding("ok", "experts", f"{own}; DeepGEMM with adapters")
    return Finding("warn", "experts", f"{own}; with adapters slower ones, since {problem}")


def _optional(package: str, without: str) -> Finding:
    """Check that an optional package is installed. `without` says what does not work otherwise."""
    try:
        return Finding("ok", package, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        advice = f"pip install 'epmoe[{EXTRAS[package]}]'"
        return Finding("warn", package, f"not installed: {without}", advice)


def _anonymous_memory() -> Finding:
    """Check that this process can make anonymous memory for windows."""
    try:
        os.close(os.memfd_create("epmoe-doctor"))
    except OSError as error:
        advice = "the container's seccomp profile must allow memfd_create"
        return Finding("fail", "CPU windows", f"memfd_create fails: {error.strerror}", advice)
    return Finding("ok", "CPU windows", "anonymous memory (memfd), which /dev/shm does not limit")


def _memory(config: EPConfig | None) -> Iterator[Finding]:
    """Check that there is memory for the ranks of a configuration."""
    available = available_memory_bytes()
    detail = f"{human_bytes(available)} available"
    if config is None:
        yield Finding("ok", "memory", detail)
        return
    sizes = [plan.total_bytes for plan in rank_plans(config)]
    ranks = config.topology.ep_size
    advice = (
        "lower `capacity.max_num_tokens_per_rank` or set `capacity.max_expert_rows`; see `epmoe "
        "plan`"
    )
    # On GPUs, each GPU must have room for its rank. On CPUs, the machine must have room for all
    # ranks.
    if config.exchange.transport == "nvlink":
        # With too few GPUs, `_number_of_gpus` has said so.
        if torch.cuda.device_count() < ranks:
            return
        free, _ = torch.cuda.mem_get_info()
        fits = max(sizes) <= free
        planned = human_bytes(max(sizes))
        # Ranks without experts have less.
        if min(sizes) < max(sizes):
            planned = f"{human_bytes(min(sizes))} to {planned}"
        detail = f"{planned} planned on each GPU, {human_bytes(free)} free"
    else:
        fits = sum(sizes) <= available
        detail = f"{human_bytes(sum(sizes))} planned for {ranks} ranks; {detail}"
        cores = len(os.sched_getaffinity(0))
        if ranks > cores:
            yield Finding(
                "warn", "cores", f"{ranks} ranks on {cores} cores: works, but they take turns"
            )
    if fits:
        yield Finding("ok", "memory", detail)
    else:
        yield Finding("fail", "memory", detail, advice)
