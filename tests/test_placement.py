"""Placement: hand-computed cases, and properties of every placement."""

from __future__ import annotations

import pytest
import torch
from helpers import alone
from hypothesis import given
from hypothesis import strategies as st
from no_clock import NO_CLOCK

from epmoe.config.placement import Move, Placement
from epmoe.group import recovery


def test_linear_gives_the_first_ranks_one_more_expert():
    placement = Placement.build(10, 4)
    assert placement.owners == (0, 0, 0, 1, 1, 1, 2, 2, 3, 3)
    assert placement.expert_map(1).tolist() == [-1, -1, -1, 0, 1, 2, -1, -1, -1, -1]
    assert [placement.sentinel(rank) for rank in range(4)] == [3, 0, 0, 0]


def test_other_strategies():
    placement = Placement.build(5, 2, "round_robin")
    assert placement.owners == (0, 1, 0, 1, 0) and placement.local_experts(1) == [1, 3]
    assert placement.expert_map(0).tolist() == [0, -1, 1, -1, 2]
    placement = Placement.build(3, 3, "explicit", [2, 0, 2, 0], 1)
    assert placement.local_index == (0, 0, 1, 1) and placement.num_local_experts(1) == 0
    assert Placement.build(3, 2, "explicit", [0, 0, 1, 1], 1, [0]) == Placement.build(
        3, 2, "explicit", [0, 0, 1, 1], 1
    )


@pytest.mark.parametrize(
    ("placement", "copies"),
    [
        (Placement.build(3, 2, num_redundant_experts=4), [[0, 3, 6], [1, 4, -1], [2, 5, -1]]),
        (
            Placement.build(3, 2, "explicit", [0, 0, 1, 1, 1, 0], 3, [1, 1, 2]),
            [[0, -1, -1], [1, 3, 4], [2, 5, -1]],
        ),
    ],
)
def test_copies(placement, copies):
    assert placement.copies_table().tolist() == copies
    assert placement.copies(1) == tuple(p for p in copies[1] if p >= 0)


def test_without_a_rank():
    """Experts 0 and 3 of rank 0 have copies on rank 2: these take the ids 0 and 3. Ranks 1 and 2
    become 0 and 1.
    """
    old = Placement.build(4, 3, "explicit", [0, 1, 2, 0, 2, 0, 1, 2], 4)
    new = old.without([0])
    assert new.ep_size == 2 and new.owners == (1, 0, 1, 1, 0) and new.copied_experts == (2,)
    assert old.moves(new, [1, 2]) == [(), (Move(0, 0, 1), Move(1, 2, 0))]
    assert [old.logical(p) for p in old.local_experts(2)] == [2, 0, 3]
    assert [new.logical(p) for p in new.local_experts(1)] == [0, 2, 3]


def test_lost_experts_are_named_or_spread():
    old = Placement.build(6, 3)
    # Rank 1 has the only copies of two experts.
    with pytest.raises(
        ValueError, match=r"expert\(s\) \[2, 3\] have no copy outside rank\(s\) \[1\].*spread_lost"
    ):
        old.without([1])
    # They are spread, and moves bring them.
    new = old.without([1], spread_lost=True)
    assert new.owners == (0, 0, 0, 1, 1, 1)
    assert old.moves(new, [0, 2]) == [
        (Move(2, 2, None),),
        (Move(0, 3, None), Move(1, 4, 0), Move(2, 5, 1)),
    ]
    # Many experts, and no rank.
    with pytest.raises(ValueError, match=r"\[0, 1, .* 19\] and 5 more have no copy"):
        Placement.build(25, 2, "explicit", [1] * 25).without({1})
    with pytest.raises(
        ValueError, match="`ranks` must leave at least one of 3 ranks, got \\[0, 1, 2\\]"
    ):
        old.without(range(3))


