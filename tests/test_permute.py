"""permute: every entry of the map is written, every row is placed once, and padding is not read."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, distinct_ids, generator, poison_, poisoned_memory, randn
from torch import Tensor

import epmoe
from epmoe.local.reference import permute_reference


def checked_permute(
    x: Tensor, ids: Tensor, expert_map: Tensor, num_local_experts: int, **options
) -> epmoe.Permuted:
    """Permutes into poisoned memory and compares every defined value with the reference."""
    with poisoned_memory():
        got = epmoe.permute(x, ids, expert_map, num_local_experts, **options)
    # Everything but rows behind the last segment is defined.
    want = permute_reference(x, ids, expert_map, num_local_experts, **options)
    assert torch.equal(got.row_of_pair, want.row_of_pair)
    assert torch.equal(got.expert_offsets, want.expert_offsets)
    assert torch.equal(got.tokens_per_expert, want.tokens_per_expert)
    assert torch.equal(got.rows[: want.rows.shape[0]], want.rows)
    assert (
        got.row_of_pair.dtype
        == got.expert_offsets.dtype
        == got.tokens_per_expert.dtype
        == torch.int32
    )
    return got


def expert_map(num_experts: int, local: list[int], device: torch.device) -> Tensor:
    mapped = torch.full((num_experts,), -1, dtype=torch.int32)
    mapped[local] = torch.arange(len(local), dtype=torch.int32)
    return mapped.to(device)


def test_by_hand(device):
    """Three tokens, top-2. This rank owns experts 3 and 0 (local 0 and 1). Expert 1 is foreign, and
    id 9 is invalid.
    """
    x = torch.tensor([[1.0, 1], [2, 2], [3, 3]], device=device)
    ids = torch.tensor([[0, 3], [1, 3], [9, 0]], dtype=torch.int32, device=device)
    permuted = checked_permute(x, ids, expert_map(4, [3, 0], device), 2)
    assert permuted.expert_offsets.tolist() == [0, 2, 4]
    assert permuted.tokens_per_expert.tolist() == [2, 2]
    assert permuted.rows[:4, 0].tolist() == [1, 2, 1, 3]
    assert permuted.row_of_pair.tolist() == [[2, 0], [-1, 1], [-1, 3]]
    # Segments of 4 rows, of which the last pair finds no room.
    gaps = checked_permute(x, ids, expert_map(4, [3, 0], device), 2, alignment=4, max_rows=5)
    assert gaps.expert_offsets.tolist() == [0, 4, 5] and gaps.tokens_per_expert.tolist() == [2, 1]
    assert gaps.rows[:, 0].tolist() == [1, 2, 0, 0, 1] and gaps.row_of_pair.tolist() == [
        [4, 0],
        [-1, 1],
        [-1, -1],
    ]


@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("tokens", [1, 32, 256, 257, 288, 384, 512])
def test_duplicate_ids_at_every_batch_size(device, tokens, alignment):
    """The case that crashed serving stacks: 128 experts, top-8, ids such as [5, 88, 88, 65, …]; ten
    runs agree.
    """
    ids = torch.randint(0, 128, (tokens, 8), dtype=torch.int32, generator=generator(tokens))
    ids[0] = torch.tensor([5, 88, 88, 65, 5, 88, 127, 0])
    ids[tokens // 2] = 0  # what argmax over NaN returns
    x = randn(tokens, 64, dtype=torch.bfloat16).to(device)
    identity_map = expert_map(128, list(range(128)), device)
    # Ten runs are equal.
    first = checked_permute(x, ids.to(device), identity_map, 128, alignment=alignment)
    for _ in range(9):
        again = epmoe.permute(x, ids.to(device), identity_map, 128, alignment=alignment)
        used = int(first.expert_offsets[-1])
        assert torch.equal(again.row_of_pair, first.row_of_pair) and torch.equal(
            again.rows[:used], first.rows[:used]
        )
    # On a rank with every fifth expert.
    checked_permute(
        x, ids.to(device), expert_map(128, list(range(3, 128, 5)), device), 25, alignment=alignment
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn])
@pytest.mark.parametrize("D", [16, 64, 1000, 7168])
def test_rows_of_any_width(device, dtype, D):
    x = randn(20, D, dtype=dtype).to(device)
    ids = distinct_ids(20, 9, 3).to(device)
    local = expert_map(9, [2, 3, 5, 8], device)
    if dtype == torch.float8_e4m3fn:
        got = epmoe.permute(x, ids, local, 4)
        want = permute_reference(x.view(torch.uint8), ids, local, 4)
        assert torch.equal(got.rows.view(torch.uint8)[: want.rows.shape[0]], want.rows)
    else:
        checked_permute(x, ids, local, 4)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_are_skipped(device, id_dtype):
    limits = torch.iinfo(id_dtype)
    bad = [-1, 8, 9, -2, limits.min, limits.max]
    if id_dtype == torch.int64:
        bad += [2**32 + 5, 2**31, -(2**32) + 1]  # 2³² + 5 is not 5
    ids = torch.tensor([[b, 5] for b in bad], dtype=id_dtype, device=device)
    # Each token has one id that is none.
    permuted = checked_permute(
        randn(len(bad), 16).to(device), ids, expert_map(8, list(range(8)), device), 8
    )
    assert permuted.row_of_pair[:, 0].eq(-1).all() and permuted.tokens_per_expert.sum() == len(bad)
    # No token has any.
    local = expert_map(8, [1, 2], device)
    none = checked_permute(
        randn(300, 16).to(device), ids.new_full((300, 4), -1), local, 2, alignment=128
    )
    assert none.expert_offsets.tolist() == [0, 0, 0]


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("counts", [[5, 0, 70], [0, 0, 0], [80, 80, 80], [1, 80, 2]])
def test_slabs_with_poisoned_padding(device, counts, alignment):
    """Slots past a source's count hold NaN and valid ids. permute reads neither."""
    M = 80
    K = 3
    D = 32
    x = randn(3 * M, D)
    ids = distinct_ids(3 * M, 10, K)
    # Padding of each slab is NaN.
    for r, count in enumerate(counts):
        poison_(x[r * M + count : (r + 1) * M])
    counts_R = torch.tensor(counts, dtype=torch.int32, device=device)
    local = expert_map(10, [0, 4, 5, 9], device)
    got = checked_permute(
        x.to(device), ids.to(device), local, 4, counts_R=counts_R, alignment=alignment
    )
    used = got.rows[: int(got.expert_offsets[-1])]
    assert used.isfinite().all() and int(got.tokens_per_expert.sum()) == int(
        (got.row_of_pair >= 0).sum()
    )


