"""The guards on a GPU.

A build without one guard fails that guard's own tests. compute-sanitizer reports the illegal access
that crashed servers only in a build without both guards: that of the sort and that of finalize.
Under graph replay the whole chain of that incident runs, with all of its four guards out, and with
each one of them back.
"""

from __future__ import annotations

import pytest
import sanitizer
import torch
from helpers import build_without
from launched import run_python
from sanitizer import sanitize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
SANITIZER = pytest.mark.skipif(sanitizer.TOOL is None, reason="there is no compute-sanitizer")
FAILING = {
    "EPMOE_MUTATE_WARP_CLAMP": "route.py::test_poisoned_rows",
    "EPMOE_MUTATE_GENERAL_CLAMP": "route.py::test_poisoned_rows",
    "EPMOE_MUTATE_SORT_GUARD": "permute.py::test_ids_out_of_range_are_skipped",
    "EPMOE_MUTATE_FINALIZE_GUARD": "finalize.py::test_row_indices_out_of_range_are_skipped",
}
# The ids that crashed servers. All of them are valid. Without its guard the sort leaves the map
# entries of duplicates unwritten.
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
# The incident: a replay pads the batch with stale rows, whose logits are NaN. A top-k that compares
# with NaN chooses expert 0 K times. `GUARDS` holds what is in: the guards of the sort and of
# finalize are a matter of the library.
INCIDENT = """
import torch, epmoe
# Uninitialised memory holds the largest integer.
torch.use_deterministic_algorithms(True, warn_only=True)
T = 288
REAL = 1
E = 128
K = 8
GUARDS = {guards}
identity_map = torch.arange(E, dtype=torch.int32, device="cuda")
x, logits = torch.zeros(T, 512, device="cuda").bfloat16(), torch.zeros(T, E, device="cuda")
real = torch.full((), REAL, dtype=torch.int32, device="cuda")
is_real = torch.arange(T, device="cuda")[:, None] < real

def top_k_of_the_incident():
    scores, ids = logits.softmax(1), []
    for _ in range(K):
        comparable = torch.where(scores > -torch.inf, scores, -torch.inf)  # NaN > s is false
        ids.append(comparable.argmax(1, keepdim=True))
        scores = scores.scatter(1, ids[-1], -10000.0)
    return torch.cat(ids, 1), logits.softmax(1).gather(1, torch.cat(ids, 1))

def layer():
    if "unique top-k" in GUARDS:
        routing = epmoe.route(logits, K)
        ids, weights = routing.ids, routing.weights
    else:
        ids, weights = top_k_of_the_incident()
    if "padding not routed" in GUARDS:
        ids, weights = torch.where(is_real, ids, E), torch.where(is_real, weights, 0.0)
    permuted = epmoe.permute(x, ids.int(), identity_map, E)
    return epmoe.finalize(permuted.rows, permuted, weights.float())

logits.normal_()
layer()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = layer()
for replay in range(3):
    logits[REAL:], x[REAL:] = torch.nan, torch.nan
    logits[:REAL], x[:REAL] = torch.randn(REAL, E, device="cuda"), 1.0
    graph.replay()
    torch.cuda.synchronize()
    assert y[:REAL].isfinite().all() and y[:REAL].ne(0).all()
print("done")
"""
GUARDS = ("padding not routed", "unique top-k", "full map", "finalize's check")


@pytest.mark.parametrize("guard", FAILING)
def test_a_build_without_one_guard_fails(guard):
    test = f"tests/test_{FAILING[guard]}"
    options = ["-q", "-rA", "--tb=no", "-p", "no:cacheprovider", "-k", "cuda"]
    run = run_python("-m", "pytest", *options, test, EPMOE_LIBRARY=build_without(guard))
    assert run.returncode == pytest.ExitCode.TESTS_FAILED and f"FAILED {test}" in run.stdout, (
        run.stdout + run.stderr
    )


@SANITIZER
@pytest.mark.parametrize("tool", sanitizer.PARTS["local stages"][2])
def test_sanitizer_reports_no_error_in_the_local_pipeline(tool):
    (run,) = sanitize(tool, sanitizer.LOCAL)
    assert run.returncode == 0 and sanitizer.errors_of(run) == 0, (
        run.stdout[-4000:] + run.stderr[-2000:]
    )


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
    (run,) = sanitize("memcheck", DUPLICATES, library=build_without(*guards))
    assert (run.returncode != 0) == illegal, run.stdout[-4000:] + run.stderr[-2000:]
    assert ("Invalid __global__ read" in run.stdout) == illegal


@SANITIZER
@pytest.mark.parametrize("back", [None, *GUARDS])
def test_the_incident_under_graph_replay(back):
    """With all four guards out the replay reads out of bounds, as it did in servers; with any one
    back it does not.
    """
    out = {"full map": "EPMOE_MUTATE_SORT_GUARD", "finalize's check": "EPMOE_MUTATE_FINALIZE_GUARD"}
    library = build_without(*(symbol for guard, symbol in out.items() if guard != back))
    (run,) = sanitize("memcheck", INCIDENT.format(guards=[back]), library=library, caching=True)
    report = run.stdout[-4000:] + run.stderr[-2000:]
    assert ("Invalid __global__ read" in run.stdout) == (back is None), report
    assert ("done" in run.stdout and run.returncode == 0) == (back is not None), report
