"""The forward and backward rounds of a `TrainingExchange`, and the backward rounds that this rank
still owes the other ranks.

A forward pass is followed by a backward pass, which runs one round for each layer. All ranks must
run these rounds, so a graph with a layer *owes* one round to the other ranks until the round runs.

An exception may end the backward pass of this rank before all its rounds have run. The other ranks
then wait in the next round. So this rank aborts the round that is open; if none is open, it takes
part in the next round without tokens, and aborts that round. The other ranks get an EPAbortedError
in place of a timeout. On GPUs, the hosts of the other ranks may already have launched all later
rounds of the pass, so this rank takes part in all of these.
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
"""Errors that all ranks of a round get. After one of them no rank waits for another, so that no
rank owes a round any more.
"""


class OwedRound(NamedTuple):
    """A backward round that has not run yet. A node of autograd's graph, that of combine or of the
    whole layer, opens the round when the backward pass reaches this node.
    """

    order: int
    """the number of the forward round among all forward rounds of this process. A backward pass
    runs its rounds in the reverse order.
    """
    shape: RoundShape
    tag: Tensor | int
    """the tag of the backward round; if it is a tensor, it has one element and is in host memory"""


class RoundCounts(NamedTuple):
    """How many rounds the exchange of each direction has opened so far."""

    forward: int
    backward: int


@dataclass(eq=False)
class BackwardPass:
    """A backward pass that is running."""

    owed: dict[int, OwedRound]
    """the rounds of this pass that have not begun, by their `order`"""
    last_round: int = -1
    """the number of the last round that the pass has opened"""

    def note_opened(self, directions: Directions) -> None:
        """Remember the round that the pass has just opened."""
        self.last_round = directions.backward.exchange.rounds.count


class Directions:
    """The forward and backward rounds of one `TrainingExchange`.

    Operators of torch cannot take Python objects as arguments. They take `number` in place of this
    object, and look it up by `find(number)`.

    `owed` keeps the rounds that backward passes still owe. Exchanges that share the windows of
    their backward rounds share one `owed`, since an exception in one of them ends the pass for all.
    """

    def __init__(self, forward: Rounds, backward: Rounds) -> None:
        self.forward = forward
        self.backward = backward
        self.number = _directions.add(self)
        self.owed = _owed_rounds.setdefault(backward.ep, OwedRounds())

    @property
    def generation(self) -> int:
        """The generation of the group, which changes when ranks leave or come. Rows of one
        generation do not fit the windows of another.
        """
        return self.forward.ep.life.member.generation

    @property
    def counts(self) -> RoundCounts:
        """How many rounds each direction has opened so far."""
        return RoundCounts(
            forward=self.forward.exchange.rounds.count,
            backward=self.backward.exchange.rounds.count,
        )

    def check_generation(self, generation: int) -> None:
        """Raise EPStateError if the group has changed since a forward pass that ran in
        `generation`.
        """
        if generation != self.generation:
            raise EPStateError(
                "this backward pass belongs to a forward pass before `resume`, whose rows are gone"
            )

    def counting_forward_round(self) -> AbstractContextManager[None]:
        """Count the forward round that opens within this context, in `rounds.trained` of the
        backward rounds. The count is the tag of the backward round: see `backward_tag`.
        """
        return _CountingForwardRound(self)

    def backward_tag(self) -> int:
        """The tag of the backward round that belongs to the last forward round.

        It is the number of this forward round, so that ranks whose graphs run backward in different
        orders get an EPMismatchError.
        """
        return self.backward.exchange.rounds.trained & constant("kMaxTag")

    def new_round_tag(self) -> Tensor:
        """`backward_tag` as a tensor, fp32 [1] in host memory."""
        return torch.full((1,), self.backward_tag(), dtype=torch.float32, device="cpu")


class _CountingForwardRound(AbstractContextManager[None]):
    """The context of `Directions.counting_forward_round`. It is a class, since a context manager
    made of a generator would take the host longer in every round.
    """

    def __init__(self, directions: Directions) -> None:
        self._forward_rounds = directions.forward.exchange.rounds
        self._backward_rounds = directions.backward.exchange.rounds
        self._count_before = self._forward_rounds.count

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After a mismatch no rank counts the round. The other ranks may have run a round without
        # gradients, which they do not count either.
        if kind is not None and issubclass(kind, EPMismatchError):
            return
        # The difference is 0 if the block raised before it had opened the round.
        self._backward_rounds.trained += self._forward_rounds.count - self._count_before


class OwedRounds:
    """The rounds that backward passes over the windows of one `ExpertParallel` owe the other
    ranks.
    """

    def __init__(self) -> None:
        # The owed round of each node of autograd. The key is weak: a graph that the caller drops
        # owes nothing any more.
        self._by_node = WeakKeyDictionary[Any, OwedRound]()
        # The backward passes that are running, by the id that autograd's engine gives a pass.
        self._passes = WeakValueDictionary[int, BackwardPass]()
        # The counts of rounds when the other ranks last learned of an exception.
        self._informed_at = RoundCounts(-1, -1)

    def add(self, node: object, shape: RoundShape, tag: Tensor | int) -> int:
        """Note that a node of autograd's graph will open a backward round of this shape and tag.

        The forward pass calls it once a layer's round is closed. Returns the `order` of the round,
        with which the backward pass calls `begin`.
        """
        owed = OwedRound(next(_orders), shape, tag)
        self._by_node[node] = owed
        return owed.order

    def mark_informed(self, directions: Directions) -> None:
        """Note that the other ranks have learned of this rank's exception, or have got the same
        one. This rank then owes them no round, until another round opens.
        """
        self._informed_at = directions.counts

    def informed_on_error(self, directions: Directions) -> AbstractContextManager[None]:
        """Run a round within this context. If the block raises an error that all ranks get, the
        other ranks are marked as informed.
        """
        return _InformedOnError(self, directions)

    def begin(self, directions: Directions, order: int) -> BackwardPass | None:
        """Remove a round from those that the running backward pass owes. The caller is about to
        open this round, or has found that the pass does not need it.

        Returns the running pass. The caller calls its `note_opened` once the round is open. Returns
        None if no backward pass runs on this thread.
        """
        running = self._running(directions)
        if running is not None:
            running.owed.pop(order, None)
        return running

    def _running(self, directions: Directions) -> BackwardPass | None:
        """The backward pass that runs on this thread, or None. The first call in a pass collects
        the rounds of the pass.
        """
        # autograd's engine returns −1 on a thread that runs no backward pass.
        pass_id = torch._C._current_graph_task_id()
        if pass_id < 0:
            return None
        running = self._passes.get(pass_id)
        if running is None:
            running = self._watch_new_pass(directions)
            self._passes[pass_id] = running
        return running

    def _watch_new_pass(self, directions: Directions) -> BackwardPass:
        """Collect the rounds of the backward pass that is running, and watch how the pass ends.

        The engine of autograd calls a callback when a pass ends well. It tells nobody that a pass
        has raised, but drops the callback then. So a weak reference to the callback, which is
        removed when the callback is called, notices a pass that has raised.
        """
        # The graph of this process may have more nodes than this pass visits.
        owed = {}
        for node, owed_round in self._by_node.items():
            if is_of_pass(node):
                owed[owed_round.order] = owed_round
        running = BackwardPass(owed)

        # Watch the end of the pass. `weakref.finalize` would take the host three times as long.
        at_end = _AtEndOfPass(self, directions, running)
        watch = ref(at_end, partial(self._pass_raised, directions, running))
        at_end.watch = watch
        _watched.add(watch)
        torch.autograd.Variable._execution_engine.queue_callback(at_end)
        return running

    def _pass_raised(self, directions: Directions, running: BackwardPass, watch: ref[Any]) -> None:
        """Run what a backward pass owes after it has raised. Python calls this when autograd's
        engine drops the callback of the pass; `watch` is the weak reference that noticed it.
        """
        _watched.discard(watch)
        self.run_rest(directions, running)

    def run_rest(self, directions: Directions, ended: BackwardPass) -> None:
        """Do for the other ranks what the backward pass `ended` has left undone: abort the round
        that it has left open, and take part in the rounds that it still owes.
        """
        # An exchange that has been closed raises here, but it has informed the other ranks itself.
        # So does a group that has changed since, in which these rounds do not exist.
        with suppress(RuntimeError, ValueError):
            backward = directions.backward
            rounds = backward.exchange.rounds

            # Another round has been opened since, or the exchange has failed: nobody waits.
            if rounds.count != ended.last_round or backward.exchange.failed:
                return

            # A backward pass runs its rounds in the reverse order of the forward rounds.
            owed = sorted(
                ended.owed.values(),
                key=lambda owed_round: owed_round.order,
                reverse=True,
            )

            # On CPUs all ranks hear of an exception in the same round, so one round is enough. It
            # is the open one, if there is one.
            if backward.ep.device.type == "cpu":
                others_wait = rounds.state == CLOSED and self._informed_at != directions.counts
                owed = owed[:1] if others_wait else []
            if rounds.state != CLOSED:
                backward.exchange.abort(None)

            # On GPUs hosts run ahead of their devices, and those of the other ranks may have
            # launched all rounds of the pass. So this rank takes part in all of them.
            for owed_round in owed:
                backward.skip(owed_round.shape, int(owed_round.tag), BACKWARD)
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
        # The pass has ended well, so it owes nothing. Its last round may still be open: the node of
        # dispatch closes it, and does not run if nobody asked for gradients of tokens or weights.
        if self._directions.backward.exchange.rounds.state != CLOSED:
            self._owed.run_rest(self._directions, self._running)


class _InformedOnError(AbstractContextManager[None]):
    """The context of `OwedRounds.informed_on_error`. It is a class, since a context manager made of
    a generator would take the host longer in every round.
    """

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
        # torch refuses to answer for a node that it takes for a leaf, as it does for every node
        # while a compiler traces the pass.
        return True


_owed_rounds: WeakKeyDictionary[ExpertParallel, OwedRounds] = WeakKeyDictionary()
_directions = Registry[Directions](
    "the TrainingExchange of this program or graph is gone: it must live as long as they do"
)
find = _directions.find
_orders = itertools.count()
# The weak references that notice that autograd's engine drops a callback: see `_watch_new_pass`. A
# weak reference calls nobody once it is gone itself, so this set keeps them.
_watched = set[ref[Any]]()
