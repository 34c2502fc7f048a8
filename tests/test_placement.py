"""Placement: hand-computed cases, and properties of every placement."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epmoe.config import EPConfig
from epmoe.placement import Placement


def test_linear_gives_the_first_ranks_one_more_expert():
    placement = Placement.build(10, 4)
    assert placement.owners == (0, 0, 0, 1, 1, 1, 2, 2, 3, 3)
    assert placement.expert_map(1).tolist() == [-1, -1, -1, 0, 1, 2, -1, -1, -1, -1]
    assert [placement.sentinel(rank) for rank in range(4)] == [3, 0, 0, 0]


def test_round_robin():
    placement = Placement.build(5, 2, "round_robin")
    assert placement.owners == (0, 1, 0, 1, 0)
    assert placement.expert_map(0).tolist() == [0, -1, 1, -1, 2]
    assert placement.local_experts(1) == [1, 3]


def test_explicit_from_config():
    config = EPConfig(
        model={"num_experts": 3, "num_experts_per_tok": 1, "hidden_size": 64},
        topology={"ep_size": 3},
        placement={"strategy": "explicit", "assignment": [2, 0, 2, 0], "num_redundant_experts": 1},
    )
    placement = Placement.from_config(config)
    assert placement.owners == (2, 0, 2, 0)
    assert placement.local_index == (0, 0, 1, 1)
    assert placement.num_local_experts(1) == 0
    assert placement.copies(0) == (0, 3)


def test_copies():
    placement = Placement.build(3, 2, num_redundant_experts=4)
    assert [placement.copies(x) for x in range(3)] == [(0, 3, 6), (1, 4), (2, 5)]
    assert placement.copies_table().tolist() == [[0, 3, 6], [1, 4, -1], [2, 5, -1]]
    assert placement.num_copies().tolist() == [3, 2, 2]
    assert [placement.logical(p) for p in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_one_rank_has_no_foreign_expert():
    assert Placement.build(4, 1, num_redundant_experts=1).sentinel(0) == 5
    assert Placement.build(2, 2, "explicit", [1, 1]).sentinel(1) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "`num_experts` must be an integer of at least 1, got 0"),
        ((True, 1), "`num_experts` must be .* got True"),
        ((4, 0), "`ep_size` must be .* got 0"),
        ((4, 2, "linear", None, -1), "`num_redundant_experts` must be .* got -1"),
        ((4, 2, "spiral"), "`strategy` must be 'linear', 'round_robin' or 'explicit', got 'spiral'"),
        ((4, 2, "explicit"), "`assignment` must be given with strategy 'explicit'"),
        ((4, 2, "linear", [0, 0, 1, 1]), "`assignment` must be given with .* got 'linear' with one"),
        ((4, 2, "explicit", [0, 1]), "`assignment` must be 4 ranks, one per physical expert, got 2"),
        ((4, 2, "explicit", [0, 1, 2, 0]), r"`assignment\[2\]` must be a rank from 0 to 1, got 2"),
        ((4, 2, "explicit", [0, 1, -1, 0]), r"`assignment\[2\]` must be a rank from 0 to 1, got -1"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Placement.build(*arguments)


@pytest.mark.parametrize("call", ["expert_map", "sentinel", "local_experts", "num_local_experts"])
def test_a_wrong_rank_is_named(call):
    with pytest.raises(ValueError, match="`rank` must be an integer from 0 to 1, got 2"):
        getattr(Placement.build(4, 2), call)(2)


def test_a_wrong_expert_is_named():
    placement = Placement.build(4, 2, num_redundant_experts=1)
    for call, name, end in (("owner", "physical", 5), ("logical", "physical", 5), ("copies", "logical", 4)):
        for value in (-1, end):
            with pytest.raises(ValueError, match=f"`{name}` must be .* 0 to {end - 1}, got {value}"):
                getattr(placement, call)(value)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    experts, ranks, redundant = draw(st.integers(1, 40)), draw(st.integers(1, 9)), draw(st.integers(0, 50))
    strategy = draw(st.sampled_from(["linear", "round_robin", "explicit"]))
    physical = experts + redundant
    owners = st.lists(st.integers(0, ranks - 1), min_size=physical, max_size=physical)
    assignment = draw(owners) if strategy == "explicit" else None
    return Placement.build(experts, ranks, strategy, assignment, redundant)


@given(placements())
def test_every_physical_expert_has_one_owner_and_one_local_index(placement):
    maps = torch.stack([placement.expert_map(rank) for rank in range(placement.ep_size)])
    assert maps.dtype == torch.int32 and maps.shape == (placement.ep_size, placement.num_physical_experts)
    assert ((maps >= 0).sum(dim=0) == 1).all()
    for rank in range(placement.ep_size):
        local = placement.local_experts(rank)
        assert maps[rank, local].tolist() == list(range(placement.num_local_experts(rank)))
        assert all(placement.owner(p) == rank for p in local)
        sentinel = placement.sentinel(rank)
        if sentinel == placement.num_physical_experts:
            assert len(local) == placement.num_physical_experts
        else:
            assert maps[rank, sentinel] == -1


@given(placements())
def test_copies_partition_the_physical_experts(placement):
    table, counts = placement.copies_table(), placement.num_copies()
    assert table.shape == (placement.num_experts, int(counts.max()))
    assert sorted(table[table >= 0].tolist()) == list(range(placement.num_physical_experts))
    for x in range(placement.num_experts):
        row = table[x, : counts[x]].tolist()
        assert tuple(row) == placement.copies(x) and row[0] == x
        assert all(placement.logical(p) == x for p in row)
        assert (table[x, counts[x] :] == -1).all()
