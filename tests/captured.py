"""Rounds that a rank captures in one group and replays in later ones: on GPUs as a CUDA graph.

On the CPU a replay calls the operators again, with the arguments of then.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from exchanges import assert_y, given, make_tokens
from helpers import poison_
from slot_tables import times_slots
from torch import Tensor

from epmoe import EPStateError, ExpertParallel
from epmoe.exchange.round_state import CLOSED, DISPATCHED
from epmoe.native import ops


class Captured:
    """A round of each layer, with the addresses of the group that captured it. `rows` [L, slots, D]
    are weights.
    """

    def __init__(self, ep: ExpertParallel, tags: Sequence[int], rows: Tensor) -> None:
        """For the other ranks these are rounds like all others."""
        self.generation = ep.generation
        self.tags = tags
        self.rows = rows.clone()
        self.tokens = make_tokens(ep.config, ep.rank, 5 + ep.rank, seed=11)
        self.inputs = given(ep, self.tokens)
        self.memory = ep.exchange.memory
        self.graph = None
        self._play(ep)
        if ep.device.type == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._play(ep)

    def replay(self, ep: ExpertParallel, rows: Tensor) -> None:
        """With the weights of now. The caller checks `ep` before it looks at sums."""
        self.rows.copy_(rows)
        for y in self.sums:
            poison_(y)
        # A graph, or its operators again with the arguments of the capture.
        if self.graph is not None:
            return self.graph.replay()
        for tag, d, y, rows_SD in zip(self.tags, self.rounds, self.sums, self.rows, strict=True):
            memory = *self.memory, d.sent.descriptor
            ep.exchange.rounds.progress.tag = tag
            ep.exchange.launch(
                ops.dispatch, (*self.inputs, None, None, d.num_tokens, *memory), DISPATCHED
            )
            ep.exchange.launch(ops.combine, (y, times_slots(d, rows_SD), *memory), CLOSED)

    def assert_right(self, ep: ExpertParallel) -> None:
        """The sums agree with the dense layer."""
        for tag, y in zip(self.tags, self.sums, strict=True):
            assert_y(y / 2.0**tag, ep.config, self.tokens)

    def is_outdated(self, ep: ExpertParallel) -> bool:
        """Whether a replay is to be told. Where this rank's window has another place, nobody may:
        our experts read all rows, also those of no token.
        """
        lies_there = self.memory[0].data_ptr() == ep.exchange.memory[0].data_ptr()
        return self.graph is not None and lies_there and not ep.capture_is_valid(self.generation)

    def assert_told(self, ep: ExpertParallel) -> None:
        """A replay does nothing, and `poll` tells it."""
        for y in self.sums:
            poison_(y)
        self.graph.replay()
        torch.cuda.current_stream().synchronize()
        assert not any(y.any() for y in self.sums)
        with pytest.raises(EPStateError, match="captured in an earlier group"):
            ep.poll()
        ep.poll()

    def _play(self, ep: ExpertParallel) -> None:
        self.rounds = []
        self.sums = []
        for tag, rows_SD in zip(self.tags, self.rows, strict=True):
            d = ep.dispatch(*self.inputs, tag=tag)
            self.rounds.append(d)
            self.sums.append(ep.combine(times_slots(d, rows_SD), d))
