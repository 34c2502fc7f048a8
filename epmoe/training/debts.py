"""Both directions of an exchange, under a number, and what its backward passes owe the other ranks.

A pass that an exception ends leaves a round open, or rounds of other ranks without this rank. It then aborts the open
round, or takes part in the next one without tokens, so that the other ranks get an EPAbortedError and wait for nobody.
On GPUs, where the other hosts may have gone on, it takes part in all rounds of the pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from epmoe.exchange.round_state import CLOSED
from epmoe.group.errors import EPAbortedError, EPMismatchError, EPStateError, EPTimeoutError
from epmoe.native.opaque import Registry
from epmoe.service import ExpertParallel
from epmoe.training.rounds import Rounds, Skipped


class Directions:
    def __init__(self, forward: Rounds, backward: Rounds) -> None:
        self.forward = forward
        self.backward = backward
        self.number = _directions.add(self)
        self._owed = _owed.setdefault(backward.ep, Owed())

    @property
    def generation(self) -> int:
        """The generation of the group. Rows of one generation do not fit another."""
        return self.forward.ep.generation

    def check_generation(self, generation: int) -> None:
        if generation != self.generation:
            raise EPStateError("this backward pass belongs to a forward pass before `resume`, whose rows are gone")

    @contextmanager
    def numbering(self) -> Iterator[None]:
        """Within it a forward round opens, which `trained` numbers. Its backward round has this number as tag."""
        rounds = self.forward.exchange.rounds
        before = rounds.count
        try:
            yield
        except EPMismatchError:  # on all ranks, of which some may have counted no round, since they serve
            before = rounds.count
            raise
        finally:
            self.backward.exchange.rounds.trained += rounds.count - before

    def remember(self, node: object, skipped: Skipped) -> int:
        """Keep the backward round that combine's node of a graph opens, as long as the graph lives. `skipped` is how
        this rank takes part in the round without tokens. Returns its place in the order of forward passes."""
        order = next(_orders)
        self._owed.nodes[node] = order, skipped
        return order

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within it a round runs. Where all ranks get an error of it, none of them owes the others a round."""
        try:
            yield
        except (EPAbortedError, EPMismatchError, EPTimeoutError):
            self.note_told()
            raise

    def note_told(self) -> None:
        """The other ranks know of an exception of this rank, or have it, too."""
        self._owed.told = self._counts()

    @contextmanager
    def of_pass(self, order: int) -> Iterator[None]:
        """Within it a backward pass, if one runs, opens the round of the forward round `order`."""
        number = torch._C._current_graph_task_id()
        running = self._owed.passes.get(number) if number >= 0 else None
        if running is None and number >= 0:
            due = dict(entry for node, entry in self._owed.nodes.items() if is_of_pass(node))
            running = self._owed.passes[number] = Pass(self, due)
            torch.autograd.Variable._execution_engine.queue_callback(running)
        if running is not None:
            running.due.pop(order, None)
        yield
        if running is not None:
            running.round = self.backward.exchange.rounds.count

    def _counts(self) -> tuple[int, int]:
        return self.forward.exchange.rounds.count, self.backward.exchange.rounds.count

    def settle(self, ended: Pass) -> None:
        """Close the round that a pass has left open, or else take part in the next one that it owes."""
        exchange = self.backward.exchange
        rounds = exchange.rounds
        if rounds.count != ended.round or exchange.failed:
            return
        owed = sorted(ended.due, reverse=True)
        if self.forward.ep.device.type == "cpu":  # all ranks hear of an exception in the same round
            owed = owed[: rounds.state == CLOSED and self._owed.told != self._counts()]
        if rounds.state != CLOSED:
            exchange.abort(None)
        for order in owed:  # on GPUs hosts run ahead, and may have launched all rounds of the pass
            self.backward.skip(ended.due[order])
        self.note_told()


class Owed:
    """What the exchanges that share windows for backward passes know of these passes."""

    def __init__(self) -> None:
        # Nodes of combine in graphs that live: their order and backward round.
        self.nodes: WeakKeyDictionary[Any, tuple[int, Skipped]] = WeakKeyDictionary()
        self.passes: WeakValueDictionary[int, Pass] = WeakValueDictionary()  # that run, by the engine's number
        self.told = (-1, -1)  # the counts of rounds at which the other ranks last knew of an exception


class Pass:
    """A backward pass. The engine calls it at the end, and drops it where the pass raises."""

    def __init__(self, directions: Directions, due: dict[int, Skipped]) -> None:
        self._directions: Directions | None = directions
        self.due = due  # by their order, the rounds that have not begun
        self.round = -1  # the number of the last one that has

    def __call__(self) -> None:
        """The end: a round is still open where nobody asked for the gradients of its tokens."""
        self.due.clear()
        self.__del__()

    def __del__(self) -> None:
        directions = self._directions
        self._directions = None
        with suppress(RuntimeError, ValueError):  # closed, which has told the other ranks; or another group
            if directions is not None:
                directions.settle(self)


def is_of_pass(node: Any) -> bool:
    """Whether the backward pass that runs will run this node of a graph. A compiler asks for all."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf, where a compiler traces the pass
        return True


_owed: WeakKeyDictionary[ExpertParallel, Owed] = WeakKeyDictionary()
_directions = Registry[Directions](
    "the TrainingExchange of this program or graph is gone: it must live as long as they do"
)
find = _directions.find
_orders = itertools.count()