def test_moves_to_a_new_rank():
    old = Placement.build(4, 1)
    new = Placement.build(4, 2)
    assert old.moves(new) == [(), (Move(0, 2, None), Move(1, 3, None))]
    assert old.moves(new, [None, 0]) == [
        (Move(0, 0, None), Move(1, 1, None)),
        (Move(0, 2, 2), Move(1, 3, 3)),
    ]
    with pytest.raises(ValueError, match="`new` must place 4 logical experts, got 5"):
        old.moves(Placement.build(5, 1))
    with pytest.raises(ValueError, match="`ranks` must name 2 ranks, .* got 1"):
        old.moves(new, [0])


@pytest.mark.parametrize("call", ["expert_map", "sentinel", "local_experts", "num_local_experts"])
def test_a_wrong_rank_is_named(call):
    with pytest.raises(ValueError, match="`rank` must be an integer from 0 to 1, got 2"):
        getattr(Placement.build(4, 2), call)(2)


def test_a_wrong_expert_is_named():
    placement = Placement.build(4, 2, num_redundant_experts=1)
    for call, name, end in (
        ("owner", "physical", 5),
        ("logical", "physical", 5),
        ("copies", "logical", 4),
    ):
        for value in (-1, end):
            with pytest.raises(
                ValueError, match=f"`{name}` must be .* 0 to {end - 1}, got {value}"
            ):
                getattr(placement, call)(value)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    experts = draw(st.integers(1, 40))
    ranks = draw(st.integers(1, 9))
    redundant = draw(st.integers(0, 50))
    # Owners and copies that are drawn, or those of a strategy.
    strategy = draw(st.sampled_from(["linear", "round_robin", "explicit"]))
    physical = experts + redundant
    owners = st.lists(st.integers(0, ranks - 1), min_size=physical, max_size=physical)
    assignment = draw(owners) if strategy == "explicit" else None
    logicals = st.lists(st.integers(0, experts - 1), min_size=redundant, max_size=redundant)
    copied = draw(st.none() | logicals) if strategy == "explicit" else None
    return Placement.build(experts, ranks, strategy, assignment, redundant, copied)


@NO_CLOCK
@given(placements())
def test_every_physical_expert_has_one_owner_and_one_local_index(placement):
    maps = torch.stack([placement.expert_map(rank) for rank in range(placement.ep_size)])
    assert maps.dtype == torch.int32 and maps.shape == (
        placement.ep_size,
        placement.num_physical_experts,
    )
    assert ((maps >= 0).sum(dim=0) == 1).all()
    # Each rank numbers its own from 0; its sentinel is no expert of it.
    for rank in range(placement.ep_size):
        local = placement.local_experts(rank)
        assert maps[rank, local].tolist() == list(range(placement.num_local_experts(rank)))
        assert all(placement.owner(p) == rank for p in local)
        sentinel = placement.sentinel(rank)
        if sentinel == placement.num_physical_experts:
            assert len(local) == placement.num_physical_experts
        else:
            assert maps[rank, sentinel] == -1


@NO_CLOCK
@given(placements())
def test_copies_partition_the_physical_experts(placement):
    table = placement.copies_table()
    counts = placement.num_copies()
    assert table.shape == (placement.num_experts, int(counts.max()))
    assert sorted(table[table >= 0].tolist()) == list(range(placement.num_physical_experts))
    for x in range(placement.num_experts):
        row = table[x, : counts[x]].tolist()
        assert tuple(row) == placement.copies(x) and row[0] == x
        assert all(placement.logical(p) == x for p in row)
        assert (table[x, counts[x] :] == -1).all()


