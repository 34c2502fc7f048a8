"""A step of all ranks succeeds on all or fails on all, wherever a signal handler raises on one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Container
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_y, make_tokens, run_round
from helpers import ON_THE_CPU, Interrupted, interrupted_at

import epmoe
from epmoe.group import collective, join, peers, waiting
from epmoe.group.peers import Peers

OF_STEPS = frozenset(
    module.__file__ for module in (collective, contextlib, join, peers, waiting)
) | {epmoe.service.__file__}
"""Files in which a rank is between the first line of a step and its outcome."""


def outcomes_agree(
    rank: int, step: Callable[[], Any], event: int, files: Container[str | None] = OF_STEPS
) -> tuple[bool, list[str]]:
    """Run a step on all ranks, on rank 1 with an exception behind this many events.

    Returns whether that was before its end, and what the step returned or raised on each rank.
    """
    came = False
    try:
        if rank == 1:
            with interrupted_at(event, files) as interrupts:
                step()
            came = interrupts.came
        else:
            step()
        outcome = "whole"
    except Exception as error:
        outcome = type(error).__name__
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, (came, outcome))
    return everybodys[1][0], [outcome for _, outcome in everybodys]


def test_together_wherever_a_handler_raises(rank):
    """The other ranks have the outcome of rank 1: its `then` has run, or they raise its error."""
    ranks = Peers.of(dist.group.WORLD, 20.0)
    for event in itertools.count():
        done: list[str] = []

        def step(done: list[str] = done) -> None:
            with ranks.together(lambda: done.append("then")):
                # A long value takes two gathers.
                assert ranks.all_gather("x" * 5000 * (rank + 1))[1] == "x" * 10000

        came, outcomes = outcomes_agree(rank, step, event)
        everybodys: list[Any] = [None] * len(outcomes)
        dist.all_gather_object(everybodys, done)
        assert all(each == everybodys[0] for each in everybodys), (event, everybodys)
        others = outcomes[:1] + outcomes[2:]
        if everybodys[0]:
            assert set(others) == {"whole"}, (event, outcomes)
        else:
            assert set(others) == {"RuntimeError"}, (event, outcomes)
        if not came:
            break
    assert event > 30


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, Interrupted])
def test_any_exception_of_a_step_is_reported(rank, raised):
    ranks = Peers.of(dist.group.WORLD, 20.0)
    expected = raised if rank == 1 else RuntimeError
    with pytest.raises(expected) as caught, ranks.together():
        if rank == 1:
            raise raised
    if rank != 1:
        assert str(caught.value).startswith(f"rank 1: {raised.__name__}")
    assert ranks.all_gather(rank) == list(range(ranks.size))


@ON_THE_CPU
@pytest.mark.slow
def test_wake_wherever_a_handler_raises(ep, rank):
    """Rank 1 calls again, as docs/graphs.md says; the others are awake, or call again, too."""
    tokens = make_tokens(ep.config, rank, 9)
    for event in itertools.count():
        ep.sleep()
        came, outcomes = outcomes_agree(rank, ep.wake, event)
        if ep.asleep:
            ep.wake()
        elif rank == 1 and ep._exchange is None:
            pytest.fail(f"rank 1 has left at event {event}: {outcomes}")
        assert_y(run_round(ep, tokens), ep.config, tokens)
        if not came:
            break
    assert event > 100


@ON_THE_CPU
@pytest.mark.slow
def test_an_adapter_wherever_a_handler_raises(make_ep, rank):
    """All ranks have the adapter, or nobody."""
    ep = make_ep(dtype="float32", experts=4 * dist.get_world_size())
    D = ep.config.model.hidden_size
    F = 32
    e = ep.num_local_experts
    E = ep.config.model.num_experts
    weights = torch.zeros(e, 2 * F, D), torch.zeros(e, D, F)
    experts = epmoe.GroupedExperts(*weights).requires_grad_(False)
    layer = epmoe.MoELayer(ep, torch.zeros(E, D), experts, adapters=epmoe.Adapters(2, 4))
    adapter = epmoe.LoRA((torch.ones(E, 4, D), torch.ones(E, 2 * F, 4)), None)
    for event in itertools.count():
        layer.put_adapter(0, None)
        came, _ = outcomes_agree(rank, lambda: layer.put_adapter(0, adapter), event)
        holds = any(bool(buffer.abs().sum()) for buffer in layer.adapters.buffers())
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, holds)
        assert len(set(everybodys)) == 1, (event, everybodys)
        if not came:
            break
    assert event > 30
