"""Seats of a group: who sits where, which configs have them, and what their words say."""

from __future__ import annotations

import pytest
import torch
from exchanges import assert_y, gains, given, make_config, make_tokens
from slot_tables import times_slots

import epmoe
from epmoe import ConfigError, EPStateError, MemoryPlan
from epmoe.cli.capacity import Capacity
from epmoe.config.seats import Seats
from epmoe.exchange.node import NodeExchange
from epmoe.integrations import session
from epmoe.integrations.balancing import section_of
from epmoe.native.layouts import constant

LIVE = {"live": True, "slots_per_rank": 4, "staging_mb": 1}


@pytest.mark.parametrize(
    ("former", "seats"),
    [
        ([(-1, -1)] * 3, (0, 1, 2)),
        ([(0, 1), (0, 2), (-1, -1), (-1, -1)], (1, 2, 0, 3)),
        ([(0, 1), (2, 1), (2, 0)], (2, 1, 0)),  # a rank that the others had left out comes back
        ([(0, 5), (0, 0)], (1, 0)),
    ],
)
def test_ranks_keep_their_seats(former, seats):
    assert Seats.keep(4, former).of_ranks == seats


def test_ranks_are_told_by_their_numbers():
    seats = Seats(4, (3, 1))
    assert (
        seats.empty == [0, 2]
        and seats.ranks_in(0b1010) == [0, 1]
        and seats.mask_of_ranks(0b1000) == 0b01
    )
    assert (seats.rank_in(1), seats.rank_in(2)) == (1, 2)
    assert seats.by_rank("abcd") == ["d", "b"] and seats.by_rank([]) == []
    assert Seats.full(3) == Seats.keep(3, [(-1, -1)] * 3)


@pytest.mark.parametrize(
    ("max_ranks", "ranks_per_node", "placement", "said"),
    [
        (4, 3, {}, "unset without `placement.live`"),
        (4, 1, {}, "unset without `placement.live`"),
        (4, 1, LIVE, "all ranks with `placement.live`"),
        (
            2,
            3,
            LIVE,
            "from `topology.ep_size` = 3 to 47, since all seats have 65,536 slots at most, got 2",
        ),
        (48, 3, LIVE, "to 47, since all seats have 65,536 slots at most, got 48"),
        (65, 3, LIVE, "max_ranks"),
    ],
)
def test_configs_without_seats(max_ranks, ranks_per_node, placement, said):
    with pytest.raises(ConfigError, match=said):
        make_config(
            3, experts=4096, ranks_per_node=ranks_per_node, max_ranks=max_ranks, placement=placement
        )


def test_frameworks_fix_the_number_of_ranks(monkeypatch):
    """By a key of the users' `live`, as vLLM and SGLang take it, or by a variable, as
    SGLang does.
    """
    shapes = (8, 2, 64, torch.float32, 2)
    live = {"slots_per_rank": 4}
    with pytest.raises(ConfigError, match=r"placement\.max_ranks"):
        session.make_config(*shapes, {"placement": section_of(live | {"max_ranks": 3}, 1)})
    monkeypatch.setenv("EPMOE_TOPOLOGY__MAX_RANKS", "3")
    with pytest.raises(
        ConfigError, match="`topology.max_ranks` must be unset: the framework fixes"
    ):
        session.make_config(*shapes, {"placement": section_of(live, 1)}, from_environment=True)


def test_the_plan_counts_seats():
    plans = [
        MemoryPlan.build(make_config(ranks, experts=8, max_ranks=seats, placement=LIVE), rank=1)
        for ranks, seats in ((3, 4), (2, 4), (4, 4), (4, None))
    ]
    plans.append(
        MemoryPlan.build(
            make_config(3, experts=8, ranks_per_node=3, max_ranks=4, placement=LIVE), rank=1
        )
    )
    assert all(plan.as_ints() == plans[0].as_ints() for plan in plans)
    config = make_config(3, experts=8, max_ranks=3, placement=LIVE)
    assert config.of_size(2).topology.seats == 3 and config.of_size(4).topology.seats == 4
    assert config.of_size(1).placement.slots_per_rank == 8
    assert Capacity.of(config.of_size(2)).worst == MemoryPlan.build(config).sizes["max_rows"]


def test_a_rank_among_empty_seats():
    config = make_config(1, experts=4, top_k=2, max_ranks=3, placement=LIVE)
    gain_eD = gains(config, config.model.hidden_size)
    with epmoe.ExpertParallel(config) as ep:
        # Rounds before and after a resume, and after a sleep. Nothing comes from an empty seat.
        for seed in range(4):
            tokens = make_tokens(config, 0, 5, seed=seed)
            d = ep.dispatch(*given(ep, tokens), tag=1)
            assert_y(ep.combine(times_slots(d, gain_eD[ep.logical_experts(1)]), d), config, tokens)
            assert d.recv.counts[1:].tolist() == [0, 0]
            if seed == 1:
                ep.resume()
            elif seed == 2:
                ep.sleep()
                ep.wake()
        assert (
            ep.capture_is_valid(0)
            and ep.generation == 2
            and len(ep.health().rows_sent) == ep.size == 1
        )


def test_what_differs_where_a_graph_is_of_an_earlier_group():
    with epmoe.ExpertParallel(
        make_config(1, experts=4, top_k=2, max_ranks=3, placement=LIVE)
    ) as ep:
        exchange = ep.exchange
        assert isinstance(exchange, NodeExchange)
        exchange._addresses.left.add(exchange.plan.sizes | {"M": 8, "num_local_experts": 2})
        # As kernels report it.
        exchange.status.epoch = 0
        exchange.status.code = constant("kOutdated")
        with pytest.raises(
            EPStateError,
            match=r"most tokens of a rank \(M\) 8, not 16, experts of this rank 2, not 4",
        ):
            ep.poll()
        ep.poll()
