"""A step of all ranks succeeds on all or fails on all, wherever a signal handler raises on one.

A handler that raises before a rank is in the step changes nothing: the rank may call again, and the
others still wait for it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist
from exchanges import assert_round, make_tokens
from helpers import ON_THE_CPU, Interrupted
from interrupted_steps import Handler, of_all, outcome_of, steps_until_whole
from waits import AT_ONCE_S

from epmoe.group.collective import all_ranks
from epmoe.group.peers import Peers


def test_together_wherever_a_handler_raises(rank):
    """The other ranks have the outcome of rank 1: its `then` has run, or they raise its error."""
    ranks = Peers.of(dist.group.WORLD, 20.0)
    done: list[str] = []

    def step(begun: Callable[[], None]) -> None:
        done.clear()
        with ranks.together(lambda: done.append("then")):
            begun()
            # A long value takes two gathers.
            assert ranks.all_gather("x" * 5000 * (rank + 1))[1] == "x" * 10000

    for outcomes in steps_until_whole(rank, step):
        others = set(outcomes[:1] + outcomes[2:])
        have_done = of_all(len(done))
        assert others == ({"whole"} if have_done[1] else {"RuntimeError"}), outcomes
        assert set(have_done) == {have_done[1]}
    assert set(outcomes) == {"whole"}


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


def test_the_group_of_a_checkpoint_wherever_a_handler_raises(rank, monkeypatch):
    """All ranks have made it, or none of them waits for one that has not."""
    # Note whether this rank has begun to make the group.
    made: list[None] = []
    new_group = dist.new_group

    def making(*arguments: object, **options: object) -> object:
        made.append(None)
        return new_group(*arguments, **options)

    monkeypatch.setattr(dist, "new_group", making)

    def step(begun: Callable[[], None]) -> None:
        begun()
        with all_ranks([]) as ranks, ranks.together():
            assert ranks.all_gather(rank) == list(range(ranks.size))

    def calls_again(begun: Callable[[], None]) -> None:
        """Nobody has heard of what is raised before: the others wait for this rank."""
        made.clear()
        try:
            step(begun)
        except Interrupted:
            if made:
                raise
            step(lambda: None)

    # A handler raises at the first line of a step, at the second one, and so on. No rank waits for
    # the deadline.
    start = time.monotonic()
    for outcomes in steps_until_whole(rank, calls_again):
        assert time.monotonic() - start < AT_ONCE_S, outcomes
        start = time.monotonic()
    assert set(outcomes) == {"whole"}


@ON_THE_CPU
@pytest.mark.slow
def test_wake_wherever_a_handler_raises(ep, rank):
    """All ranks call again until they are awake, as docs/graphs.md says. One that has begun to
    restore its weights leaves.
    """
    tokens = make_tokens(ep.config, rank, 9)
    for events in itertools.count():
        ep.sleep()
        # A handler raises on rank 1 once, after so many events.
        handler = Handler(events)
        arms = [handler.arm] if rank == 1 else []
        restores: list[str] = []

        def wake(arms: list[Callable[[], None]] = arms, restores: list[str] = restores) -> None:
            if arms:
                arms.pop()()
            ep.wake(lambda: restores.append("begun"))

        # All ranks call until they are awake, or one has left.
        while ep.asleep:
            outcome_of(wake)
        has_left = ep.life.opened is None
        assert not has_left or restores, f"rank {rank} has left: {events}"
        if any(of_all(has_left)):
            break
        assert_round(ep, tokens)
        # The call had fewer events: all places have had their turn.
        if not of_all(handler.has_raised)[1]:
            break
    assert events > 100
