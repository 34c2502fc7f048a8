"""The failure chain: stale rows → NaN logits → duplicate ids → unwritten map entries →
out-of-bounds reads.

Each of three guards breaks one link. A build without one guard fails that guard's own tests, and
the guard of the next link still keeps the real rows exact.
"""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, build_without, generator, poison_, poisoned_memory, randn
from launched import run_python

import epmoe
from epmoe.local.reference import moe_reference, route_reference

E = 128
K = 8
D = 64


@pytest.mark.parametrize(("tokens", "real"), [(128, 1), (257, 4), (1024, 1), (1024, 4)])
def test_stale_rows_never_reach_real_ones(device, tokens, real):
    """Real rows stay exact in a batch padded for graph replay, even without `num_tokens`."""
    x = poison_(torch.empty(tokens, D))
    logits = poison_(torch.empty(tokens, E))
    # Real rows stand among rows of NaN.
    where = torch.randperm(tokens, generator=generator(0))[:real]
    x[where] = randn(real, D)
    logits[where] = randn(real, E, seed=1) * 3
    x = x.to(device)
    logits = logits.to(device)
    where = where.to(device)
    local = torch.arange(E, dtype=torch.int32, device=device)
    with poisoned_memory():
        routing = epmoe.route(logits, K)
        permuted = epmoe.permute(x, routing.ids, local, E)
        y = epmoe.finalize(permuted.rows, permuted, routing.weights)
    # They are those of a batch without the others.
    want = route_reference(logits[where], K)
    assert_close(y[where], moe_reference(x[where], *want, lambda rows, _: rows))


def test_invalid_and_zero_weight_pairs_contribute_nothing():
    """Also to the reference, with which layers are compared."""
    ids = torch.tensor([[0, 1, 2, -1]])
    weights = torch.tensor([[2.0, torch.nan, 0.0, 1.0]])
    y = moe_reference(
        torch.ones(1, 4), ids, weights, lambda rows, i: rows * (torch.nan if i else 3.0)
    )
    assert y.tolist() == [[6.0] * 4]


# Guard → the tests that fail without it, and tests that still pass because of the next guard.
LINKS = {
    "EPMOE_MUTATE_ROUTE_CLAMP": (
        ["route.py::test_poisoned_rows", "route.py::test_random_bits"],
        [
            "chain.py::test_stale_rows_never_reach_real_ones",
            "finalize.py::test_duplicate_ids_end_to_end",
        ],
    ),
    "EPMOE_MUTATE_SORT_GUARD": (
        ["permute.py::test_by_hand", "permute.py::test_ids_out_of_range_are_skipped"],
        [
            "chain.py::test_stale_rows_never_reach_real_ones",
            "finalize.py::test_duplicate_ids_end_to_end",
        ],
    ),
    "EPMOE_MUTATE_FINALIZE_GUARD": (
        ["finalize.py::test_row_indices_out_of_range_are_skipped"],
        ["permute.py::test_ids_out_of_range_are_skipped"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("guard", LINKS)
def test_a_build_without_one_guard_fails(guard):
    """The build fails the guard's own tests and passes the tests of the next link."""
    failing, holding = ([f"tests/test_{name}" for name in names] for names in LINKS[guard])
    options = ["-q", "-rA", "--tb=line", "-p", "no:cacheprovider", "-k", "not cuda"]
    run = run_python(
        "-m", "pytest", *options, *failing, *holding, EPMOE_LIBRARY=build_without(guard)
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    for test in failing:
        assert f"FAILED {test}" in run.stdout, f"{test} passes without the guard\n{run.stdout}"
    for test in holding:
        assert f"PASSED {test}" in run.stdout and f"FAILED {test}" not in run.stdout, run.stdout
