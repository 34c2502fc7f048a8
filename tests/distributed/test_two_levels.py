"""Ranks of one machine as nodes of several: the rail between nodes, and the exchange of one node
inside each.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from exchanges import (
    assert_round,
    assert_y,
    first_round,
    given,
    make_tokens,
    quantized,
    run_experts,
    run_round,
)
from factors import all_pairs
from helpers import RANKS_SHARE_GPUS
from waits import LONG_S, SHORT_S, SOON_S, ctrl_c

import epmoe
from epmoe.rail.gloo import GlooRail
from epmoe.rail.opening import RAILS
from epmoe.rail.rail import Transfer

# More on GPUs: test_two_levels_cuda.py.
ON_THE_CPU = pytest.mark.parametrize("device", [torch.device("cpu")])
PLACEMENTS = {
    "linear": {},
    "round_robin": {"strategy": "round_robin", "num_redundant_experts": 3},
    "explicit": {"strategy": "explicit", "assignment": [3, 1, 2, 0, 0, 1, 3, 2, 2, 1, 0, 3, 3]},
}


CASES = all_pairs(
    {
        "ranks_per_node": [1, 2, 4],  # on GPUs always half of the ranks
        "ll_max_tokens": [8, 256],
        "placement": [*PLACEMENTS],
        "layout": ["expert", "rank"],
        "payload": ["auto", "fp8", "fp8 rows"],  # the last: quantized by the caller
    }
)


def check_nodes(device: torch.device, size: int) -> None:
    """Skips the test where the ranks make no two nodes."""
    if device.type == "cpu" and size != 4:
        pytest.skip("needs 4 ranks: torchrun --nproc-per-node 4 -m pytest")
    if device.type == "cuda" and size not in (2, 4):
        pytest.skip("needs 2 or 4 ranks: docs/testing.md")
    if device.type == "cuda" and RANKS_SHARE_GPUS and "NCCL_HOSTID" not in os.environ:
        why = "NCCL takes ranks that share a GPU only if these have host ids of their own"
        pytest.skip(f"{why}: tests/two_gpu_nodes.sh")


@pytest.fixture(autouse=True)
def _two_nodes(device: torch.device, size: int) -> None:
    check_nodes(device, size)


@pytest.fixture
def half(size: int) -> int:
    """Ranks of each of two nodes."""
    return size // 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_against_the_dense_reference(make_ep, rank, size, device, half, case):
    """Without a barrier between rounds; some ranks have no token; and every round twice, with the
    same bits.
    """
    ranks_per_node = case["ranks_per_node"] if device.type == "cpu" else half
    if ranks_per_node > int(os.environ["LOCAL_WORLD_SIZE"]):
        pytest.skip("the ranks of a node must be on one machine")
    # Owners of a table are ranks of this size.
    placement = dict(PLACEMENTS[case["placement"]])
    if "assignment" in placement:
        placement["assignment"] = [owner % size for owner in placement["assignment"]]
    payload, _, by_caller = case["payload"].partition(" ")
    options = {
        "hidden": 256 if payload == "fp8" else 72,
        "dtype": "bfloat16",
        "placement": placement,
    }
    # One group for all rounds.
    ep = make_ep(
        case["ll_max_tokens"],
        ranks_per_node=ranks_per_node,
        exchange={"payload": payload},
        **options,
    )
    # Rounds of all, some and no tokens, each twice.
    for n in range(6):
        T = (16, 5 * rank % 17, 0, 7 * (rank % 2), 1, 16 - rank)[n]
        kind = ("uniform", "zipf", "adversarial")[n % 3]
        tokens = make_tokens(ep.config, rank, T, seed=n, kind=kind, padded=n % 2)
        x, scales = quantized(tokens.x) if by_caller else (tokens.x, None)
        call = replace(tokens, x=x), case["layout"], tokens.real, scales
        first, second = (run_round(ep, *call) for _ in range(2))
        assert_y(first, ep.config, tokens)
        assert torch.equal(first, second)
    ep.check()


def test_fp8_rows_return_in_the_dtype_of_the_config(make_ep, rank, half):
    ep = make_ep(ranks_per_node=half, hidden=256, dtype="float32", exchange={"payload": "fp8"})
    x, ids, weights = given(ep, tokens := make_tokens(ep.config, rank, 3))
    with pytest.raises(TypeError, match=r"`x` must be float32 \[T, D\], got bfloat16"):
        ep.dispatch(x.bfloat16(), ids, weights)
    assert_round(ep, tokens)


@pytest.mark.parametrize("nodes", [2, 4])
def test_at_most_so_many_tokens(make_ep, rank, size, device, nodes):
    """A slab of as many slots as the call has tokens is enough, and no slab is longer than S."""
    ep = make_ep(ranks_per_node=size // (nodes if device.type == "cpu" else 2))
    tokens = make_tokens(ep.config, rank, 1)
    # Slabs of so many slots.
    for n, rows in ((1, 1), (5, 5), (16, 16), (17, 16), (None, 16)):
        with ep.at_most(n):
            assert_round(ep, tokens)
            assert ep.exchange.slabs.slab_rows == rows
    # What is no number of tokens, and more tokens than there is room for.
    for n in (-1, True, 2.0):
        with (
            pytest.raises(ValueError, match="`tokens` must be an int of at least 0"),
            ep.at_most(n),
        ):
            pass
    with pytest.raises(ValueError, match="`x` has 17 tokens"):
        ep.dispatch(*given(ep, make_tokens(ep.config, rank, 17)))
    assert_round(ep, tokens)


def test_more_rows_for_a_node_than_its_slab_holds(make_ep, rank, half):
    """All tokens want experts of both nodes. The tokens past S are dropped, counted, and named."""
    options = {"capacity": {"max_rows_per_node": 5}}
    ep = make_ep(ranks_per_node=half, experts=8, top_k=2, **options)
    tokens = make_tokens(ep.config, rank, 9)
    tokens.ids[:] = torch.tensor([1, 6])
    # Four of nine tokens have no room.
    with pytest.raises(
        epmoe.EPOverflowError, match="9 rows for one node, but capacity.max_rows_per_node is 5"
    ):
        run_round(ep, tokens)
        ep.check()
    ep.check()
    assert ep.health().dropped_pairs == 8
    # Five have, also where no more are said to come.
    few = make_tokens(ep.config, rank, 5)
    assert_round(ep, few)
    with ep.at_most(5):
        assert_round(ep, few)
    # A round with too many that is given up.
    ep.dispatch(*given(ep, tokens))
    ep.abort()  # what lacked slots leaves nothing behind
    assert_round(ep, few)


def test_counts_stay_at_the_source(make_ep, rank, half):
    ep = make_ep(ranks_per_node=half, experts=8, top_k=3)
    tokens = make_tokens(ep.config, rank, 4)
    tokens.ids[:] = torch.tensor([[1, 1, 6], [99, 8, -1], [0, 7, 2], [5, 5, 5]])
    tokens.weights[2] = torch.tensor([torch.nan, 1.0, torch.inf])
    run_round(ep, tokens)
    health = ep.health()
    assert (health.duplicate_ids, health.out_of_range_ids, health.nonfinite_weights) == (3, 1, 2)
    assert health.rounds == 1 and health.dropped_pairs == 0


@pytest.mark.parametrize("after", ["dispatch_send", "dispatch_recv", "combine_send"])
@pytest.mark.parametrize(
    "options", [{}, {"layout": "rank"}, {"apply_router_weight_on_input": True}]
)
def test_abort_between_phases(make_ep, rank, size, half, after, options):
    """On every rank, then on the last one alone: the round is closed, and the next round is
    complete.
    """
    ep = make_ep(ranks_per_node=half)
    for n in range(3):
        tokens = make_tokens(ep.config, rank, 16 - rank, seed=n)
        x, ids, weights = given(ep, tokens)
        # Some go on to the phase behind which it ends, and all others to the end of the round.
        handle = ep.dispatch_send(x, ids[:, :1], weights[:, :1], **options)
        gives_up = n == 0 or rank == size - 1
        if not gives_up or after != "dispatch_send":
            handle = ep.dispatch_recv(handle)
            rows = handle.recv.x if handle.layout == "rank" else handle.rows
        if not gives_up or after == "combine_send":
            ep.combine_send(rows, handle)
        ep.abort(handle) if gives_up else ep.combine_recv(handle)
        # The next one is complete.
        assert_round(ep, tokens)
    ep.check()


@ON_THE_CPU
@pytest.mark.parametrize("wires", [{}, {"payload": "fp8"}, {"combine_payload": "fp8"}])
def test_ranks_that_disagree_hear_of_it(make_ep, rank, wires):
    """On every rank of every node, in the same round, which is closed. The next round
    is complete.
    """
    ep = make_ep(ranks_per_node=2, hidden=256, dtype="bfloat16", exchange=wires)
    tokens = make_tokens(ep.config, rank, 6)
    x, ids, weights = given(ep, tokens)
    K = 3 if rank == 0 else 4
    with pytest.raises(epmoe.EPMismatchError, match="experts per token") as error:
        ep.dispatch(x, ids[:, :K], weights[:, :K])
    assert error.value.differing_ranks
    # on this rail; the ranks of the other one learn it within their nodes
    name = "experts per token (K)"
    assert error.value.differences == {0: {name: (3, 4)}, 2: {name: (4, 3)}}.get(rank, {})
    assert_round(ep, tokens)


@ON_THE_CPU
@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("padded", [(4, 4, 16, 16), (3, 16, 5, 3), (16, 16, 16, 1)])
def test_slabs_of_other_lengths_are_a_mismatch(make_ep, rank, padded, ranks_per_node):
    ep = make_ep(ranks_per_node=ranks_per_node)
    tokens = make_tokens(ep.config, rank, 1)
    for _ in range(2):
        with pytest.raises(epmoe.EPMismatchError) as error, ep.at_most(padded[rank]):
            ep.dispatch(*given(ep, tokens))
        # The error names both lengths, but where a rank has heard of it from its node alone.
        first, *_ = error.value.differing_ranks
        mine, theirs = error.value.differences.get("at_most", (padded[rank], padded[first]))
        assert (mine, theirs) == (padded[rank], padded[first])
        assert (
            error.value.differences
            or ranks_per_node == 2
            and padded[rank] == padded[(rank + 2) % 4]
        )
        assert_round(ep, tokens)


@ON_THE_CPU
@pytest.mark.parametrize("aborting", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_an_abort_beside_a_mismatch(make_ep, rank, aborting):
    """Rank 0 brings shorter rows and fewer experts a token. Ranks that give up cannot know; the
    others raise.
    """
    ep = make_ep(ranks_per_node=2, hidden=256, timeout_s=30.0, exchange={"on_abort": "raise"})
    # Rank 3 meets none but ranks that give up.
    errors = (epmoe.EPMismatchError, epmoe.EPAbortedError)[: 1 + (aborting == (1, 2))]
    tokens = make_tokens(ep.config, rank, 16)
    x, ids, weights = given(ep, tokens)
    D, K = (128, 3) if rank == 0 else (256, 4)
    call = x[:, :D], ids[:, :K], weights[:, :K]
    for _ in range(2):
        if rank in aborting:
            ep.dispatch_send(*call)
            ep.abort()
        else:
            with pytest.raises(errors):
                d = ep.dispatch(*call)
                ep.combine(d.rows, d)
        assert_round(ep, tokens)


@ON_THE_CPU
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_around_the_start_of_a_transfer(make_ep, rank, monkeypatch, behind, number):
    """The round can be given up, and the rail stays in step. The transfers: rows, sums."""

    class Interrupted(GlooRail):
        starts = 0

        def start(self, transfer: Transfer) -> None:
            self.starts += 1
            now = rank == 0 and self.starts == number + 1
            if behind or not now:
                super().start(transfer)
            if now:
                raise KeyboardInterrupt

    monkeypatch.setitem(RAILS, "interrupted", Interrupted)
    # Rank 0 gives the round up; the others get through it.
    ep = make_ep(ranks_per_node=2, timeout_s=30.0, exchange={"rail": "interrupted"})
    tokens = make_tokens(ep.config, rank, 9)
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            run_round(ep, tokens)
        ep.abort()
    else:
        run_round(ep, tokens)
    # The next one is complete.
    few = make_tokens(ep.config, rank, 2, seed=1)
    with ep.at_most(2):
        assert_round(ep, few)


@ON_THE_CPU
def test_a_false_word_names_no_rank(make_ep, rank):
    """A word that says which rank is missing counts only if there is such a rank."""
    ep = make_ep(ranks_per_node=2, timeout_s=SHORT_S)
    tokens = first_round(ep, 9)
    dist.barrier()
    ep.exchange.views["rail.missed"][:] = torch.tensor([2**40, -(2**40)])
    if rank != 2:
        with pytest.raises(epmoe.EPTimeoutError) as error:
            ep.dispatch(*given(ep, tokens))
        assert error.value.missing_ranks == [2]
        assert ep.survivors() == [0, 1, 3]
    dist.barrier()


def assert_named(ep: epmoe.ExpertParallel, error: epmoe.EPTimeoutError, begin: float) -> None:
    """Every rank names the first rank of the second node, in time and in every later call."""
    victim = ep.size // 2
    assert time.monotonic() - begin < SOON_S
    assert error.missing_ranks == [victim], error
    assert re.search(rf"rank\(s\) \[{victim}\] of the group.*\(1, 0\)", str(error))
    for call in (ep.poll, ep.check):
        with pytest.raises(epmoe.EPTimeoutError, match=rf"\[{victim}\]"):
            call()
    assert ep.survivors() == [rank for rank in range(ep.size) if rank != victim]


def meet() -> None:
    """Every rank is here. On the host: a barrier of GPUs would wait for what this rank
    has queued.
    """
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("stage", ["dispatch", "combine", "leaves"])
def test_a_rank_of_another_node_that_stays_away_is_named(make_ep, rank, device, half, stage):
    """Or that leaves with a round open, which ends the waits of all ranks of all nodes before their
    deadline.
    """
    if stage == "leaves" and device.type == "cuda":
        pytest.skip("on GPUs tests/distributed/test_mistakes.py has it, on one node")
    timeout_s = LONG_S if stage == "leaves" else SHORT_S
    ep = make_ep(ranks_per_node=half, timeout_s=timeout_s)
    tokens = first_round(ep, 6)
    d = ep.dispatch(*given(ep, tokens)) if stage != "dispatch" else None
    ep.check()
    meet()
    # One rank leaves, or does nothing.
    if rank == half and stage == "leaves":
        ep.close()
    # All others name it.
    if rank != half:
        begin = time.monotonic()
        with pytest.raises(epmoe.EPTimeoutError) as error:
            d = d or ep.dispatch(*given(ep, tokens))
            ep.combine(run_experts(ep, d), d)
            ep.check()
        assert_named(ep, error.value, begin)
    meet()


@ON_THE_CPU
def test_whole_nodes_go_on(make_ep, rank):
    """Without the second node; a node without one of its ranks is refused, and the group is still
    good.
    """
    ep = make_ep(ranks_per_node=2)
    tokens = first_round(ep, 6)
    three = dist.new_group([0, 1, 2])
    two = dist.new_group([0, 1])
    # A node with one rank of two.
    if rank < 3:
        with pytest.raises(
            ValueError,
            match="`topology.ranks_per_node` must be a divisor of `topology.ep_size` = 3",
        ):
            ep.resume(three, ep.placement.without([3], spread_lost=True))
    assert_round(ep, tokens)
    # A whole node.
    if rank < 2:
        ep.resume(two, ep.placement.without([2, 3], spread_lost=True))
        assert_round(ep, tokens)
    dist.barrier()


@ON_THE_CPU
@pytest.mark.parametrize("stage", ["dispatch_recv", "combine_recv", "dispatch", "combine"])
@pytest.mark.parametrize("aborts", [False, True])
def test_a_wait_for_the_network_that_ctrl_c_ends(make_ep, rank, stage, aborts):
    """It can be taken up again, or the round given up; the next round is complete. Rank 0 waits for
    rank 2.
    """
    ep = make_ep(ranks_per_node=2, timeout_s=LONG_S)
    tokens = make_tokens(ep.config, rank, 9)
    waits = rank == 0
    aborts = aborts or stage == "dispatch"
    d = ep.dispatch(*given(ep, tokens)) if stage.startswith("combine") else None
    # Rank 0 comes to its wait, is interrupted, and may give the round up.
    if waits:
        sent = ep.dispatch_send(*given(ep, tokens)) if stage == "dispatch_recv" else None
        rows = run_experts(ep, d) if d else None
        if stage == "combine_recv":
            ep.combine_send(rows, d)
        calls = {
            "dispatch": lambda: ep.dispatch(*given(ep, tokens)),
            "dispatch_recv": lambda: ep.dispatch_recv(sent),
            "combine": lambda: ep.combine(rows, d),
            "combine_recv": lambda: ep.combine_recv(d),
        }
        with ctrl_c():
            calls[stage]()
        if aborts:
            ep.abort()
    dist.barrier()
    # All others end the round, and so does rank 0 if it has not given it up.
    if not (waits and aborts):
        d = d or (ep.dispatch_recv(sent) if waits else ep.dispatch(*given(ep, tokens)))
        returning = waits and stage.startswith("combine")
        y = ep.combine_recv(d) if returning else ep.combine(run_experts(ep, d), d)
        if not aborts:
            assert_y(y, ep.config, tokens)
    assert_round(ep, tokens)
