"""finalize: every received slot gets its weighted sum. Invalid row indices and weights of 0 add
nothing to it.

S slots have K pairs each, and N rows have D numbers each.
"""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, assert_close, distinct_ids, generator, poison_, poisoned_memory, randn
from torch import Tensor

import epmoe
from epmoe.local.reference import finalize_reference


def permuted_by(row_of_pair_SK: Tensor, counts: Tensor | None = None) -> epmoe.Permuted:
    """A `Permuted` with the two fields that finalize reads."""
    nothing = row_of_pair_SK.new_zeros(1)
    return epmoe.Permuted(nothing, nothing, nothing, row_of_pair_SK, counts)


def test_by_hand(device):
    rows_ND = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]], device=device)
    row_of_pair_SK = torch.tensor([[0, 2], [-1, -1], [1, -1]], dtype=torch.int32, device=device)
    weights_SK = torch.tensor([[0.5, 2.0], [1.0, 1.0], [3.0, torch.nan]], device=device)
    with poisoned_memory():
        partial_SD = epmoe.finalize(rows_ND, permuted_by(row_of_pair_SK), weights_SK)
    assert partial_SD.tolist() == [[8.5, 85.0], [0.0, 0.0], [6.0, 60.0]]


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("D", [16, 1000, 7168])
def test_agrees_with_fp64(device, dtype, weight_dtype, D):
    S = 20
    K = 6
    N = 70
    rows_ND = randn(N, D, dtype=dtype).to(device)
    row_of_pair_SK = (
        torch.randint(-30, N, (S, K), dtype=torch.int32, generator=generator(1))
        .clamp(min=-1)
        .to(device)
    )
    weights_SK = randn(S, K, dtype=weight_dtype, seed=2).to(device)
    got_SD = epmoe.finalize(rows_ND, permuted_by(row_of_pair_SK), weights_SK)
    assert got_SD.dtype == dtype
    assert_close(got_SD, finalize_reference(rows_ND, permuted_by(row_of_pair_SK), weights_SK))
    assert torch.equal(got_SD, epmoe.finalize(rows_ND, permuted_by(row_of_pair_SK), weights_SK))


def test_row_indices_out_of_range_are_skipped(device):
    """NaN lies before and after the rows, where −1 and indices past the end point."""
    beside = poison_(torch.empty(8, 16, device=device))
    rows_ND = beside[2:6].fill_(1.0)
    row_of_pair_SK = torch.tensor(
        [[-1, 0], [4, 1], [-2, 2], [5, 3], [4, -1]], dtype=torch.int32, device=device
    )
    partial_SD = epmoe.finalize(
        rows_ND, permuted_by(row_of_pair_SK), torch.ones(5, 2, device=device)
    )
    assert partial_SD[:4].eq(1).all() and partial_SD[4].eq(0).all()


def test_extreme_row_indices_are_skipped(device):
    """Not in a build without the guard, which ends by a signal here."""
    row_of_pair_SK = torch.tensor(
        [[-(2**31), 0], [2**31 - 1, 1], [2**30, -1]], dtype=torch.int32, device=device
    )
    rows_ND = torch.ones(2, 16, device=device)
    weights_SK = torch.ones(3, 2, device=device)
    partial_SD = epmoe.finalize(rows_ND, permuted_by(row_of_pair_SK), weights_SK)
    assert partial_SD[:2].eq(1).all() and partial_SD[2].eq(0).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_zero_weight_never_multiplies(device, dtype):
    rows_ND = torch.ones(3, 32, dtype=dtype, device=device)
    rows_ND[1] = torch.nan
    rows_ND[2] = torch.inf
    row_of_pair_SK = torch.tensor([[0, 1, 2], [1, 1, 2]], dtype=torch.int32, device=device)
    weights_SK = torch.tensor([[2.0, 0.0, -0.0], [0.0, 0.0, 0.0]], device=device)
    partial_SD = epmoe.finalize(rows_ND, permuted_by(row_of_pair_SK), weights_SK)
    assert partial_SD[0].eq(2).all() and partial_SD[1].eq(0).all()


@pytest.mark.parametrize("counts", [[3, 0], [0, 10], [10, 7]])
def test_slots_past_the_counts_are_not_read(device, counts):
    M = 10
    K = 3
    x_SD = randn(2 * M, 16).to(device)
    ids_SK = distinct_ids(2 * M, 6, K).to(device)
    weights_SK = randn(2 * M, K, seed=1)
    counts_R = torch.tensor(counts, dtype=torch.int32, device=device)
    identity_map = torch.arange(6, dtype=torch.int32, device=device)
    permuted = epmoe.permute(x_SD, ids_SK, identity_map, 6, counts_R=counts_R)
    for r, count in enumerate(counts):
        poison_(weights_SK[r * M + count : (r + 1) * M])
    # Weights past the counts are NaN.
    weights_SK = weights_SK.to(device)
    got_SD = epmoe.finalize(permuted.rows, permuted, weights_SK)
    want_SD = finalize_reference(permuted.rows, permuted, weights_SK)
    for r, count in enumerate(counts):
        assert_close(got_SD[r * M : r * M + count], want_SD[r * M : r * M + count])


@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("tokens", [1, 256, 257, 512])
def test_duplicate_ids_end_to_end(device, tokens, alignment):
    """permute and finalize, with duplicate, foreign and invalid ids: each pair of a local expert
    counts once.
    """
    ids_SK = torch.randint(-2, 70, (tokens, 8), generator=generator(tokens))
    ids_SK[0] = torch.tensor([5, 44, 44, 33, 5, 44, 63, 0])
    x_SD = randn(tokens, 64).to(device)
    weights_SK = randn(tokens, 8, seed=1).to(device)
    # Experts 5 to 49 are here.
    local = torch.full((64,), -1, dtype=torch.int32)
    local[5:50] = torch.arange(45, dtype=torch.int32)
    with poisoned_memory():
        permuted = epmoe.permute(x_SD, ids_SK.to(device), local.to(device), 45, alignment=alignment)
        partial_SD = epmoe.finalize(permuted.rows * 2, permuted, weights_SK)
    # Each pair of one of them counts once.
    share = (weights_SK.double().cpu() * ((ids_SK >= 5) & (ids_SK < 50))).sum(1, keepdim=True)
    assert_close(partial_SD, 2 * share * x_SD.double().cpu())


def test_no_tokens_and_no_rows(device):
    none = torch.empty(0, 3, dtype=torch.int32, device=device)
    assert epmoe.finalize(
        torch.ones(4, 16, device=device), permuted_by(none), none.float()
    ).shape == (0, 16)
    skipped = permuted_by(torch.full((5, 3), -1, dtype=torch.int32, device=device))
    rows_ND = torch.empty(0, 16, device=device)
    weights_SK = torch.ones(5, 3, device=device)
    assert epmoe.finalize(rows_ND, skipped, weights_SK).eq(0).all()
