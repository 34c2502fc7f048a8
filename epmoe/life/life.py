"""The life of an `ExpertParallel`: it joins a group, leaves it for another one, sleeps, wakes and
ends. Also who has the turn while this happens, and what a forked child may do.
"""

from __future__ import annotations

import ctypes
import dataclasses
import operator
import os
from collections.abc import Callable
from functools import partial
from threading import RLock, get_ident
from typing import NamedTuple, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from epmoe.config.config import EPConfig
from epmoe.config.placement import EP, Move, Placement
from epmoe.exchange.exchange import ANOTHER_THREAD, Exchange
from epmoe.exchange.health import Health
from epmoe.exchange.round_state import CLOSED
from epmoe.exchange.transports import addresses_of
from epmoe.group.checks import group_of
from epmoe.group.errors import EPOpenError, EPResumeError, EPStateError
from epmoe.group.join import JoinRequest, opening
from epmoe.group.member import Follower
from epmoe.group.peers import Peers
from epmoe.group.recovery import Confirm
from epmoe.life.membership import Membership, Terms, agree
from epmoe.live.experts import RankExperts, experts_on
from epmoe.live.fixed import FixedExperts
from epmoe.live.held import HeldVersions
from epmoe.native.arguments import describe
from epmoe.rail.opening import open_exchange

_Result = TypeVar("_Result")


class Sleep(NamedTuple):
    """What a `Life` keeps while it sleeps."""

    group: dist.ProcessGroup | DeviceMesh | None
    """the group in which it wakes"""
    health: Health
    """the counts when it went to sleep"""
    is_joined: bool = False
    """True if `wake` was interrupted after the group had opened: the windows are there, but this
    rank has not restored its weights.
    """


class _Request(NamedTuple):
    """What a rank asks for when it joins a group."""

    peers: Peers
    """the ranks of the group"""
    mesh: DeviceMesh | None
    """the mesh by which the caller has named the group"""
    config: EPConfig
    values: JoinRequest
    """what it tells the other ranks"""
    confirm: Confirm = lambda _: True
    """`confirm` of `go_on`"""
    asleep: Sleep | None = None
    """what `asleep` is to become in the group"""


class _Joined(NamedTuple):
    """The next group once its windows are open, before this rank has become one of its ranks."""

    terms: Terms
    exchange: Exchange
    keeps_weights: bool
    """whether all ranks have the weights of all experts that they are to hold"""


