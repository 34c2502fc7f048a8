"""`topology.max_ranks`: rounds of a group with empty seats agree with the dense layer, and errors
name ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exchanges import assert_y, gains, given, make_tokens, poison
from slot_tables import times_slots

from epmoe import EPAbortedError, EPMismatchError, ExpertParallel
from epmoe.live.tables import tables

E = 6
S = 4
EMPTY_SEATS = 2


@pytest.fixture
def seated(make_ep: Callable[..., ExpertParallel], size: int) -> Callable[..., ExpertParallel]:
    """Makes groups with empty seats."""
    placement = {"live": True, "slots_per_rank": S, "staging_mb": 1}
    return lambda **options: make_ep(
        experts=E, top_k=3, max_ranks=size + EMPTY_SEATS, placement=placement, **options
    )


def rows_of_slots(ep: ExpertParallel) -> torch.Tensor:
    """[S, D] on the device: what the expert of each slot multiplies by."""
    gain_eD = gains(ep.config, ep.config.model.hidden_size)[
        [max(expert, 0) for expert in ep.logical_experts(1)]
    ]
    return gain_eD.to(ep.device)


@pytest.mark.parametrize("ll_max_tokens", [0, 4, 1024])
def test_rounds_with_empty_seats(seated, rank, size, ll_max_tokens):
    """Sources of both protocols meet."""
    ep = seated(ll_max_tokens=ll_max_tokens)
    gain_eD = rows_of_slots(ep)
    assert (ep.rank, ep.size) == (rank, size) and ep.memory_plan().sizes["R"] == size + EMPTY_SEATS
    # Rounds of different lengths.
    for seed in range(4):
        tokens = make_tokens(ep.config, rank, (3 + 2 * rank, 9, 16, 0)[seed], seed=seed)
        poison(ep)
        d = ep.dispatch(*given(ep, tokens), tag=1)
        y = ep.combine(times_slots(d, gain_eD), d)
        ep.check()
        assert_y(y, ep.config, tokens)
        assert d.recv.counts.shape == (size + EMPTY_SEATS,) and not d.recv.counts[size:].any()
    # Counts name ranks.
    health = ep.health()
    assert len(health.rows_sent) == len(health.waited_s) == len(health.aborted_rounds) == size


@pytest.mark.parametrize("ll_max_tokens", [4, 1024])
def test_slabs_of_empty_seats_are_padding(seated, rank, size, ll_max_tokens):
    ep = seated(ll_max_tokens=ll_max_tokens)
    R = size + EMPTY_SEATS
    M = ep.config.capacity.max_num_tokens_per_rank
    tokens = make_tokens(ep.config, rank, 7, seed=3)
    d = ep.dispatch(*given(ep, tokens), layout="rank", tag=1)
    assert d.recv.x.shape[:2] == d.recv.ids.shape[:2] == (R, M)
    # Slabs behind those of ranks have the sentinel and zeros.
    counts = d.recv.counts.tolist()
    ids = d.recv.ids.cpu()
    weights = d.recv.weights.cpu()
    assert not any(counts[size:]) and not weights[size:].any()
    assert len(sentinel := ids[size:].unique()) == 1 and int(ep.expert_map[int(sentinel)]) == -1
    # The sums of experts on slabs.
    local = ep.expert_map[d.recv.ids.long()].long()
    weights = d.recv.weights.where(local >= 0, 0)[..., None]
    factor = (rows_of_slots(ep)[local.clamp(min=0)] * weights).sum(2)
    y = ep.combine_partial(d.recv.x * factor.to(d.recv.x.dtype), d)
    ep.check()
    assert_y(y, ep.config, tokens)


def test_copies_share_as_without_empty_seats(seated, rank, size):
    """From empty seats no tokens come, so that sources are as many as ranks."""
    ep = seated()
    loads = torch.tensor([[9.0, 1.0, 4.0, 1.0, 1.0, 1.0]])
    ep.share(loads)
    ep.apply()
    table = ep.exchange.views["table.copies"].cpu()
    most = ep.config.placement.most_copies
    assert torch.equal(table, tables(ep.slots, loads.double(), rank, size, most, table.shape[-1]))


def test_errors_name_ranks(seated, rank, size):
    ep = seated(exchange={"on_abort": "raise"})
    tokens = given(ep, make_tokens(ep.config, rank, 5, seed=1))
    d = ep.dispatch(*tokens, tag=1)
    # The last rank gives a round up,
    if rank == size - 1:
        ep.abort()
    else:
        with pytest.raises(EPAbortedError) as aborted:
            ep.combine(d.rows, d)
            ep.check()
        assert aborted.value.ranks == [size - 1]
    # and the first one brings a smaller D.
    with pytest.raises(EPMismatchError) as mismatch:
        hidden = 16 if rank == 0 else ep.config.model.hidden_size
        d = ep.dispatch(tokens[0][:, :hidden].contiguous(), *tokens[1:], tag=1)
        ep.check()
    assert mismatch.value.differing_ranks == [r for r in range(size) if (r == 0) != (rank == 0)]
    assert ep.survivors() == list(range(size))
