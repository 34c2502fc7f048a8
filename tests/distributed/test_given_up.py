"""What the other ranks hear of a rank that gives a round up, leaves one out, or is in another layer.

Deadlines are 300 s here, so that a test which passes has not run into one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_y, first_round, given, make_tokens, run_experts, run_fused_experts, run_round
from helpers import ON_THE_CPU, full_layer
from test_exceptions import LONG_S, Fragile, without_rank
from test_layers import D, E, K

from epmoe import EPAbortedError, EPMismatchError, EPOverflowError, ExpertParallel, MoELayer

pytestmark = pytest.mark.usefixtures("serving")

RAISE = {"on_abort": "raise"}  # the default of the product, not of `make_ep`
GIVER = 1  # the rank that gives rounds up


@pytest.fixture
def ep(make_ep) -> ExpertParallel:
    return make_ep(timeout_s=LONG_S, exchange=RAISE)


def hears_of(ep: ExpertParallel, call: Callable[[], object], epoch: int) -> None:
    """`call` is a round that `GIVER` gives up. On GPUs the host may have to wait for the kernel."""
    with pytest.raises(EPAbortedError, match=rf"round {epoch}: rank\(s\) \[{GIVER}\] aborted the round") as caught:
        call()
        ep.check()
    assert (caught.value.ranks, caught.value.epoch) == ([GIVER], epoch)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("how", ["skip", "after dispatch_send", "after dispatch"])
def test_others_hear_of_it(ep, rank, size, how, layout):
    """The round is closed on all ranks, and the next one is whole."""
    tokens = first_round(ep, 9, layout)
    for n in (2, 4):
        if rank != GIVER:
            hears_of(ep, lambda: run_round(ep, tokens, layout), epoch=n)
        elif how == "skip":
            ep.skip()
        else:
            call = ep.dispatch if how == "after dispatch" else ep.dispatch_send
            ep.abort(call(*given(ep, tokens), layout=layout))
        assert_y(run_round(ep, tokens, layout), ep.config, tokens)
    ep.check()
    assert ep.health().aborted_rounds == [2 * (r == GIVER) for r in range(size)]


def test_a_rank_that_returned_its_sums_gave_nothing_up(ep, rank, size):
    if ep.config.topology.num_nodes > 1:
        pytest.skip("sums of other nodes have yet to travel")
    tokens = make_tokens(ep.config, rank, 9)
    d = ep.dispatch(*given(ep, tokens))
    ep.combine_send(run_experts(ep, d), d)
    if rank == GIVER:
        ep.abort()
    else:
        assert_y(ep.combine_recv(d), ep.config, tokens)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    assert ep.health().aborted_rounds == [0] * size


@ON_THE_CPU
@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_an_overflow_beside_an_abort_leaves_nothing_for_the_next_round(make_ep, rank, size, ranks_per_node):
    """One error tells of both."""
    options = {"timeout_s": LONG_S, "exchange": RAISE, "capacity": {"max_expert_rows": 4 * size}}
    ep = make_ep(experts=size, top_k=size, ranks_per_node=ranks_per_node, **options)
    tokens, few = make_tokens(ep.config, rank, 16), make_tokens(ep.config, rank, 2)
    for each in (tokens, few):
        each.ids[:] = torch.arange(size)  # so that all ranks get all rows
    for n in (1, 3):
        d = ep.dispatch(*given(ep, tokens))
        if rank == GIVER:
            ep.abort()
        else:
            with pytest.raises(EPOverflowError, match=f"needed {16 * size}") as caught:
                ep.combine(run_experts(ep, d), d)
            assert f"round {n}: rank(s) [{GIVER}] aborted the round" in caught.value.__notes__[0]
        assert_y(run_round(ep, few), ep.config, few)
    ep.check()


def test_zeros_only_count(make_ep, rank, size):
    ep = make_ep(timeout_s=LONG_S)
    tokens = make_tokens(ep.config, rank, 9)
    for _ in range(2):
        if rank == GIVER:
            ep.skip()
        else:
            assert_y(run_round(ep, tokens), ep.config, without_rank(ep, tokens, GIVER))
    ep.check()
    assert ep.health().aborted_rounds == [2 * (r == GIVER) for r in range(size)]


def raise_in_the_experts(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    layer.experts = Fragile(layer.experts)
    layer.experts.error = LookupError()
    return x


def return_too_few_columns(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    experts, layer.experts = layer.experts, torch.nn.Module()
    layer.experts.forward = lambda *inputs: experts(*inputs)[:, :-1]
    return x


@pytest.mark.parametrize(
    ("go_wrong", "error", "message", "sends"),
    [
        (raise_in_the_experts, LookupError, "", True),
        (return_too_few_columns, ValueError, "`expert_rows` must be", True),
        (lambda layer, x: x.double(), TypeError, "`x` must be", False),
        (lambda layer, x: x[:, 1:], ValueError, "`x` must be", False),
    ],
)
def test_a_layer_that_fails_on_one_rank(make_ep, rank, size, go_wrong, error, message, sends):
    """Its experts fail, or its call is refused. It keeps its error, and the others hear of it."""
    ep = make_ep(experts=E, top_k=K, hidden=D, timeout_s=LONG_S, exchange=RAISE)
    layer, _ = full_layer(ep)
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(rank)).to(ep.device)
    whole, twin, rows_sent = layer(x), copy.deepcopy(layer), ep.health().rows_sent
    if rank == GIVER:
        twin.tag = layer.tag
        with pytest.raises(error, match=message):
            twin(go_wrong(twin, x))
        assert sends or ep.health().rows_sent == rows_sent
    else:
        hears_of(ep, lambda: layer(x), epoch=2)
    assert torch.equal(layer(x), whole)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("tags", [(3, 4), (0, 32767), (511, 512), (127, 1151)])
def test_ranks_in_different_layers(make_ep, rank, size, tags, layout):
    """No rank gets rows of another layer: all hear of both tags, in every bit of which they may differ."""
    ep = make_ep(timeout_s=LONG_S, exchange=RAISE)
    tokens, (mine, other) = make_tokens(ep.config, rank, 9), (tags if rank == GIVER else tags[::-1])
    run = {"expert": (ep.combine, run_experts), "rank": (ep.combine_partial, run_fused_experts)}[layout]

    def tagged(tag: int) -> torch.Tensor:
        d = ep.dispatch(*given(ep, tokens), layout=layout, tag=tag)
        return run[0](run[1](ep, d), d)

    for tag in tags:
        assert_y(tagged(tag), ep.config, tokens)
    witness = next(r for r in range(size) if (r == GIVER) != (rank == GIVER))
    named = f"this rank's tag is {mine}, that of rank {witness} is {other}"
    if ep.config.topology.num_nodes > 1:  # a rank of another node may tell of it, which brings no rows then
        named = f"this rank's tag is {mine}, that of rank . is {other}|brought another"
    with pytest.raises(EPMismatchError, match=named):
        tagged(mine)
        ep.check()
    if ep.device.type == "cpu":
        assert_y(tagged(7), ep.config, tokens)
    dist.barrier()