class Life:
    """One rank in one group after another. `ExpertParallel` says what users see of it.

    Its state is that of two attributes. Any state but the first refuses rounds.

        state     `opened`       `asleep`           goes on by
        open      the exchange   None               rounds, `sleep`, `go_on`, `close`
        asleep    None           what `wake` needs  `wake`, `go_on`, `close`
        waking    the exchange   the same           `wake`, which restores the weights
        closed    None           None               `go_on`

    In a forked child (`_owner`) `opened` is None, and nothing goes on.

    Args:
        config: the config of the first group.
        group: the first group, as `ExpertParallel` takes it.
        device: the device of all tensors.
        versions: the versions of weights that this rank's layers have.
        followers: objects that follow this rank into each group.
    """

    member: Membership
    """What this rank is in its group. It stays when the rank leaves the group."""
    group: dist.ProcessGroup | None = None
    """None is this process alone, or that this object has no group."""
    live: RankExperts = FixedExperts()
    """The experts of this rank."""
    opened: Exchange | None = None
    """The exchange whose windows are open."""
    asleep: Sleep | None = None
    """What this object keeps while it sleeps; None while it is awake."""
    # The mesh of the group, once there is one.
    _mesh: DeviceMesh | None = None
    # The ranks that are missing, as a mask; and those of them whose processes have ended.
    _missing: int = 0
    _dead: int = 0
    # Whether this rank has the weights of its experts. Callers of `resume` must first load the
    # moves that it returns; the flag is set before that.
    _has_weights: bool = True
    # The thread that is in `alone`, or 0. This thread has the turn also while there is no exchange.
    _joining: int = 0
    # In a forked child the process that this object belongs to, otherwise None.
    _owner: int | None = None

    def __init__(
        self,
        config: EPConfig,
        group: dist.ProcessGroup | DeviceMesh | None,
        device: torch.device,
        versions: HeldVersions,
        followers: WeakSet[Follower],
    ) -> None:
        # Make what stays when the group changes.
        self.device = device
        self.versions = versions
        self.followers = followers
        self.addresses = addresses_of(config, device)
        # The layout of memory in each generation, by which `capture_is_valid` compares them.
        self._layouts = dict[int, object]()
        # Any thread may call `health`. It holds this lock, so that the memory of the counts is not
        # unmapped meanwhile.
        self._reading = RLock()

        # Become a rank of the group. Callers may build their models under a default device of
        # torch, so choose the CPU for the tensors that are made on the way.
        request = _Request(
            peers=Peers.of(group_of(group), config.exchange.warmup_timeout_s),
            mesh=group if isinstance(group, DeviceMesh) else None,
            config=config,
            values=JoinRequest(config.model_dump_json(), versions=versions.said()),
        )
        with torch.device("cpu"):
            self._join(request)
        self.exchange.thread = 0

    @property
    def exchange(self) -> Exchange:
        """The exchange that carries the rounds. Raises EPStateError unless this object is open."""
        if self.opened is None or self.asleep is not None:
            raise EPStateError(self.why_unusable())
        return self.opened

    @property
    def mesh(self) -> DeviceMesh | None:
        """See `ExpertParallel.mesh`."""
        if self.group is None:
            return None
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=(EP,))
        return self._mesh

    def survivors(self) -> list[int]:
        """See `ExpertParallel.survivors`."""
        if self.opened is not None:
            self._missing = self.opened.missing()
        ended = self.ended()
        survivors = []
        for rank in range(self.member.size):
            is_missing = self._missing >> rank & 1
            if not is_missing and rank not in ended:
                survivors.append(rank)
        return survivors

    def ended(self) -> list[int]:
        """See `ExpertParallel.ended`."""
        if self.opened is not None:
            self._dead = self.opened.dead()
        return [rank for rank in range(self.member.size) if self._dead >> rank & 1]

    def capture_is_valid(self, generation: int) -> bool:
        """See `ExpertParallel.capture_is_valid`."""
        if self.opened is None:
            return False
        now = self._layouts.get(self.member.generation)
        if not self.versions.rounds_may_begin:
            return False
        return now is not None and self._layouts.get(generation) == now

    def health(self, wait: bool) -> Health:
        """See `ExpertParallel.health`."""
        if self.asleep is None or self._owner is not None:
            # The property raises EPStateError if this object is closed.
            _ = self.exchange
            with self._reading:
                # Another thread may have put this object to sleep meanwhile, so ask again.
                if self.asleep is None:
                    return self._counts(wait)
        return self.asleep.health

    def _counts(self, wait: bool) -> Health:
        """Read the counts of the exchange, and add the count of refused plans to them."""
        health = self.exchange.health(wait)
        return dataclasses.replace(health, refused_plans=self.live.refused_plans)

    def alone(self, call: Callable[[], _Result]) -> _Result:
        """Run `call` while this thread has the turn, and return its result.

        A thread has the turn if no other thread may use this object. While `call` runs, a call of
        another thread raises RuntimeError, and so does a call from within `call`, or in a fork. A
        collective call of several steps keeps its turn in this way from its start to its end, also
        when it replaces the windows. A context manager would not do, see `takes_turn`.
        """
        if self._owner is not None:
            raise EPStateError(self.why_unusable())
        member = self.member
        caller = get_ident()

        # Take the turn of the exchange, if there is one, and that of this object.
        thread_before = 0
        if self.opened is not None:
            thread_before = self.opened.enter()
        # Ask again for the exchange, since another thread may have released it meanwhile.
        if self.opened is None and self._joining not in (0, caller):
            raise RuntimeError(ANOTHER_THREAD)
        joining_before, self._joining = self._joining, caller

        try:
            return call()
        except BaseException:
            # If this rank is in another group by now, the exception has kept from the caller which
            # weights to load. An object that sleeps learns that by its next call of `wake`.
            if self.member is not member and self.asleep is None:
                self.lose_weights()
            raise
        finally:
            # Give the turn back. This call may come from a signal handler that has interrupted
            # another call of this thread, which then has the turn again. But in the windows of
            # another group nobody has the turn: the interrupted call was made in the old ones.
            self._joining = joining_before
            if self.opened is not None:
                if self.member is not member:
                    thread_before = 0
                self.opened.thread = thread_before

    def go_on(
        self,
        group: dist.ProcessGroup | DeviceMesh | None,
        placement: Placement | None,
        spread_lost: bool,
        confirm: Confirm = lambda _: True,
        asleep: Sleep | None = None,
    ) -> tuple[Move, ...]:
        """Join another group, as `ExpertParallel.resume` describes it. The caller is within
        `alone`: it is `resume`, `wake` or `epmoe.group.recovery.regroup`.

        `confirm` is called once the windows are open. Its argument is a function that returns the
        ranks that are missing by then, as a mask. It returns whether the group may begin; if not,
        this rank raises EPResumeError, as it does if another rank has not arrived. `asleep` is what
        `asleep` becomes in the new group: `wake` gives a `Sleep`, since it still has to restore
        weights, and the other callers give None.
        """
        if not isinstance(placement, Placement | None):
            raise TypeError(f"`placement` must be a Placement, got {describe(placement)}")
        before = self.member
        timeout_s = before.config.exchange.warmup_timeout_s
        peers = Peers.of(group_of(group), timeout_s)

        # Write down what this rank asks for, and what it has.
        config, values = self._wanted(peers, placement, spread_lost)
        request = _Request(
            peers=peers,
            mesh=group if isinstance(group, DeviceMesh) else None,
            config=config,
            values=values,
            confirm=confirm,
            asleep=asleep,
        )
        # For each rank of the new group, its number in the group so far. This rank knows only its
        # own, and leaves it out if it has no weights that could be taken from there.
        ranks_before: list[int | None] = [None] * peers.size
        if self._has_weights:
            ranks_before[peers.rank] = before.rank

        # Become a rank of the new group.
        try:
            # Wait for the GPU first: a kernel that still runs must keep its windows.
            if not self.addresses.processor.ends(timeout_s):
                raise TimeoutError("the GPU has not finished its work")
            with torch.device("cpu"):
                self._join(request)
        except EPOpenError as error:
            raise EPResumeError(timeout_s, error) from None
        except (RuntimeError, OSError) as error:
            raise EPResumeError(timeout_s, error) from error

        # Find the experts that this rank has to move or load.
        moves = self.live.to_load(values.held, before.placement, ranks_before)
        if moves:
            # The weights that the caller loads may be of another version.
            self.versions.doubt()
        return moves

    def _wanted(
        self, peers: Peers, placement: Placement | None, spread_lost: bool
    ) -> tuple[EPConfig, JoinRequest]:
        """Make the config that this rank wants for the next group, and the request that it sends to
        the other ranks there.
        """
        member = self.member
        keeps = placement is None
        config = member.config
        if placement is not None:
            config = config.with_placement(placement)

        # With `placement.live` experts stay in their slots, unless this rank has lost its weights.
        held = None
        if keeps:
            config, held = self.live.kept(config, peers.size, self._has_weights)
        request = JoinRequest(
            config=config.model_dump_json(),
            origin=member.origin,
            generation=member.generation,
            rank=member.rank,
            keeps=keeps,
            held=held,
            spread_lost=keeps and spread_lost,
            seat=member.seat,
            versions=self.versions.said(),
        )
        return config, request

    def _join(self, request: _Request) -> None:
        """Become a rank of the group that `request` names. Collective: if a step fails on one rank,
        all ranks raise.

        The windows of the group so far are released before the new ones open, since the memory may
        be too small for both; but only once it is known that all ranks can join. When all ranks
        have succeeded, this object is a rank of the new group, even if a signal handler raises
        afterwards.
        """
        joined: _Joined | None = None
        caller = get_ident()
        stream = self.addresses.processor.stream()

        # This is the last step, once all ranks have opened their windows. It runs on another
        # thread, where no signal handler can interrupt it.
        def become() -> None:
            """Confirm the group with the other ranks, and make this object a rank of it."""
            assert joined is not None
            exchange = joined.exchange
            if not request.confirm(lambda: exchange.missing() | exchange.dead()):
                raise RuntimeError("the group was not confirmed")
            try:
                # On CPUs `stream` is None, and the context does nothing.
                with torch.cuda.stream(stream):
                    self._become(request, joined, caller)
            except BaseException:
                self.opened = None
                exchange.release()
                raise

        try:
            with opening(request.peers, become) as agreed:
                # Agree with the other ranks on the next group, and ask all whether they keep their
                # weights. After the gather it is known that all ranks can join.
                terms = agree(request.peers, request.config, request.values, agreed, self.device)
                held = self.live.held_by_layer() if self._has_weights else None
                keeps_weights = all(request.peers.all_gather(terms.are_held(held)))

                # Release the windows of the group so far, if there is one.
                self._leave()

                # Open the new windows. Rounds outside of inference mode could not write buffers
                # that were made in it.
                member = terms.member
                with torch.inference_mode(False):
                    exchange = open_exchange(
                        member.config,
                        request.peers,
                        member.seats,
                        self.addresses,
                        agreed.name,
                        self.versions.check,
                    )
                    joined = _Joined(terms, exchange, keeps_weights)
        except BaseException:
            self._drop_windows(joined)
            raise

    def _drop_windows(self, joined: _Joined | None) -> None:
        """Release the new windows after an exception of `_join`, unless this rank has become a rank
        of the new group, which uses them. `joined` is None if the windows were not open yet.
        """
        if joined is None:
            # A signal handler may have raised after windows were mapped, and before `joined` was
            # set. So unmap whatever is mapped.
            if self.opened is None:
                self.addresses.unmap_windows()
        elif self.opened is not joined.exchange:
            joined.exchange.release()

    def _become(self, request: _Request, joined: _Joined, caller: int) -> None:
        """Make this object a rank of the group whose windows are open. `caller` is the thread that
        has the turn.
        """
        terms = joined.terms
        exchange = joined.exchange
        # Take over this rank's place in the group.
        self.member = terms.member
        self.group = request.peers.group
        self._mesh = request.mesh
        # Take over the windows.
        exchange.thread = caller
        self.opened = exchange
        self._missing = 0
        self._dead = 0
        self._layouts[terms.member.generation] = exchange.layout
        # Compare the versions of weights, and refuse rounds as long as ranks have different ones.
        self.versions.compare(terms.versions, joined.keeps_weights)
        # Make the experts of this rank. Layers have told the experts of the group so far where
        # their weights lie, so hand that on. Then let the objects of layers follow.
        config = terms.member.config
        placement = terms.member.placement
        self.live = experts_on(exchange, config, placement, terms.slots, self.live.weights)
        num_local_experts = placement.num_local_experts(terms.member.rank)
        for follower in self.followers:
            follower.regroup(num_local_experts, whole=joined.keeps_weights)
        self._has_weights = True
        self.asleep = request.asleep
        _all.add(self)

    def lose_weights(self) -> None:
        """Leave the group, because weights are not where `placement` has them, so that no round may
        run. The waits of the other ranks end at once. This rank may resume in another group; all
        its experts are then among the moves that `resume` returns.
        """
        self._has_weights = False
        self.asleep = None
        self.versions.doubt()
        self.end_waits()
        self._leave()

    def end_waits(self) -> None:
        """End the waits of the other ranks, if this object has windows."""
        if self.opened is not None:
            self.opened.end_waits()

    def close(self) -> None:
        """See `ExpertParallel.close`."""
        self._leave()
        self.asleep = None
        # Give the scratch memory back, too, unless this is a fork, or another thread is mapping it
        # for another group.
        caller = get_ident()
        is_mapped_by_another = self._joining not in (0, caller)
        if self._owner is None and self.opened is None and not is_mapped_by_another:
            joining_before, self._joining = self._joining, caller
            try:
                self._unmap_scratch()
            finally:
                self._joining = joining_before

    def _unmap_scratch(self) -> None:
        """Unmap the scratch memory, once no thread reads it in `health`. Other calls do not get to
        it any more, since there is no exchange.
        """
        with self._reading:
            self.addresses.unmap_scratch()

    def _leave(self) -> None:
        """Release the windows and the group, but keep the scratch memory mapped. It is a part of
        `close`, `sleep`, `lose_weights` and `_join`.

        A CUDA graph that is replayed later still reads in scratch that its group has gone, and does
        nothing.
        """
        # Keep which ranks are missing, for later calls of `survivors`.
        if self.opened is not None:
            self.survivors()

        exchange, self.opened = self.opened, None
        try:
            self.live.close()
            # Drop the references to the process group: a group that outlives
            # `destroy_process_group` may end the interpreter by SIGABRT.
            self.group = self._mesh = None
            if exchange is not None:
                # In an open round the other ranks wait for this one.
                if exchange.rounds.state != CLOSED:
                    exchange.end_waits()
                exchange.release()
        except BaseException:
            # A signal handler has raised. Release the windows all the same.
            if exchange is not None:
                exchange.release()
            raise

    def sleep(self, free: Callable[[], object] | None) -> None:
        """See `ExpertParallel.sleep`. The caller is within `alone`."""
        # Check that no round is open, nothing runs any more, and nothing was reported.
        exchange = self.exchange
        if exchange.rounds.state != CLOSED:
            raise EPStateError("a round is open: combine, or abort on all ranks, before sleep")
        exchange.wait_for_device(self.member.config.exchange.timeout_s)
        exchange.poll()

        # Let the caller free its weights, then release the windows.
        asleep = Sleep(group=self._mesh or self.group, health=self._counts(wait=False))
        freed: list[bool] = []
        try:
            if free is not None:
                # Free the weights, and note in `freed` that this has happened. `map` makes both
                # calls without a line of Python between them, so no signal handler can raise there.
                calls: list[Callable[[], object]] = [free, partial(freed.append, True)]
                list(map(operator.call, calls))
            # Keep the counts before the windows go: another thread may call `health` meanwhile.
            self.asleep = asleep
            self._leave()
        finally:
            # Once the weights have gone, this object sleeps, even if a signal handler has raised.
            if free is None or freed:
                self._has_weights = self._has_weights and free is None
                self.asleep = asleep
                self._leave()
                self._unmap_scratch()

    def wake(self, sleep: Sleep, restore: Callable[[], object]) -> None:
        """See `ExpertParallel.wake`. The caller is within `alone`."""
        # Open the windows together with the other ranks, unless an earlier call has done so and was
        # interrupted later.
        if not sleep.is_joined:
            has_weights = self._has_weights
            try:
                # Tell the other ranks that this one has its weights, since `restore` brings them
                # back.
                self._has_weights = True
                self.go_on(
                    group=sleep.group,
                    placement=None,
                    spread_lost=False,
                    asleep=sleep._replace(is_joined=True),
                )
            except BaseException:
                # Without windows this object sleeps on.
                if self.opened is None:
                    self._has_weights = has_weights
                    self.addresses.unmap_scratch()
                raise
        # Let the caller bring its weights back. From here on an exception closes this object.
        try:
            self.asleep = None
            restore()
        except BaseException:
            self.lose_weights()
            raise

    def state(self) -> str:
        """The state of this object in a word, or the state of its open round."""
        exchange = self.opened
        if self.asleep is not None:
            return "asleep"
        if exchange is not None:
            return exchange.rounds.describe(exchange.rounds.count)
        if self._owner is None:
            return "closed"
        return f"of process {self._owner}"

    def why_unusable(self) -> str:
        """Say in an error why there is no exchange: a fork, sleep, or the end."""
        if self._owner is not None:
            return (
                f"this ExpertParallel belongs to process {self._owner}, of which this process is a "
                "fork: each process makes its own"
            )
        if self.asleep is not None:
            return "this ExpertParallel sleeps: call `wake`"
        return "this ExpertParallel is closed"

    def _disown(self) -> None:
        """Drop the windows of the parent in a forked child. Nothing is destroyed there, since
        destructors would end threads and close connections that only the parent has.
        """
        if self._owner is None:
            self._owner = os.getppid()
        self.live.disown(self.why_unusable())
        # A reference that nobody gives back keeps each of these objects until the process ends.
        for kept in (self.opened, self.group, self.live):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self.opened = None
        self.group = None


# All objects of this process that have been a rank of a group.
_all: WeakSet[Life] = WeakSet()


def _disown_all() -> None:
    """Make all objects of the parent unusable in a forked child."""
    for life in list(_all):
        life._disown()


# Python calls `_disown_all` in every forked child. So the calls of an ExpertParallel need not ask
# whether they are in the process that made it, which would cost time in each call.
os.register_at_fork(after_in_child=_disown_all)
