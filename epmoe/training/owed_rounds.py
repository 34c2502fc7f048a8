"""Both directions of an exchange, which operators find by a number; and the backward rounds that
this rank owes the other ranks.

An exception may end a backward pass before all its rounds have run. The other ranks wait in these
rounds, so this rank aborts the open one, or takes part in the next one without tokens: then the
other ranks get an EPAbortedError. On GPUs their hosts may have launched more rounds of the pass, so
this rank takes part in all of them.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
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


class OwedRound(NamedTuple):
    """A backward round that combine's node of a graph opens once the pass reaches it."""

    order: int
    """the place of its forward round among all of this process"""
    shape: RoundShape
    tag: Tensor | int
    """of the round; a tensor is in host memory, of one element"""


class RoundCounts(NamedTuple):
    """Rounds that the exchanges of both directions have opened so far."""

    forward: int
    backward: int


@dataclass(eq=False)
class BackwardPass:
    """A backward pass that is running."""

    owed: dict[int, OwedRound]
    """by their order, the rounds of the pass that have not begun"""
    last_round: int = -1
    """the number of the last round that the pass has opened"""

    def note_opened(self, directions: Directions) -> None:
        """Remember the round that the pass has just opened."""
        self.last_round = directions.backward.exchange.rounds.count


class Directions:
    """The forward and backward rounds of one exchange.

    `owed` are the rounds that backward passes owe, of all exchanges whose backward passes use the
    same windows.
    """

    def __init__(self, forward: Rounds, backward: Rounds) -> None:
        self.forward = forward
        self.backward = backward
        self.number = _directions.add(self)
        self.owed = _owed_rounds.setdefault(backward.ep, OwedRounds())

    @property
    def generation(self) -> int:
        """The generation of the group. Rows of one generation do not fit another."""
        return self.forward.ep.generation

    @property
    def counts(self) -> RoundCounts:
        """Rounds so far."""
        return RoundCounts(self.forward.exchange.rounds.count, self.backward.exchange.rounds.count)

    def check_generation(self, generation: int) -> None:
        """Raise EPStateError if the group has changed since a forward pass of `generation`."""
        if generation != self.generation:
            raise EPStateError(
                "this backward pass belongs to a forward pass before `resume`, whose rows are gone"
            )

    def numbering(self) -> AbstractContextManager[None]:
        """Number the forward round that opens within this context, by `rounds.trained`. Its
        backward round has this number as its tag.
        """
        return _Numbering(self)

    def last_number(self) -> int:
        """The number of the last forward round, which is the tag of its backward round."""
        return self.backward.exchange.rounds.trained & constant("kMaxTag")

    def new_round_tag(self) -> Tensor:
        """`last_number` as a tensor, fp32 [1] in host memory."""
        return torch.full((1,), self.last_number(), dtype=torch.float32, device="cpu")


class _Numbering(AbstractContextManager[None]):
    """`Directions.numbering`. A class, since a generator would take the host longer."""

    def __init__(self, directions: Directions) -> None:
        self._rounds = directions.forward.exchange.rounds
        self._numbered = directions.backward.exchange.rounds
        self._before = self._rounds.count

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After a mismatch no rank counts the round: ranks that serve have counted none.
        if kind is not None and issubclass(kind, EPMismatchError):
            return
        self._numbered.trained += self._rounds.count - self._before


