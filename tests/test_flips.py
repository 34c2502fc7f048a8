"""A flip to a version that a signal handler interrupts is done again by the next `tick`, wherever
that was.
"""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch
from helpers import alone, full_layer, randn

from epmoe import ExpertParallel, WeightReceiver, WeightSender
from epmoe.exchange import cpu
from epmoe.live import flip_words, receiver, versions

FILES = {module.__file__ for module in (cpu, flip_words, receiver, versions)}


class Interrupted(Exception):
    """What a signal handler raises."""


def interrupt_at(line: int) -> list[int]:
    """Raises `Interrupted` before the line of this number that runs in the receiver; how many are
    left.
    """
    left = [line]

    def trace(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                raise Interrupted
        return trace

    sys.settrace(trace)
    return left


@torch.inference_mode()
@pytest.mark.parametrize("spare", [True, False])
def test_a_flip_that_is_interrupted_anywhere_is_done_again(tmp_path, spare):
    folder = tmp_path / "versions"
    line = 0
    version = 0
    with ExpertParallel(alone()) as ep:
        sent = full_layer(ep)[0]
        served = full_layer(ep)[0]
        sender = WeightSender(sent, folder)
        weights = [*served.experts.parameters()]
        taken = []
        taker = WeightReceiver(
            ep, served, folder, spare=spare, dense=lambda dense: taken.append(int(dense["a"]))
        )

        def send() -> None:
            nonlocal version
            version += 1
            for weight in sent.experts.parameters():
                weight.fill_(version)
            sender.send(version, {"a": torch.tensor(version)})

        def served_until(number: int) -> None:
            while taker.version < number:
                taker._looked = 0.0
                taker.tick()
                assert taker.version < 1 or all(
                    weight.eq(taker.version).all() for weight in weights
                )
                served(randn(1, ep.config.model.hidden_size))

        send()
        served_until(1)

        # Interrupt the tick that flips at its first line, its second one, and so on to its end.
        while line >= 0:
            send()
            # A flip is to come.
            while not taker._flipped_behind < taker._words.glance[1] < ep.exchange.rounds.count - 1:
                taker._looked = 0.0
                taker.tick()
                served(randn(1, ep.config.model.hidden_size))
            try:
                interrupt_at(line)
                taker.tick()
                line = -2  # all of a tick has run
            except Interrupted:
                taker.tick()
            finally:
                sys.settrace(None)

            # The next tick does the flip again: one version, whole.
            line += 1
            assert taker.version == version == taken[-1]
            assert all(weight.eq(version).all() for weight in weights)

        # Later versions come as before.
        for _ in range(2):
            send()
            served_until(version)
        taker.close()
        assert version > 30
