"""What backward passes owe the other ranks, and both directions of an exchange, which operators
find by a number.

A pass that an exception ends leaves a round open, or rounds of other ranks without this rank. It
then aborts the open round, or takes part in the next one without tokens, so that the other ranks
get an EPAbortedError and wait for nobody. On GPUs, where the other hosts may have gone on, it takes
part in all rounds of the pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import torch
from torch import Tensor

from epmoe.exchange.handles import RoundShape
from epmoe.exchange.round_state import CLOSED
from epmoe.group.errors import EPAbortedError, EPMismatchError, EPStateError, EPTimeoutError
from epmoe.native.opaque import Registry
from epmoe.service import ExpertParallel
from epmoe.training.rounds import BACKWARD, Rounds


class Debt(NamedTuple):
    """The backward round that combine's node of a graph opens."""

    order: int  # of the forward round, among all
    shape: RoundShape
    tag: Tensor  # in host memory, one element


@dataclass(eq=False)
class _Pass:
    """A backward pass that runs."""

    due: dict[int, Debt]  # by their order, the rounds that have not begun
    round: int = -1  # the number of the last one that has


class Directions:
    """The rounds of both directions. `debts` are those of all exchanges whose backward passes use
    these windows.
    """

    def __init__(self, forward: Rounds, backward: Rounds) -> None:
        self.forward = forward
        self.backward = backward
        self.number = _directions.add(self)
        self.debts = _debts.setdefault(backward.ep, BackwardDebts())

    @property
    def generation(self) -> int:
        """The generation of the group. Rows of one generation do not fit another."""
        return self.forward.ep.generation

    @property
    def counts(self) -> tuple[int, int]:
        """Rounds so far, forward and backward."""
        return self.forward.exchange.rounds.count, self.backward.exchange.rounds.count

    def check_generation(self, generation: int) -> None:
        if generation != self.generation:
            raise EPStateError(
                "this backward pass belongs to a forward pass before `resume`, whose rows are gone"
            )

    @contextmanager
    def numbering(self) -> Iterator[None]:
        """Within it a forward round opens, which `trained` numbers. Its backward round has this
        number as tag.
        """
        rounds = self.forward.exchange.rounds
        before = rounds.count
        try:
            yield
        except (
            EPMismatchError
        ):  # on all ranks, of which some may have counted no round, since they serve
            before = rounds.count
            raise
        finally:
            self.backward.exchange.rounds.trained += rounds.count - before


class BackwardDebts:
    """The rounds that backward passes over the windows of one `ExpertParallel` owe the
    other ranks.
    """

    def __init__(self) -> None:
        self._debts: WeakKeyDictionary[Any, Debt] = (
            WeakKeyDictionary()
        )  # by combine's node, while its graph lives
        self._passes: WeakValueDictionary[int, _Pass] = (
            WeakValueDictionary()
        )  # that run, by the engine's number
        self._told = (
            -1,
            -1,
        )  # the counts of rounds at which the other ranks last knew of an exception

    def add(self, node: object, shape: RoundShape, tag: Tensor) -> int:
        """Keep the backward round that a node of a graph opens. Returns its place in the order of
        forward passes.
        """
        self._debts[node] = debt = Debt(next(_orders), shape, tag)
        return debt.order

    def drop(self, directions: Directions) -> None:
        """The other ranks know of an exception of this rank, or have it, too: nobody owes the
        others a round.
        """
        self._told = directions.counts

    @contextmanager
    def dropped_by_errors(self, directions: Directions) -> Iterator[None]:
        """Within it a round runs. All ranks get an error of it."""
        try:
            yield
        except (EPAbortedError, EPMismatchError, EPTimeoutError):
            self.drop(directions)
            raise

    @contextmanager
    def paying(self, directions: Directions, order: int) -> Iterator[None]:
        """Within it a backward pass, if one runs, opens the round of the forward round `order`."""
        number = torch._C._current_graph_task_id()
        running = self._passes.get(number) if number >= 0 else None
        if running is None and number >= 0:
            running = self._passes[number] = self._begin(directions)
        if running is not None:
            running.due.pop(order, None)
        yield
        if running is not None:
            running.round = directions.backward.exchange.rounds.count

    def _begin(self, directions: Directions) -> _Pass:
        """The pass that runs. The engine calls `ended` at its end, and drops it where the pass
        raises.
        """
        running = _Pass(
            {debt.order: debt for node, debt in self._debts.items() if is_of_pass(node)}
        )

        def ended() -> None:
            running.due.clear()
            finish()  # a round is still open where nobody asked for the gradients of its tokens

        finish = finalize(ended, self._settle, directions, running)
        finish.atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(ended)
        return running

    def _settle(self, directions: Directions, ended: _Pass) -> None:
        """Close the round that a pass has left open, or else take part in the next one that it
        owes.
        """
        with suppress(
            RuntimeError, ValueError
        ):  # closed, which has told the other ranks; or another group
            backward = directions.backward
            rounds = directions.backward.exchange.rounds
            if rounds.count != ended.round or backward.exchange.failed:
                return
            owed = sorted(ended.due.values(), reverse=True, key=lambda debt: debt.order)
            if backward.ep.device.type == "cpu":  # all ranks hear of an exception in the same round
                owed = owed[: rounds.state == CLOSED and self._told != directions.counts]
            if rounds.state != CLOSED:
                backward.exchange.abort(None)
            for (
                debt
            ) in owed:  # on GPUs hosts run ahead, and may have launched all rounds of the pass
                backward.skip(debt.shape, int(debt.tag), BACKWARD)
            self.drop(directions)


def is_of_pass(node: Any) -> bool:
    """Whether the backward pass that runs will run this node of a graph. A compiler
    asks for all.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf, where a compiler traces the pass
        return True


_debts: WeakKeyDictionary[ExpertParallel, BackwardDebts] = WeakKeyDictionary()
_directions = Registry[Directions](
    "the TrainingExchange of this program or graph is gone: it must live as long as they do"
)
find = _directions.find
_orders = itertools.count()