@NO_CLOCK
@given(placements(), st.data())
def test_without_keeps_every_copy_on_its_rank(placement, data):
    gone = data.draw(st.sets(st.integers(0, placement.ep_size - 1), max_size=placement.ep_size - 1))
    ranks = [rank for rank in range(placement.ep_size) if rank not in gone]
    new = placement.without(gone, spread_lost=True)

    def experts_on(held: Placement, rank: int) -> list[int]:
        return sorted(held.logical(p) for p in held.local_experts(rank))

    # What others have, and what nobody has.
    kept = {x for rank in ranks for x in experts_on(placement, rank)}
    lost = set(range(placement.num_experts)) - kept
    # All experts are there again.
    assert (
        new.ep_size == len(ranks)
        and {new.logical(p) for p in range(new.num_physical_experts)} == kept | lost
    )
    # Lost ones are spread, and all others stay.
    spread = [x for i in range(len(ranks)) for x in experts_on(new, i) if x in lost]
    assert sorted(spread) == sorted(lost)
    for i, rank in enumerate(ranks):
        assert [x for x in experts_on(new, i) if x not in lost] == experts_on(placement, rank)
    if lost:
        with pytest.raises(ValueError, match="have no copy"):
            placement.without(gone)


@NO_CLOCK
@given(placements(), st.data())
def test_moves_bring_every_weight_to_its_place(placement, data):
    gone = data.draw(st.sets(st.integers(0, placement.ep_size - 1), max_size=placement.ep_size - 1))
    ranks = [rank for rank in range(placement.ep_size) if rank not in gone]
    new = placement.without(gone, spread_lost=True)
    # What each rank has, and what moves bring it.
    for i, moves in enumerate(placement.moves(new, ranks)):
        before = [placement.logical(p) for p in placement.local_experts(ranks[i])]
        after = [*before, *[None] * new.num_physical_experts][: new.num_local_experts(i)]
        for move in moves:
            assert move.source is None or before[move.source] == move.logical
            assert (move.source is None) == (move.logical not in before)
            after[move.local_index] = move.logical
        assert after == [new.logical(p) for p in new.local_experts(i)]


@NO_CLOCK
@given(placements())
def test_a_config_carries_any_placement(placement):
    config = alone(placement.num_experts, top_k=1)
    assert config.with_placement(placement).place_experts() == placement


def test_the_experts_of_a_node():
    """Two nodes of two ranks: each numbers its experts in ascending order of physical id."""
    placement = Placement.build(6, 4, "round_robin", num_redundant_experts=1)
    nodes, local = placement.node_ids(2)
    assert nodes.tolist() == [0, 0, 1, 1, 0, 0, 1] and local.tolist() == [0, 1, 0, 1, 2, 3, 2]
    first = placement.of_node(0, 2)
    second = placement.of_node(1, 2)
    assert first.owners == (0, 1, 0, 1) and second.owners == (0, 1, 0)
    # Numbers of a node lead to the physical ids of its ranks.
    for rank in range(4):
        node = (first, second)[rank // 2]
        here = [p for p in range(7) if nodes[p] == rank // 2]
        assert [here[p] for p in node.local_experts(rank % 2)] == placement.local_experts(rank)
    assert Placement.build(4, 2).of_node(1, 1).sentinel(0) == 2  # no expert of the node is foreign
    with pytest.raises(ValueError, match="every node must own an expert: node 1 owns none"):
        Placement.build(2, 4).of_node(1, 2)


def test_ranks_without_experts_stay_without():
    """As those that bring tokens to a service of experts: rank 3 dies, and a new rank joins."""
    service = Placement.build(8, 4, "explicit", [2, 2, 2, 2, 3, 3, 3, 3])
    without_one = recovery._place_experts(service, [0, 1, 2])
    assert without_one.owners == (2,) * 8
    with_new = recovery._place_experts(without_one, [0, 1, 2, -1])
    assert with_new.owners == (2, 3) * 4
    # Where no other rank is left, they take them.
    assert service.without([2, 3], spread_lost=True).owners == (0, 1) * 4
    # A group whose ranks all hold experts spreads them over all.
    assert recovery._place_experts(Placement.build(4, 2), [0, 1, -1]).owners == (0, 1, 2, 0)