def test_counts_are_bounded(device):
    """A count outside [0, M] is clamped, so that permute reads no memory outside the slab."""
    x = randn(20, 16).to(device)
    ids = distinct_ids(20, 4, 2).to(device)
    identity_map = expert_map(4, [0, 1, 2, 3], device)
    got = epmoe.permute(
        x,
        ids,
        identity_map,
        4,
        counts_R=torch.tensor([2**30, -7], dtype=torch.int32, device=device),
    )
    want = epmoe.permute(
        x, ids, identity_map, 4, counts_R=torch.tensor([10, 0], dtype=torch.int32, device=device)
    )
    assert torch.equal(got.row_of_pair, want.row_of_pair)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("max_rows", [0, 1, 31, 32, 63, 90, 4000])
def test_pairs_past_max_rows_are_dropped(device, max_rows, alignment):
    x = randn(40, 16).to(device)
    ids = distinct_ids(40, 8, 4).to(device)
    got = checked_permute(
        x, ids, expert_map(8, [1, 3, 5], device), 3, max_rows=max_rows, alignment=alignment
    )
    assert got.rows.shape[0] == max_rows and int(got.expert_offsets[-1]) <= max_rows
    assert (got.row_of_pair < max_rows).all()


def test_no_tokens_and_no_experts(device):
    identity_map = expert_map(8, list(range(8)), device)
    empty = checked_permute(
        randn(0, 16).to(device), distinct_ids(0, 8, 2).to(device), identity_map, 8
    )
    assert empty.row_of_pair.shape == (0, 2) and empty.expert_offsets.eq(0).all()
    idle = checked_permute(
        randn(5, 16).to(device), distinct_ids(5, 8, 2).to(device), expert_map(8, [], device), 0
    )
    assert idle.expert_offsets.tolist() == [0] and idle.row_of_pair.eq(-1).all()


def test_strided_rows(device):
    wide = randn(30, 96).to(device)
    wide_ids = distinct_ids(30, 8, 6).to(device)
    checked_permute(wide[::2, 32:64], wide_ids[::2, 1:4], expert_map(8, [0, 2, 4, 7], device), 4)