class OwedRounds:
    """The rounds that backward passes over the windows of one `ExpertParallel` owe the other
    ranks.
    """

    def __init__(self) -> None:
        # The owed round of each node of combine, while its graph lives.
        self._by_node = WeakKeyDictionary[Any, OwedRound]()
        # Passes that run, by the number that autograd's engine gives them.
        self._passes = WeakValueDictionary[int, BackwardPass]()
        # The counts of rounds when the other ranks last learned of an exception.
        self._informed_at = RoundCounts(-1, -1)

    def add(self, node: object, shape: RoundShape, tag: Tensor | int) -> int:
        """Keep the backward round that a node of a graph will open. Returns its order."""
        owed = OwedRound(next(_orders), shape, tag)
        self._by_node[node] = owed
        return owed.order

    def mark_informed(self, directions: Directions) -> None:
        """Note that the other ranks know of this rank's exception, or have it, too. Nobody owes
        them a round then.
        """
        self._informed_at = directions.counts

    def informed_on_error(self, directions: Directions) -> AbstractContextManager[None]:
        """Run a round within this context. If it raises an error that all ranks get, they are
        marked as informed.
        """
        return _InformedOnError(self, directions)

    def begin(self, directions: Directions, order: int) -> BackwardPass | None:
        """Take the round of this order off what the running backward pass owes, since the pass
        opens it next or needs none.

        Returns the pass, whose `note_opened` is to follow once the round is open; None where no
        pass runs.
        """
        running = self._running(directions)
        if running is not None:
            running.owed.pop(order, None)
        return running

    def _running(self, directions: Directions) -> BackwardPass | None:
        """The backward pass that runs on this thread, if one does."""
        number = torch._C._current_graph_task_id()
        if number < 0:
            return None
        running = self._passes.get(number)
        if running is None:
            running = self._watch_new_pass(directions)
            self._passes[number] = running
        return running

    def _watch_new_pass(self, directions: Directions) -> BackwardPass:
        """Collect the rounds of the pass that runs, and watch its end.

        The engine calls the callback at the end of the pass, and drops it if the pass raises.
        """
        owed = {}
        for node, round_ in self._by_node.items():
            if is_of_pass(node):
                owed[round_.order] = round_
        running = BackwardPass(owed)
        at_end = _AtEndOfPass(self, directions, running)
        # `weakref.finalize` would take the host three times as long.
        watch = ref(at_end, partial(self._pass_raised, directions, running))
        at_end.watch = watch
        _watched.add(watch)
        torch.autograd.Variable._execution_engine.queue_callback(at_end)
        return running

    def _pass_raised(self, directions: Directions, running: BackwardPass, watch: ref[Any]) -> None:
        """The engine has dropped the callback of a pass, which has raised."""
        _watched.discard(watch)
        self.run_rest(directions, running)

    def run_rest(self, directions: Directions, ended: BackwardPass) -> None:
        """Abort the round that a pass has left open, or take part in the next one that it owes."""
        # An exchange that is closed has told the other ranks; another group has no such rounds.
        with suppress(RuntimeError, ValueError):
            backward = directions.backward
            rounds = backward.exchange.rounds
            if rounds.count != ended.last_round or backward.exchange.failed:
                return
            owed = sorted(ended.owed.values(), reverse=True, key=lambda each: each.order)
            if backward.ep.device.type == "cpu":
                # All ranks hear of an exception in the same round.
                others_wait = rounds.state == CLOSED and self._informed_at != directions.counts
                owed = owed[:1] if others_wait else []
            if rounds.state != CLOSED:
                backward.exchange.abort(None)
            # On GPUs hosts run ahead, and may have launched all rounds of the pass.
            for each in owed:
                backward.skip(each.shape, int(each.tag), BACKWARD)
            self.mark_informed(directions)


class _AtEndOfPass:
    """What autograd's engine calls when a backward pass has ended without an exception."""

    def __init__(self, owed: OwedRounds, directions: Directions, running: BackwardPass) -> None:
        self._owed = owed
        self._directions = directions
        self._running = running
        self.watch: ref[_AtEndOfPass] | None = None

    def __call__(self) -> None:
        self._running.owed.clear()
        _watched.discard(self.watch)
        # Where nobody asked for the gradients of tokens, the last round is still open.
        if self._directions.backward.exchange.rounds.state != CLOSED:
            self._owed.run_rest(self._directions, self._running)


class _InformedOnError(AbstractContextManager[None]):
    """`OwedRounds.informed_on_error`. A class, since a generator would take the host longer."""

    def __init__(self, owed: OwedRounds, directions: Directions) -> None:
        self._owed = owed
        self._directions = directions

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, ERRORS_OF_ALL):
            self._owed.mark_informed(self._directions)


def is_of_pass(node: Any) -> bool:
    """Whether the running backward pass will run this node of a graph. While a compiler traces a
    pass, the answer is True for every node.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # The node is a leaf, where a compiler traces the pass.
        return True


_owed_rounds: WeakKeyDictionary[ExpertParallel, OwedRounds] = WeakKeyDictionary()
_directions = Registry[Directions](
    "the TrainingExchange of this program or graph is gone: it must live as long as they do"
)
find = _directions.find
_orders = itertools.count()
# Weak references to the callbacks of running passes: each sees that the engine drops its callback.
_watched = set[ref[Any]]()
