"""The guards on a GPU.

A build without one guard fails that guard's own tests. compute-sanitizer reports the illegal access that crashed
servers only in a build without both guards: that of the sort and that of finalize.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, build_without
from launched import run_python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
SANITIZER = pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH")
FAILING = {
    "EPMOE_MUTATE_WARP_CLAMP": "route.py::test_poisoned_rows",
    "EPMOE_MUTATE_GENERAL_CLAMP": "route.py::test_poisoned_rows",
    "EPMOE_MUTATE_SORT_GUARD": "permute.py::test_ids_out_of_range_are_skipped",
    "EPMOE_MUTATE_FINALIZE_GUARD": "finalize.py::test_row_indices_out_of_range_are_skipped",
}
# The local pipeline with duplicate, foreign and invalid ids and with stale rows. Unwritten memory holds the largest
# integer or NaN. Every tensor is a separate allocation.
PIPELINE = """
import torch, epmoe
torch.use_deterministic_algorithms(True, warn_only=True)
identity_map = torch.arange(128, dtype=torch.int32, device="cuda")
for T in (200, 288):
    logits = torch.randn(T, 128, device="cuda").bfloat16()
    logits[1] = torch.nan
    routing = epmoe.route(logits, 8, num_tokens=torch.tensor(T - 7, dtype=torch.int32, device="cuda"))
    routing.ids[:4] = torch.tensor([5, 88, 88, 65, -1, 5, 127, 128], dtype=torch.int32, device="cuda")
    x = torch.randn(T, 512, device="cuda").bfloat16()
    permuted = epmoe.permute(x, routing.ids, identity_map, 128, alignment=4)
    partial = epmoe.finalize(permuted.rows, permuted, torch.ones(T, 8, device="cuda"))
    q = epmoe.quantize_fp8(epmoe.zero_padding_rows_(partial, T - 7), granularity="tensor", num_tokens=T - 7)
    torch.cuda.synchronize()
print("done")
"""
# The ids that crashed servers. All of them are valid. Without its guard the sort leaves the map entries of duplicates
# unwritten.
DUPLICATES = """
import torch, epmoe
torch.use_deterministic_algorithms(True, warn_only=True)
identity_map = torch.arange(128, dtype=torch.int32, device="cuda")
for T in (200, 288):
    ids = torch.tensor([5, 88, 88, 65, 3, 5, 127, 0], dtype=torch.int32, device="cuda").repeat(T, 1)
    permuted = epmoe.permute(torch.randn(T, 512, device="cuda").bfloat16(), ids, identity_map, 128)
    epmoe.finalize(permuted.rows, permuted, torch.ones(T, 8, device="cuda"))
    torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("guard", FAILING)
def test_a_build_without_one_guard_fails(guard):
    test = f"tests/test_{FAILING[guard]}"
    options = ["-q", "-rA", "--tb=no", "-p", "no:cacheprovider", "-k", "cuda"]
    run = run_python("-m", "pytest", *options, test, EPMOE_LIBRARY=build_without(guard))
    assert run.returncode == pytest.ExitCode.TESTS_FAILED and f"FAILED {test}" in run.stdout, run.stdout + run.stderr


def sanitize(tool: str, script: str, library: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} | ({"EPMOE_LIBRARY": library} if library else {})
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@SANITIZER
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_sanitizer_reports_no_error_in_the_local_pipeline(tool):
    run = sanitize(tool, PIPELINE)
    assert run.returncode == 0 and "done" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


@SANITIZER
@pytest.mark.parametrize(
    ("guards", "illegal"),
    [
        (("EPMOE_MUTATE_SORT_GUARD", "EPMOE_MUTATE_FINALIZE_GUARD"), True),
        (("EPMOE_MUTATE_SORT_GUARD",), False),
        (("EPMOE_MUTATE_FINALIZE_GUARD",), False),
    ],
)
def test_illegal_access_only_without_both_guards(guards, illegal):
    run = sanitize("memcheck", DUPLICATES, build_without(*guards))
    assert (run.returncode != 0) == illegal, run.stdout[-4000:] + run.stderr[-2000:]
    assert ("Invalid __global__ read" in run.stdout) == illegal
