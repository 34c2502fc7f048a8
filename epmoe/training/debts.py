"""What backward passes owe the other ranks, and both directions of an exchange, which operators
find by a number.

A pass that an exception ends leaves a round open, or rounds of other ranks without this rank. It
then aborts the open round, or takes part in the next one without tokens, so that the other ranks
get an EPAbortedError and wait for nobody. On GPUs, where the other hosts may have gone on, it takes
part in all rounds of the pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor

from epmoe.exchange.handles import RoundShape
from epmoe.exchange.round_state import CLOSED
from epmoe.group.errors import EPAbortedError, EPMismatchError, EPStateError, EPTimeoutError
from epmoe.native.layouts import constant
from epmoe.native.opaque import Registry
from epmoe.service import ExpertParallel
from epmoe.training.rounds import BACKWARD, Rounds

ERRORS_OF_ALL = (EPAbortedError, EPMismatchError, EPTimeoutError)
"""Errors of a round that all its ranks get: nobody owes the others a round any more."""


class Debt(NamedTuple):
    """The backward round that combine's node of a graph opens."""

    order: int  # of the forward round, among all
    shape: RoundShape
    tag: Tensor | int  # a tensor is in host memory, of one element


@dataclass(eq=False)
class _Pass:
    """A backward pass that runs."""

    due: dict[int, Debt]  # by their order, the rounds that have not begun
    round: int = -1  # the number of the last one that has

    def has_opened(self, directions: Directions) -> None:
        """It has opened its round."""
        self.round = directions.backward.exchange.rounds.count


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

    def numbering(self) -> AbstractContextManager[None]:
        """Within it a forward round opens, which `trained` numbers. Its backward round has this
        number as tag.
        """
        return _Numbering(self)

    def last_number(self) -> int:
        """The number of the last forward round, by which its backward round is tagged."""
        return self.backward.exchange.rounds.trained & constant("kMaxTag")

    def new_link(self) -> Tensor:
        """fp32 [1] in host memory: `last_number`."""
        return torch.full((1,), self.last_number(), dtype=torch.float32, device="cpu")


class _Numbering(AbstractContextManager[None]):
    """`Directions.numbering`. No generator: the host would take longer."""

    def __init__(self, directions: Directions) -> None:
        self._rounds = directions.forward.exchange.rounds
        self._numbered = directions.backward.exchange.rounds
        self._before = self._rounds.count

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # On all ranks, of which some may have counted no round, since they serve.
        if kind is not None and issubclass(kind, EPMismatchError):
            return
        self._numbered.trained += self._rounds.count - self._before


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

    def add(self, node: object, shape: RoundShape, tag: Tensor | int) -> int:
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

    def dropped_by_errors(self, directions: Directions) -> AbstractContextManager[None]:
        """Within it a round runs. All ranks get an error of it."""
        return _DroppedByErrors(self, directions)

    def pay(self, directions: Directions, order: int) -> _Pass | None:
        """A backward pass, if one runs, opens the round of the forward round `order` next, or
        needs none. `has_opened` of the pass follows where it has.
        """
        running = self._running(directions)
        if running is not None:
            running.due.pop(order, None)
        return running

    def _running(self, directions: Directions) -> _Pass | None:
        number = torch._C._current_graph_task_id()
        if number < 0:
            return None
        running = self._passes.get(number)
        if running is None:
            running = self._begin(directions)
            self._passes[number] = running
        return running

    def _begin(self, directions: Directions) -> _Pass:
        """The pass that runs. The engine calls `ended` at its end, and drops it where the pass
        raises.
        """
        running = _Pass(
            {debt.order: debt for node, debt in self._debts.items() if is_of_pass(node)}
        )

        def ended() -> None:
            running.due.clear()
            _watched.discard(watch)
            # Otherwise nobody asked for the gradients of its tokens.
            if directions.backward.exchange.rounds.state != CLOSED:
                self._settle(directions, running)

        def dropped(watch: ref[Callable[[], None]]) -> None:
            _watched.discard(watch)
            self._settle(directions, running)

        # As `finalize` does it, which takes the host three times as long.
        watch = ref(ended, dropped)
        _watched.add(watch)
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


class _DroppedByErrors(AbstractContextManager[None]):
    """`BackwardDebts.dropped_by_errors`. No generator: the host would take longer."""

    def __init__(self, debts: BackwardDebts, directions: Directions) -> None:
        self._debts = debts
        self._directions = directions

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, ERRORS_OF_ALL):
            self._debts.drop(self._directions)


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
# Of backward passes that run: each sees that the engine drops the callback of its end.
_watched = set[ref[Any]]()
