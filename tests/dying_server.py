"""examples/serve.py, of which ranks kill themselves in a state that the first argument names; see
`STATES`.

In the state "raises" they live: the model raises where a prompt begins with the token POISON.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import serve
import serve_front
import serve_rank
import torch
import torch.distributed as dist
import torch.nn.functional as F

import epmoe
import epmoe.life.life
from epmoe.group.board import Meeting

STEP = 10  # in which a rank dies first
POISON = 13


def patch(
    owner, name: str, dies: int | Callable[..., bool], behind: bool = False, number=signal.SIGKILL
) -> None:
    """This process kills itself in a call, at its begin or `behind` it: in the n-th one, or where
    `dies` says so.
    """
    original = getattr(owner, name)
    calls = count(1)

    def patched(*arguments, **options):
        result = original(*arguments, **options) if behind else None
        if dies(*arguments) if callable(dies) else next(calls) == dies:
            signal.raise_signal(number)
        return result if behind else original(*arguments, **options)

    setattr(owner, name, patched)


def moving(balancer: epmoe.Balancer) -> bool:
    moves = balancer._ep.live.moves
    return moves is not None and not moves.done


def first(folder: str, name: str) -> bool:
    """Whether no other process has asked for this name."""
    try:
        Path(folder, name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def step_ends(**options) -> None:
    patch(serve_rank.Rank, "step", STEP, **options)


# By state, what the first ones to die do, and what a first new rank, or another old one does while
# a new one joins. A new rank opens a group of one before it joins. An old one has opened its first
# group, and that of `recover`.
STATES = {
    "before": (step_ends, None, None),
    # A layer calls `serve` of its experts.
    "in": (lambda: patch(epmoe.GroupedExperts, "serve", serve_rank.BLOCKS * STEP), None, None),
    "after": (partial(step_ends, behind=True), None, None),
    "moving": (lambda: patch(epmoe.Balancer, "tick", moving, behind=True), None, None),
    "hangs": (partial(step_ends, number=signal.SIGSTOP), None, None),
    "new-waits": (step_ends, lambda: patch(Meeting, "decision", 1), None),
    "new-forms": (step_ends, lambda: patch(Meeting, "connect", 1), None),
    "new-connects": (step_ends, lambda: patch(dist, "init_process_group", 1), None),
    "new-opens": (step_ends, lambda: patch(epmoe.ExpertParallel, "__init__", 2), None),
    "new-maps": (step_ends, lambda: patch(epmoe.life.life, "open_exchange", 2), None),
    "new-hangs": (step_ends, lambda: patch(Meeting, "connect", 1, number=signal.SIGSTOP), None),
    "new-steps": (step_ends, lambda: patch(serve_rank.Rank, "step", 1), None),
    "old-decides": (step_ends, None, lambda: patch(epmoe, "resize", 1)),
    "old-forms": (step_ends, None, lambda: patch(Meeting, "connect", 2)),
    "old-connects": (step_ends, None, lambda: patch(dist, "init_process_group", 3)),
    "old-opens": (step_ends, None, lambda: patch(epmoe.life.life.Life, "go_on", 2)),
    "old-maps": (step_ends, None, lambda: patch(epmoe.life.life, "open_exchange", 3)),
    "two": (step_ends, None, None),
    "two-new-opens": (step_ends, lambda: patch(epmoe.ExpertParallel, "__init__", 2), None),
}


def victims(state: str) -> set[int]:
    """The ranks that die first."""
    return {1, 2} if state.startswith("two") else {1}


class Poison:
    """Patches torch: the second attention of a step raises where a prompt begins with POISON."""

    def __init__(self) -> None:
        self.attentions_left = 0
        self.embedding = F.embedding
        self.attention = F.scaled_dot_product_attention
        F.embedding = self.look
        F.scaled_dot_product_attention = self.attend

    def look(self, tokens: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        if (tokens[..., 0] == POISON).any():
            self.attentions_left = 2
        return self.embedding(tokens, *arguments, **options)

    def attend(self, *arguments: object, **options: object) -> torch.Tensor:
        if self.attentions_left:
            self.attentions_left -= 1
            if not self.attentions_left:
                raise ValueError("a poisoned prompt")
        return self.attention(*arguments, **options)


def run_rank(state: str, pipe, folder: str, rank: int | None, size: int, *options: object) -> None:
    dies, new, old = STATES.get(state, (None, None, None))
    if state == "raises":
        Poison()
    elif rank in victims(state):
        dies()
    elif rank == 0 and old is not None:
        old()
    elif rank is None and new is not None and first(folder, "new"):
        new()
    original_run_rank(pipe, folder, rank, size, *options)


original_run_rank = serve_rank.run_rank
if __name__ == "__main__":
    serve_front.run_rank = partial(run_rank, sys.argv.pop(1))
    serve.main()
