"""ExpertParallel: it owns the windows, the placement and the memory plan of one group, and offers
dispatch, combine and the other stages over them. The functions that change the group stand below.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import operator
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import RLock, get_ident
from typing import NamedTuple, Self, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import LAST_CALL_S
from epmoe.config.placement import EP, Move, Placement, is_int
from epmoe.config.seats import Seats
from epmoe.exchange.call import new_call
from epmoe.exchange.exchange import ANOTHER_THREAD, Exchange, takes_turn_of_exchange
from epmoe.exchange.handles import Dispatched, HoldsWindows, Layout, RoundShape, Sent
from epmoe.exchange.health import Health
from epmoe.exchange.layer_tags import LayerTags
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.processors import processor_of
from epmoe.exchange.round_state import CLOSED
from epmoe.exchange.transports import addresses_of, device_of
from epmoe.group.checks import check_size, config_of, group_of
from epmoe.group.errors import (
    EPOpenError,
    EPRefusedError,
    EPResumeError,
    EPStateError,
    EPTimeoutError,
)
from epmoe.group.join import Agreement, JoinRequest, opening
from epmoe.group.member import Follower
from epmoe.group.peers import Peers
from epmoe.group.recovery import Confirm, Wanted, regroup, take_in
from epmoe.group.store import Store
from epmoe.live.balancer import Balancer
from epmoe.live.experts import LiveExperts, RankExperts, experts_on
from epmoe.live.fixed import FixedExperts
from epmoe.live.held import HeldVersions
from epmoe.live.layout import EMPTY
from epmoe.live.moves import Moves, SlotWeights
from epmoe.live.slots import (
    Table,
    agree_on_slots,
    keep_slots,
    lacking,
    read_slots,
    slots_of,
    write_slots,
)
from epmoe.local.route import Choice, Routing
from epmoe.native.arguments import (
    FLOATS,
    check_forward_only,
    check_tensor,
    describe,
    token_count,
)
from epmoe.rail.opening import open_exchange, prepare

_Result = TypeVar("_Result")
# Before ranks leave, all ranks try so many times to move the experts of these ranks to the others.
_MOST_TRIES_TO_MOVE = 2

_log = logging.getLogger("epmoe")


class _Sleep(NamedTuple):
    """What an `ExpertParallel` keeps while it sleeps."""

    group: dist.ProcessGroup | DeviceMesh | None
    """the group in which it wakes"""
    health: Health
    """the counts when it went to sleep"""
    is_joined: bool = False
    """True if `wake` was interrupted after the group had opened: the windows are there, but this
    rank has not restored its weights.
    """


class _Terms(NamedTuple):
    """What the ranks have agreed on for the next group."""

    config: EPConfig
    placement: Placement
    slots: Table | None
    """with `placement.live` the experts in the slots of each layer and rank; None if the slots
    begin as the placement has them
    """


class _Joined(NamedTuple):
    """The next group once its windows are open, before this rank has become one of its ranks."""

    agreed: Agreement
    terms: _Terms
    seats: Seats
    exchange: Exchange
    keeps_weights: bool
    """whether all ranks have the weights of all experts that they are to hold"""


class ExpertParallel(HoldsWindows):
    """Dispatch and combine over the ranks of a group. All layers of a model can share one.

    It serves one thread at a time. A call during the call of another thread raises RuntimeError,
    and harms no round of the other thread; a Python without the GIL does not promise this.
    `health`, `memory_plan` and `repr` may be called at any time. An ExpertParallel cannot be
    pickled or copied. In a forked child every call raises RuntimeError, and `close` does nothing.

    Args:
        config: the same on all ranks; or the path of its file or the name of a ready one, for
            `EPConfig.load`.
        group: a torch process group with a CPU backend (gloo, or cpu:gloo,cuda:nccl), by default
            the world. Without torch.distributed this process is a group of one. Or a mesh whose
            last dimension, "ep", is the group, and whose other dimensions have replicas of the
            experts: see docs/training.md, "Replicas". Ranks ascend along "ep".
        device: the device of all tensors; by default the CPU, or with exchange.transport "nvlink"
            the current GPU.

    Raises:
        TypeError: an argument has another type.
        ValueError: the config does not fit the group or differs between ranks, or the group has no
            CPU backend.
        EPOpenError: ranks ended, or did not come within `exchange.warmup_timeout_s`. The error
            names them.
        MemoryError: the windows do not fit, on any rank.
        RuntimeError: the ranks or their GPUs cannot reach each other's memory; or another rank has
            failed otherwise.
        ConfigError: the file of the config is missing or wrong.
        BuildError: the native library does not build.
    """

    config: EPConfig
    """The config of the group."""
    device: torch.device
    """The device of all tensors."""
    group: dist.ProcessGroup | None
    """None is this process alone, or that this object is closed."""
    rank: int
    """This rank in the group."""
    size: int
    """R"""
    placement: Placement
    """Where the experts are on the ranks of the group."""
    generation: int
    """How many groups the ranks have had before this one: 0 until `resume`."""
    origin: str
    """A name of this object that is the same on all ranks, old and new ones, in all its groups."""
    processes: list[str]
    """[R], names of the ranks' processes"""
    live: RankExperts = FixedExperts()
    """The experts of this rank. With `placement.live` they move between ranks."""
    followers: WeakSet[Follower]
    """Objects of this rank's layers that depend on its experts. `resume` tells them of the new
    group.
    """
    versions: HeldVersions
    """The versions of a trainer's weights that this rank's layers have."""
    _seat: int
    _exchange: Exchange | None = None
    # The mesh of the group, once there is one.
    _mesh: DeviceMesh | None = None
    # The ranks that are missing, as a mask; and those of them whose processes have ended.
    _missing: int = 0
    _dead: int = 0
    # Whether this rank has the weights of its experts. Callers of `resume` must first load the
    # moves that it returns; the flag is set before that.
    _has_weights: bool = True
    # What this object keeps while it sleeps; None while it is awake.
    _asleep: _Sleep | None = None
    # The thread that is in `alone`, or 0. This thread has the turn also while there is no exchange.
    _joining: int = 0
    # The way in which the router of the config chooses experts, once a caller routes.
    _choice: Choice | None = None
    # In a forked child the process that this object belongs to, otherwise None.
    _owner: int | None = None

    def __init__(
        self,
        config: EPConfig | str | os.PathLike[str],
        group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ):
        config = config_of(config)
        self.device = device_of(config, device)
        # Compiled graphs order rounds by this tensor, see epmoe/native/opaque.py. A tensor that was
        # made in inference mode could not be taken by graphs that run outside of it.
        with torch.inference_mode(False):
            self.order = torch.zeros(1, dtype=torch.uint8, device=self.device)

        # Copy what every call of `route` needs: reading the config takes longer.
        self._needs_bias = config.routing.selection_bias

        # Make what stays when the group changes.
        self._tags = LayerTags()
        self.followers = WeakSet()
        self.versions = HeldVersions()
        self._addresses = addresses_of(config, self.device)
        # The layout of memory in each generation, by which `capture_is_valid` compares them.
        self._layouts = dict[int, object]()
        # Any thread may call `health`. It holds this lock, so that the memory of the counts is not
        # unmapped meanwhile.
        self._reading = RLock()

        # Become a rank of the group. Callers may build their models under a default device of
        # torch, so choose the CPU for the tensors that are made on the way.
        peers = Peers.of(group_of(group), config.exchange.warmup_timeout_s)
        with torch.device("cpu"):
            request = JoinRequest(config.model_dump_json(), versions=self.versions.said())
            self._join(peers, config, request)
        self._mesh = group if isinstance(group, DeviceMesh) else None
        self.exchange.thread = 0

    def survivors(self) -> list[int]:
        """List the ranks of the group that live and are not missing, as far as this rank knows. It
        waits for no rank.

        The ranks ascend. They have the numbers of the group so far until `resume` has returned.
        After an `EPTimeoutError`, reports of other ranks may still arrive, so ask again before each
        try to form a group. A rank that was too slow for the other ranks is missing in its own
        list, too.
        """
        if self._exchange is not None:
            self._missing = self._exchange.missing()
        ended = self.ended()
        survivors = []
        for rank in range(self.size):
            is_missing = self._missing >> rank & 1
            if not is_missing and rank not in ended:
                survivors.append(rank)
        return survivors

    def ended(self) -> list[int]:
        """List the ranks whose processes have ended, as far as this machine sees it. They have the
        same numbers as in `survivors`.
        """
        if self._exchange is not None:
            self._dead = self._exchange.dead()
        return [rank for rank in range(self.size) if self._dead >> rank & 1]

    def resume(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        placement: Placement | None = None,
        *,
        spread_lost: bool = False,
    ) -> tuple[Move, ...]:
        """Join another group: after a failure without the dead ranks, or between any two rounds
        with more ranks.

        Collective over the new group: every rank resumes, or, if it is new, makes an
        `ExpertParallel(config, group)` with the `config.with_placement(placement)` of the others.
        Layers that hold this object go on with it. `health` and the numbers of rounds begin again.
        Earlier handles and their tensors must not be used any more; CUDA graphs may, see
        `capture_is_valid`. docs/recovery.md shows how a host uses it.

        Args:
            group: what the constructor takes, with any ranks of the group so far and any new ones,
                in any order.
            placement: the same on all ranks. By default each expert and copy stays on its rank,
                without the ranks that are gone; see `Placement.without`. With `placement.live`
                ranks then keep their slots, new ranks have empty ones, and the only placement to
                give is `config.of_size(R).place_experts()`: slots begin again.
            spread_lost: the same on all ranks that resume. Without a placement, experts of which no
                copy is left go to the ranks with the fewest experts; with `placement.live` ranks
                get more slots where these are too few.

        Returns:
            The experts of this rank whose weights are not where `placement` has them. The caller
            moves or loads these weights. After `sleep(free)` these are all experts of the rank,
            since only `wake` restores weights.

        Raises:
            TypeError: an argument has another type.
            ValueError: on all ranks, if placement or config differ or do not fit the group, or if
                logical experts have no copy left, without `spread_lost`. Nothing has changed then,
                and the group is still good.
            RuntimeError: this process is a fork of the one that made this object.
            EPResumeError: a rank died or did not arrive within `exchange.warmup_timeout_s`.
                `resume` may be called again with another group; until then, this object may be
                closed.
            MemoryError: the windows do not fit. This object is closed, and `resume` may be called
                again.
        """
        return self.alone(partial(self.go_on, group, placement, spread_lost))

    def go_on(
        self,
        group: dist.ProcessGroup | DeviceMesh | None,
        placement: Placement | None,
        spread_lost: bool,
        confirm: Confirm = lambda _: True,
        asleep: _Sleep | None = None,
    ) -> tuple[Move, ...]:
        """Do what `resume` describes. The caller is within `alone`: it is `resume`, `wake` or
        `epmoe.group.recovery.regroup`.

        `confirm` is called once the windows are open. Its argument is a function that returns the
        ranks that are missing by then, as a mask. It returns whether the group may begin; if not,
        this rank raises EPResumeError, as it does if another rank has not arrived. `asleep` is what
        `_asleep` becomes in the new group: `wake` gives a `_Sleep`, since it still has to restore
        weights, and the other callers give None.
        """
        if not isinstance(placement, Placement | None):
            raise TypeError(f"`placement` must be a Placement, got {describe(placement)}")
        timeout_s = self.config.exchange.warmup_timeout_s
        peers = Peers.of(group_of(group), timeout_s)

        # Write down what this rank asks for, and what it has.
        config, request = self._resume_request(peers, placement, spread_lost)
        placement_before = self.placement
        # For each rank of the new group, its number in the group so far. This rank knows only its
        # own, and leaves it out if it has no weights that could be taken from there.
        ranks_before: list[int | None] = [None] * peers.size
        if self._has_weights:
            ranks_before[peers.rank] = self.rank

        # Become a rank of the new group.
        try:
            # Wait for the GPU first: a kernel that still runs must keep its windows.
            if not self._addresses.processor.ends(timeout_s):
                raise TimeoutError("the GPU has not finished its work")
            with torch.device("cpu"):
                self._join(peers, config, request, confirm, asleep)
        except EPOpenError as error:
            raise EPResumeError(timeout_s, error) from None
        except (RuntimeError, OSError) as error:
            raise EPResumeError(timeout_s, error) from error
        self._has_weights = True
        self._mesh = group if isinstance(group, DeviceMesh) else None

        # Find the experts that this rank has to move or load.
        moves = self.live.to_load(request.held, placement_before, ranks_before)
        if moves:
            # The weights that the caller loads may be of another version.
            self.versions.doubt()
        return moves

    def _resume_request(
        self, peers: Peers, placement: Placement | None, spread_lost: bool
    ) -> tuple[EPConfig, JoinRequest]:
        """Make the config that this rank wants for the next group, and the request that it sends to
        the other ranks there.
        """
        keeps = placement is None
        config = self.config
        if placement is not None:
            config = config.with_placement(placement)

        # With `placement.live` experts stay in their slots, unless this rank has lost its weights.
        held = None
        if keeps:
            config, held = self.live.kept(config, peers.size, self._has_weights)
        request = JoinRequest(
            config=config.model_dump_json(),
            origin=self.origin,
            generation=self.generation,
            rank=self.rank,
            keeps=keeps,
            held=held,
            spread_lost=keeps and spread_lost,
            seat=self._seat,
            versions=self.versions.said(),
        )
        return config, request

    def alone(self, call: Callable[[], _Result]) -> _Result:
        """Run `call` while this thread has the turn, and return its result.

        A thread has the turn if no other thread may use this object. While `call` runs, a call of
        another thread raises RuntimeError, and so does a call from within `call`, or in a fork. A
        collective call of several steps keeps its turn in this way from its start to its end, also
        when it replaces the windows. A context manager would not do, see `takes_turn`.
        """
        if self._owner is not None:
            raise EPStateError(self._why_unusable())
        generation = self.generation
        caller = get_ident()

        # Take the turn of the exchange, if there is one, and that of this object.
        thread_before = 0
        if self._exchange is not None:
            thread_before = self._exchange.enter()
        # Ask again for the exchange, since another thread may have released it meanwhile.
        if self._exchange is None and self._joining not in (0, caller):
            raise RuntimeError(ANOTHER_THREAD)
        joining_before, self._joining = self._joining, caller

        try:
            return call()
        except BaseException:
            # If this rank is in another group by now, the exception has kept from the caller which
            # weights to load. An object that sleeps learns that by its next call of `wake`.
            if self.generation != generation and not self.asleep:
                self.lose_weights()
            raise
        finally:
            # Give the turn back. This call may come from a signal handler that has interrupted
            # another call of this thread, which then has the turn again. But in the windows of
            # another group nobody has the turn: the interrupted call was made in the old ones.
            self._joining = joining_before
            if self._exchange is not None:
                if self.generation != generation:
                    thread_before = 0
                self._exchange.thread = thread_before

    def lose_weights(self) -> None:
        """Leave the group, because weights are not where `placement` has them, so that no round may
        run. The waits of the other ranks end at once. This rank may resume in another group; all
        its experts are then among the moves that `resume` returns.
        """
        self._has_weights = False
        self._asleep = None
        self.versions.doubt()
        if self._exchange is not None:
            self._exchange.end_waits()
        self._leave()

    def close(self) -> None:
        """Release the windows and the group. Handles of earlier rounds, and their tensors, must not
        be used any more.

        With a round open, the waits of the other ranks end at once, with an EPTimeoutError that
        names this rank. `rank`, `size`, `survivors` and `resume` still work.
        """
        self._leave()
        self._asleep = None
        # Give the scratch memory back, too, unless this is a fork, or another thread is mapping it
        # for another group.
        caller = get_ident()
        is_mapped_by_another = self._joining not in (0, caller)
        if self._owner is None and self._exchange is None and not is_mapped_by_another:
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
            self._addresses.unmap_scratch()

    def _leave(self) -> None:
        """Release the windows and the group, but keep the scratch memory mapped. It is a part of
        `close`, `sleep`, `lose_weights` and `_join`.

        A CUDA graph that is replayed later still reads in scratch that its group has gone, and does
        nothing.
        """
        # Keep which ranks are missing, for later calls of `survivors`.
        if self._exchange is not None:
            self.survivors()

        exchange, self._exchange = self._exchange, None
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

    def sleep(self, free: Callable[[], object] | None = None) -> None:
        """Give the memory of windows and scratch back, between two rounds, until `wake`. Every rank
        calls it.

        It waits for no other rank: the memory is free once all ranks sleep. Addresses and CUDA
        graphs stay; until then no graph may be replayed, and handles of earlier rounds, and their
        tensors, must not be used any more. All calls but `wake`, `resume`, `close` and `health`
        raise EPStateError. `free` is called once nothing runs on the GPU any more: it may free
        weights. Raises EPStateError if a round is open or this object is closed, and what
        `check` and `free` do; then it is awake.
        """
        self.alone(partial(self._sleep, free))

    def _sleep(self, free: Callable[[], object] | None) -> None:
        """Do what `sleep` describes. The caller is within `alone`."""
        # Check that no round is open, nothing runs any more, and nothing was reported.
        exchange = self.exchange
        if exchange.rounds.state != CLOSED:
            raise EPStateError("a round is open: combine, or abort on all ranks, before sleep")
        exchange.wait_for_device(self.config.exchange.timeout_s)
        exchange.poll()

        # Let the caller free its weights, then release the windows.
        asleep = _Sleep(group=self._mesh or self.group, health=self._counts(wait=False))
        freed: list[bool] = []
        try:
            if free is not None:
                # Free the weights, and note in `freed` that this has happened. `map` makes both
                # calls without a line of Python between them, so no signal handler can raise there.
                calls: list[Callable[[], object]] = [free, partial(freed.append, True)]
                list(map(operator.call, calls))
            # Keep the counts before the windows go: another thread may call `health` meanwhile.
            self._asleep = asleep
            self._leave()
        finally:
            # Once the weights have gone, this object sleeps, even if a signal handler has raised.
            if free is None or freed:
                self._has_weights = self._has_weights and free is None
                self._asleep = asleep
                self._leave()
                self._unmap_scratch()

    def wake(self, restore: Callable[[], object] = lambda: None) -> None:
        """Wake after `sleep`, in the same group: windows are mapped where they were, and cleared.
        Collective.

        CUDA graphs of the group are valid; `restore` puts weights that have gone where they were.
        No other thread gets its turn before. Rounds and `health` begin again, and `generation` is
        another one.

        Raises EPStateError if this object does not sleep, and what `resume` does where a rank
        has died or the memory has gone to others: it may be called again then. Where `restore`
        raises, this object is closed: waits of the other ranks end at once, and `resume` has all
        experts of this rank among its moves.
        """
        if self._asleep is None:
            raise EPStateError("this ExpertParallel does not sleep: `wake` comes after `sleep`")
        self.alone(partial(self._wake, self._asleep, restore))

    def _wake(self, sleep: _Sleep, restore: Callable[[], object]) -> None:
        """Do what `wake` describes. The caller is within `alone`."""
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
                if self._exchange is None:
                    self._has_weights = has_weights
                    self._addresses.unmap_scratch()
                raise
        # Let the caller bring its weights back. From here on an exception closes this object.
        try:
            self._asleep = None
            restore()
        except BaseException:
            self.lose_weights()
            raise

    @property
    def asleep(self) -> bool:
        """Whether `sleep` has been called, and neither `wake` nor `resume` since."""
        return self._asleep is not None

    def capture_is_valid(self, generation: int) -> bool:
        """Whether a CUDA graph that was captured in the given generation may be replayed now.

        The graph is valid if this rank has the same number as then, and the group has the same size
        and the same placement of experts, over one node. Other ranks may have come and gone
        meanwhile. With `topology.max_ranks` the group may have any size up to that number, if its
        ranks have as many slots as then. A replay of a graph that is not valid does nothing: y is
        zeros, and the next `poll` raises EPStateError. While rounds are refused because ranks have
        different versions of a trainer's weights, no graph is valid until a new `WeightReceiver`
        has been made.
        """
        if self._exchange is None:
            return False
        now = self._layouts.get(self.generation)
        if not self.versions.rounds_may_begin:
            return False
        return now is not None and self._layouts.get(generation) == now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close this object. After an exception the waits of the other ranks end at once, even if
        no round is open on this rank.
        """
        if kind is not None and self._exchange is not None:
            self._exchange.end_waits()
        self.close()

    @property
    def exchange(self) -> Exchange:
        """The exchange that carries the rounds, for integrations of a host. Raises EPStateError if
        this object is closed or sleeps.
        """
        if self._exchange is None or self._asleep is not None:
            raise EPStateError(self._why_unusable())
        return self._exchange

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of experts that train, whose last dimension, "ep", is the group; None without a
        group.
        """
        if self.group is None:
            return None
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=(EP,))
        return self._mesh

    @property
    def num_local_experts(self) -> int:
        """e: physical experts of this rank."""
        return self.placement.num_local_experts(self.rank)

    @property
    def expert_map(self) -> Tensor:
        """int32: for each id in `recv.ids`, its index among this rank's experts, −1 for an expert
        of another rank.

        With one node these ids are physical experts. With several, they number the physical experts
        of this node.
        """
        return self.exchange.views["table.expert_map"]

    def route(
        self, logits: Tensor, bias: Tensor | None = None, num_tokens: int | Tensor | None = None
    ) -> Routing:
        """Choose experts by `epmoe.route` with the config's routing: logits [T, E] → ids int32 [T,
        K], weights fp32 [T, K].

        Raises ValueError without `bias` where `routing.selection_bias` is set.
        """
        if bias is None and self._needs_bias:
            raise ValueError(
                "`bias` must be given, since `routing.selection_bias` says that the router has one"
            )
        exchange = self.exchange
        model = self.config.model
        # Check the sizes against the config, which `epmoe.route` does not know. The complete check
        # takes longer than these conditions, so it runs only where it will raise.
        shape: tuple[int, ...] = getattr(logits, "shape", ())
        if len(shape) != 2 or shape[1] != model.num_experts or logits.device != self.device:
            check_tensor("logits", logits, FLOATS, ("T", model.num_experts), self.device)
        if logits.dtype not in FLOATS:
            check_tensor("logits", logits, FLOATS, ("T", model.num_experts), self.device)
        if logits.requires_grad:
            check_forward_only(logits)
        tokens = None
        num_real = shape[0]
        if num_tokens is not None:
            tokens, num_real = token_count(num_tokens, num_real, self.device)
        counters = exchange.views["health.counters"]
        # Take the turn here and not by `exchange.run`, which would cost each layer 0.3 µs.
        thread_before = exchange.enter()
        try:
            return self.choice.of(logits, bias, tokens, num_real, counters)
        finally:
            exchange.thread = thread_before

    @property
    def choice(self) -> Choice:
        """How the config's router chooses experts. Raises what `epmoe.route` does for it."""
        if self._choice is None:
            model = self.config.model
            options = self.config.routing.options
            self._choice = Choice.checked(model.num_experts, model.num_experts_per_tok, **options)
        return self._choice

    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        scales: Tensor | None = None,
        num_tokens: int | Tensor | None = None,
        layout: Layout = "expert",
        apply_router_weight_on_input: bool = False,
        tag: int = 0,
        aligned: bool = False,
        extra: Tensor | None = None,
    ) -> Dispatched:
        """Send each token once to each rank that holds one of its experts: see docs/design.md,
        "dispatch".

        Collective: every rank calls, also with T = 0. On a GPU the host does not wait for the
        device, so an EPMismatchError, EPOrderError or EPTimeoutError may come from a later call.

        Args:
            x: [T, D] fp32, fp16 or bf16, 0 ≤ T ≤ M. D and dtype may be smaller than the config's
                but are equal on all ranks. With `scales`, fp8 e4m3; then combine takes and returns
                rows in the config's dtype.
            ids: int32 or int64 [T, K], logical experts. −1, E and any other id out of range mean
                "no expert".
            weights: fp32, bf16 or fp16 [T, K]. A pair of weight 0 does not travel; NaN and Inf
                count as 0.
            scales: fp32 [T, ⌈D/128⌉] of rows that are already quantized, if `exchange.payload` is
                fp8. D must be a multiple of 16, over several nodes of 128.
            num_tokens: int or int32 scalar tensor on the device. Rows at and past it are padding
                and are not sent.
            layout: "expert" for expert-major rows, "rank" for one slab of rows for each source
                rank.
            apply_router_weight_on_input: with layout="expert" only. Each pair's row is weight · x,
                an fp32 product rounded once to x's dtype, or with an fp8 payload its scales are.
                combine then adds without weights.
            tag: a number for the layer, from 0 to 32767, which every rank checks: ranks in
                different layers get an error in place of one another's rows. A CUDA graph keeps the
                tag of its capture. With `placement.live` from 1 to `placement.layers`: it chooses
                the layer's table.
            aligned: each expert's segment starts at a multiple of `Dispatched.alignment` rows, as
                GEMMs over blocks of rows want it; equal on all ranks. Without effect where
                `capacity.alignment` is set, which holds anyway.
            extra: [T, …] of any dtype: up to `capacity.extra_bytes` bytes a token, which arrive bit
                by bit as `Dispatched.extra` or `recv.extra`. Dtype and shape behind T are equal on
                all ranks. Not with `apply_router_weight_on_input`.

        Returns:
            The open round, valid until combine, combine_partial or combine_send is called.

        Raises:
            TypeError: an argument has another type or dtype; nothing was sent.
            ValueError: an argument has another value, shape or device; nothing was sent.
            RuntimeError: a round is still open, an input requires grad in grad mode, or this object
                is closed.
            EPMismatchError: the calls of the ranks did not match.
            EPTimeoutError: ranks did not arrive in time, or left. Ctrl-C, too, ends a wait, and
                leaves the round open.
        """
        # The arguments go by position, in the order of the fields of `Call`: names would cost each
        # round 0.4 µs.
        arguments = (
            x,
            ids,
            weights,
            scales,
            num_tokens,
            layout,
            apply_router_weight_on_input,
            tag,
            aligned,
            extra,
        )
        return self.exchange.dispatch(new_call(arguments))

    def dispatch_send(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        scales: Tensor | None = None,
        num_tokens: int | Tensor | None = None,
        layout: Layout = "expert",
        apply_router_weight_on_input: bool = False,
        tag: int = 0,
        aligned: bool = False,
        extra: Tensor | None = None,
    ) -> Sent:
        """Send the rows of `dispatch`, with its arguments and errors, and wait for no rank (see
        `abort`).

        Returns the open round, for `dispatch_recv`. No argument, `num_tokens` included, may be
        overwritten before `dispatch_recv` has returned.
        """
        # The arguments go by position, as in `dispatch`.
        arguments = (
            x,
            ids,
            weights,
            scales,
            num_tokens,
            layout,
            apply_router_weight_on_input,
            tag,
            aligned,
            extra,
        )
        return self.exchange.dispatch_send(new_call(arguments))

    def dispatch_recv(self, sent: Sent) -> Dispatched:
        """The receive phase of `dispatch`: waits for every rank's tokens, and returns the round as
        `dispatch` does.

        Raises `dispatch`'s EPMismatchError and EPTimeoutError, and ValueError if `sent` belongs
        to another round, or was received before.
        """
        return self.exchange.dispatch_recv(sent)

    def combine(
        self, expert_rows: Tensor, dispatched: Dispatched, *, out: Tensor | None = None
    ) -> Tensor:
        """Sum the expert-major outputs of each token's experts, weighted. Collective.

        The sum is fp32, over ranks in rank order: bitwise the same on every run. Padded rows of y
        are zeros.

        Args:
            expert_rows: [N, D] in the dtype of x, in the order of `dispatched.rows`; N ≥
                expert_offsets[e].
            dispatched: the open round, of layout="expert".
            out: y itself, contiguous [T, D] in the dtype of x and aligned to 16 bytes; a new tensor
                by default.

        Returns:
            y [T, D] in the dtype of x.

        Raises:
            TypeError, ValueError, RuntimeError, EPMismatchError, EPTimeoutError: as in `dispatch`.
            EPOverflowError: more expert-major rows arrived than `capacity.max_expert_rows`.
            EPAbortedError: other ranks have aborted the round, on a GPU this one or an earlier one.
        """
        return self.exchange.combine("expert", expert_rows, dispatched, out)

    def combine_partial(
        self, partial: Tensor, dispatched: Dispatched, *, out: Tensor | None = None
    ) -> Tensor:
        """Sum rows that a fused MoE has already weighted and summed over this rank's experts:
        `combine` for layout="rank". Collective. Errors are those of `combine`.

        Args:
            partial: [R, M, D] in the dtype of x, in the slots of `dispatched.recv`. Slots past
                `recv.counts` are not read.
            dispatched: the open round, of layout="rank".
            out: see `combine`.

        Returns:
            y [T, D] in the dtype of x.
        """
        return self.exchange.combine("rank", partial, dispatched, out)

    def combine_send(
        self, rows: Tensor, dispatched: Dispatched, *, out: Tensor | None = None
    ) -> None:
        """The send phase of `combine`, with its arguments and errors: sends, and waits for no rank.

        `rows` are the outputs [N, D] of `combine`, or with layout="rank" the rows [R, M, D] of
        `combine_partial`, in the dtype of x. `combine_recv` returns `out`.
        """
        self.exchange.combine_send(rows, dispatched, out)

    def combine_recv(self, dispatched: Dispatched) -> Tensor:
        """The receive phase of `combine`: waits for every rank's rows, and returns y [T, D] in the
        dtype of x.

        Raises `combine`'s EPTimeoutError, EPOverflowError and EPAbortedError, and ValueError where
        `dispatched` is not the round that combine_send was given.
        """
        return self.exchange.combine_recv(dispatched)

    def abort(self, dispatched: Sent | Dispatched | None = None) -> None:
        """Close a round that an exception left open, between any two calls. Collective: every rank
        aborts or combines.

        This rank sends no rows; the other ranks get sums without its experts. It allocates nothing
        and waits for no rank, so it also works after an out-of-memory error and in a signal
        handler. On the CPU the next dispatch or dispatch_send waits instead, until all ranks have
        ended the round.

        `dispatched` is what the round's last call returned, or after combine_send what that was
        given: ValueError for any other handle, and EPMismatchError, EPTimeoutError, EPOverflowError
        or EPAbortedError as in `poll`. None closes whatever round is open, unless it is another
        thread's, and raises nothing.
        """
        if dispatched is not None or self._exchange is not None:
            self.exchange.abort(dispatched)

    def skip(self, shape: RoundShape | None = None, *, tag: int = 0) -> None:
        """Take part in a round without tokens, and abort it: for a rank that raised before it
        called dispatch.

        Collective: it takes the place of dispatch and combine. The other ranks get through the
        round and learn that this rank has aborted it. It waits for no rank, except after a round
        that was aborted. `shape` and `tag` are those of dispatch on the other ranks; the shape is
        by default `last_shape`.

        Raises what `dispatch` does for arguments and earlier calls, and RuntimeError if a round
        is open (`abort` closes it), this object is closed, or another thread has the round.
        """
        exchange = self.exchange
        if exchange.rounds.is_of_another():
            raise EPStateError("another thread has the round, so this one has none to skip")
        call = exchange.templates.no_tokens(shape or self.last_shape, tag)
        exchange.skip(call)

    @property
    def last_shape(self) -> RoundShape:
        """The shape of this object's last round; before the first, that of the config."""
        template = self.exchange.rounds.template
        if template is None:
            return RoundShape.of(self.config)
        return template.shape

    def giving_up(
        self, tag: int, shape: Callable[[], RoundShape | None] = lambda: None
    ) -> AbstractContextManager[None]:
        """Make the body of this context take part in exactly one round. If the body raises, this
        rank aborts the round, or skips it if it was not opened yet, so that the other ranks do not
        wait for this one.

        The exception of the body is raised; an error of the exchange never takes its place. `tag`
        and the result of `shape` are the arguments for `skip`.
        """
        exchange = self.exchange
        return exchange.giving_up(partial(self._skip_of, exchange, tag, shape))

    def give_up(
        self,
        exchange: Exchange,
        before: int,
        tag: int,
        shape: Callable[[], RoundShape | None] = lambda: None,
    ) -> None:
        """Do what `giving_up` does after an exception: abort or skip the round.

        `exchange` is the exchange that this object had when the caller began its round, and
        `before` the count of rounds of this exchange then.
        """
        exchange.give_up(before, partial(self._skip_of, exchange, tag, shape))

    def _skip_of(
        self, exchange: Exchange, tag: int, shape: Callable[[], RoundShape | None]
    ) -> None:
        """Skip a round of `exchange`. If this object was resumed or closed meanwhile, this exchange
        has gone, and there is nothing to skip.
        """
        if exchange is self._exchange:
            self.skip(shape(), tag=tag)

    def at_most(self, tokens: int | None) -> AbstractContextManager[None]:
        """Promise that no rank brings more than `tokens` tokens to a round within this context.

        Over several nodes, slabs for other nodes then have only so many rows. On one node, the
        number chooses the GEMM of the experts, since a rank with few tokens cannot know whether
        another rank brings many.

        All ranks give the same number, from 0 on. With None it is as without this context: slabs
        have `capacity.max_rows_per_node` rows, and the GEMM is chosen by this rank's own tokens. A
        CUDA graph keeps the number of its capture. Raises RuntimeError within what torch.compile
        traces, and in a closed object.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "`at_most` must be outside of what torch.compile traces: call the compiled model "
                "in it"
            )
        return self.exchange.at_most(tokens)

    def new_tag(self, tag: int | None = None, owner: object = None) -> int:
        """Take a tag for one more layer, which no other layer of this object has, and return it.
        All ranks take the same tags.

        `tag` is a number from 0 to 32767, by default `next_tag`. When the object `owner` is
        collected, other layers may take the tag; without an owner it stays taken. Raises ValueError
        if another layer has the tag, or if there is no further number.
        """
        return self._tags.new(tag, owner)

    @property
    def next_tag(self) -> int:
        """The tag that `new_tag` takes next by default: the first number above the last tag, from 1
        on, that no layer has had. Raises ValueError if there is none.
        """
        return self._tags.next

    @property
    def slots(self) -> Tensor:
        """int32 [layers, P], with `placement.live`, a copy: the logical expert in each slot, or −1.
        Rank r has slots r·S to (r + 1)·S − 1. Raises EPStateError without `placement.live`.
        """
        return self._moving.slots.clone()

    def save_slots(self, path: str | os.PathLike[str]) -> None:
        """Write `slots` to a JSON file, in one step. A later job begins with these slots if its
        config names the file in `placement.slots`. Between two moves all ranks have the same slots,
        so one rank calls this method. Raises EPStateError without `placement.live`.
        """
        write_slots(path, self._moving.slots)

    @takes_turn_of_exchange
    def replace(
        self, slots: Tensor, weights: SlotWeights | None = None, *, loads: Tensor | None = None
    ) -> Moves:
        """Begin to move experts, with `placement.live`: rounds go on meanwhile, also replays of
        CUDA graphs.

        Every rank calls it with the same arguments, at its own time, and then `poll` between
        rounds, which takes the moves further. No rank waits for another. While an expert moves, its
        other copies do its work.

        Args:
            slots: int32 or int64 [layers, P], the expert that each slot is to hold, or −1. Every
                expert has a slot, and at most one on a rank. Experts that stay on their rank stay
                in their slot, whichever this names.
            weights: takes a tag and the index of a local slot, and returns the tensors that hold
                the slot's weights, always the same ones: without gaps, on the device of `ep`, and
                with the same sizes and order in memory for all slots of a layer, on all ranks. By
                default those of the `MoELayer` with this tag.
            loads: [layers, E], by which copies share their experts' tokens; see `share`. By default
                the last ones.

        Returns:
            The moves: `done`, `cancel()`, `waits_for()`, `stalls`.

        Raises:
            EPStateError: without `placement.live`, or other moves are not done.
            ValueError: an argument does not fit, or experts without a second copy are to change
                places where no slot is free. Nothing has begun then, nor where `weights` raises,
                and the other ranks drop this call.
            EPRefusedError: from a later `poll`, where another rank raised here or was given other
                arguments. No expert has moved on any rank, and all ranks may call again.
        """
        return self._moving.replace(slots, weights, loads)

    @takes_turn_of_exchange
    def share(self, loads: Tensor) -> None:
        """Divide the tokens of experts among their copies by these loads [layers, E], from a later
        `poll` on.

        Nothing moves. `loads` are numbers of any dtype, on any device. Ranks may call it at
        different times; with the same loads, shares are balanced. Raises EPStateError without
        `placement.live`, and ValueError if `loads` do not fit.
        """
        self._moving.share(loads)

    @takes_turn_of_exchange
    def loads(self) -> Tensor:
        """Count the rows that the experts of all ranks have received since the start or `resume`:
        float64 [layers, E], on the CPU.

        It sends this rank's counts to all ranks, and waits for no rank. So the counts of another
        rank are those of that rank's last call. Raises EPStateError without `placement.live`.
        """
        self._moving.send_loads()
        self._moving.mail.flush()
        return self._moving.loads()

    @takes_turn_of_exchange
    def apply(self, timeout_s: float | None = None) -> None:
        """Wait until all moves are done and all shares in use. Collective: all ranks call it
        between the same rounds.

        From then on all ranks choose by the same tables, so that y has the same bits on every run.
        Raises EPTimeoutError after `timeout_s` seconds, by default the deadline of a round, or once
        a rank has ended. If the ranks that it names are only late, rounds go on, and `apply` may be
        called again.
        """
        self._moving.finish(timeout_s)

    def logical_experts(self, tag: int = 0) -> list[int]:
        """The logical experts of this rank's local experts, with `placement.live` those of the
        layer `tag` now, where −1 is an empty slot. Raises EPStateError while experts move.
        """
        return self.live.experts(tag)

    def holder(self, expert: int, tag: int = 0) -> tuple[int, int]:
        """Return a rank that holds a logical expert, and the index of the expert among the experts
        of that rank. The result is the same on all ranks. `tag` and errors are those of
        `logical_experts`.
        """
        return self.live.holder(tag, expert)

    def memory_plan(self) -> MemoryPlan:
        """Return the plan of this rank's memory, which has every buffer, to the byte."""
        return self.exchange.plan

    def health(self, wait: bool = True) -> Health:
        """Return this rank's counts since the start, which never fall. Any thread may call it, but
        not during the capture of a CUDA graph.

        On a GPU it first waits for the current stream. With `wait=False` it waits for no kernel and
        delays none, so the counts of kernels that are running are partial. While this object
        sleeps, the counts are those from before. Raises EPStateError if this object is closed.
        """
        if self._asleep is None or self._owner is not None:
            # The property raises EPStateError if this object is closed.
            _ = self.exchange
            with self._reading:
                # Another thread may have put this object to sleep meanwhile, so ask again.
                if self._asleep is None:
                    return self._counts(wait)
        return self._asleep.health

    def _counts(self, wait: bool) -> Health:
        """Read the counts of the exchange, and add the count of refused plans to them."""
        health = self.exchange.health(wait)
        return dataclasses.replace(health, refused_plans=self.live.refused_plans)

    def poll(self) -> None:
        """Raise what kernels have reported so far. It never waits, and does not stop the device.

        With `placement.live` it also takes moves and shares further: call it between the rounds, on
        the stream of their replays if they are replays. Every call of this object looks for reports
        by itself, but the replay of a CUDA graph is no call. After a timeout all replays yield
        zeros, so poll at every step. What a replay that is still running reports is raised by a
        later poll.

        Raises:
            EPTimeoutError: ranks did not arrive in time; every poll raises it again.
            EPMismatchError: the calls of the ranks did not match.
            EPOrderError: on a GPU, dispatch and combine of this rank did not alternate.
            EPOverflowError: more expert-major rows arrived than `capacity.max_expert_rows`.
            EPAbortedError: other ranks have aborted the round, on a GPU this one or an earlier one.
            EPRefusedError: of `replace`.
        """
        exchange = self.exchange
        exchange.run(self._poll)

    @takes_turn_of_exchange
    def check(self, timeout_s: float | None = None) -> None:
        """Wait for everything that has been launched on the device, then `poll`.

        A failure that a kernel reports meanwhile is raised at once. Raises EPTimeoutError if the
        device has not ended its work within `timeout_s` seconds; with None there is no limit.
        """
        self.exchange.wait_for_device(timeout_s)
        self.poll()

    def _join(
        self,
        peers: Peers,
        config: EPConfig,
        request: JoinRequest,
        confirm: Confirm = lambda _: True,
        asleep: _Sleep | None = None,
    ) -> None:
        """Become a rank of the group of `peers`. The constructor and `go_on` call it. Collective:
        if a step fails on one rank, all ranks raise.

        The windows of the group so far are released before the new ones open, since the memory may
        be too small for both; but only once it is known that all ranks can join. When all ranks
        have succeeded, this object is a rank of the new group, even if a signal handler raises
        afterwards. `confirm` and `asleep` are those of `go_on`.
        """
        joined: _Joined | None = None
        caller = get_ident()
        stream = self._addresses.processor.stream()

        # This is the last step, once all ranks have opened their windows. It runs on another
        # thread, where no signal handler can interrupt it.
        def become() -> None:
            """Confirm the group with the other ranks, and make this object a rank of it."""
            assert joined is not None
            exchange = joined.exchange
            if not confirm(lambda: exchange.missing() | exchange.dead()):
                raise RuntimeError("the group was not confirmed")
            try:
                # On CPUs `stream` is None, and the context does nothing.
                with torch.cuda.stream(stream):
                    self._become(peers, joined, caller, asleep)
            except BaseException:
                self._exchange = None
                exchange.release()
                raise

        try:
            with opening(peers, become) as agreed:
                # Agree with the other ranks on the next group, and ask all whether they keep their
                # weights. After the gather it is known that all ranks can join.
                terms = self._agree(peers, config, request, agreed)
                keeps_weights = all(peers.all_gather(self._keeps_weights(terms, peers.rank)))

                # Release the windows of the group so far, if there is one.
                self._leave()

                # Open the new windows. Rounds outside of inference mode could not write buffers
                # that were made in it.
                seats = agreed.seats(terms.config)
                with torch.inference_mode(False):
                    exchange = open_exchange(
                        terms.config, peers, seats, self._addresses, agreed.name
                    )
                    joined = _Joined(
                        agreed=agreed,
                        terms=terms,
                        seats=seats,
                        exchange=exchange,
                        keeps_weights=keeps_weights,
                    )
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
            if self._exchange is None:
                self._addresses.unmap_windows()
        elif self._exchange is not joined.exchange:
            joined.exchange.release()

    def _agree(
        self, peers: Peers, config: EPConfig, request: JoinRequest, agreed: Agreement
    ) -> _Terms:
        """Agree with all ranks on the next group, by the requests that they exchange. It fills
        `agreed`, and changes nothing of this object yet. Collective.

        `config` and `request` are what this rank asks for.
        """
        # If the config names a file of slots, ask for the slots that the file has for this rank.
        slots_of_file = None
        if config.placement.slots is not None:
            slots_of_file = read_slots(config)
            held = slots_of(slots_of_file, peers.rank, config)
            request = dataclasses.replace(request, held=held)
        agreed.reach(peers, request)

        # If the ranks keep their placement, give the experts of ranks that are gone to others.
        if agreed.former is not None and not config.placement.live:
            gone = set(range(config.topology.ep_size)).difference(agreed.former)
            placement = config.place_experts().without(gone, spread_lost=request.spread_lost)
            config = config.with_placement(placement)
        check_size(config, peers)

        # With `placement.live`, make the table of slots from the slots that the ranks hold.
        spread_lost = any(request.spread_lost for request in agreed.requests)
        held_by_ranks = [request.held for request in agreed.requests]
        slots = agree_on_slots(config, held_by_ranks, peers.rank, slots_of_file, spread_lost)

        # Run the checks that may raise on this rank alone: of its device, and of the native
        # library. `device_of` is called for its errors only.
        device_of(config, self.device)
        prepare(config, self.device)
        return _Terms(config=config, placement=config.place_experts(), slots=slots)

    def _become(self, peers: Peers, joined: _Joined, caller: int, asleep: _Sleep | None) -> None:
        """Make this object a rank of the group whose windows are open. `caller` is the thread that
        has the turn, and `asleep` is what `_asleep` becomes.
        """
        agreed = joined.agreed
        terms = joined.terms
        exchange = joined.exchange
        # Take over what the ranks have agreed on, and this rank's place in the group.
        self.config = terms.config
        self.placement = terms.placement
        self.origin = agreed.origin
        self.generation = agreed.generation
        self.processes = [request.process for request in agreed.requests]
        self.group = peers.group
        self.rank = peers.rank
        self.size = peers.size
        self._seat = joined.seats.of_ranks[peers.rank]
        # Take over the windows.
        exchange.thread = caller
        self._exchange = exchange
        self._missing = 0
        self._dead = 0
        self._layouts[self.generation] = exchange.layout
        # Compare the versions of weights, and refuse rounds as long as ranks have different ones.
        self.versions.compare(
            [request.versions for request in agreed.requests], joined.keeps_weights
        )
        exchange.templates.check_weights = self.versions.check
        # Make the experts of this rank. Layers have told the experts of the group so far where
        # their weights lie, so hand that on. Then let the objects of layers follow.
        weights = self.live.weights
        self.live = experts_on(exchange, terms.config, terms.placement, terms.slots, weights)
        for follower in self.followers:
            follower.regroup(self.num_local_experts, whole=joined.keeps_weights)
        self._asleep = asleep
        _open.add(self)

    def _keeps_weights(self, terms: _Terms, rank: int) -> bool:
        """Whether this rank already has the weights of each expert that it is to hold in the next
        group, in the same slot. `rank` is its number in that group.
        """
        slots = terms.slots
        slots_begin_again = terms.config.placement.live and slots is None
        if slots_begin_again or not self._has_weights:
            return False

        # List the experts that this rank is to hold, by layer.
        if slots is None:
            wanted = [terms.placement.logical_experts(rank)]
        else:
            wanted = slots_of(slots, rank, terms.config)

        # List the experts that this rank has held so far. Before its first group it has held none.
        had = self.live.held_by_layer() or [[] for _ in wanted]
        return not lacking(wanted, had)

    def _why_unusable(self) -> str:
        """Say in an error why there is no exchange: a fork, sleep, or the end."""
        if self._owner is not None:
            return (
                f"this ExpertParallel belongs to process {self._owner}, of which this process is a "
                "fork: each process makes its own"
            )
        if self.asleep:
            return "this ExpertParallel sleeps: call `wake`"
        return "this ExpertParallel is closed"

    def _disown(self) -> None:
        """Drop the windows of the parent in a forked child. Nothing is destroyed there, since
        destructors would end threads and close connections that only the parent has.
        """
        if self._owner is None:
            self._owner = os.getppid()
        self.live.disown(self._why_unusable())
        # A reference that nobody gives back keeps each of these objects until the process ends.
        for kept in (self._exchange, self.group, self.live):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._exchange = None
        self.group = None

    def _poll(self) -> None:
        """Do what `poll` describes. The caller has the turn."""
        self.exchange.poll()
        self.live.step()

    @property
    def _moving(self) -> LiveExperts:
        """The experts of this rank, which can move. Raises EPStateError without `placement.live`,
        and if this object is closed.
        """
        # The property raises EPStateError if this object is closed.
        _ = self.exchange
        return self.live.moving()

    def __repr__(self) -> str:
        # Name the shape of rounds.
        model = self.config.model
        M = self.config.capacity.max_num_tokens_per_rank
        shape = (
            f"E={model.num_experts} K={model.num_experts_per_tok} D={model.hidden_size} "
            f"{model.dtype}, M={M}"
        )
        # Name the state of this object.
        exchange = self._exchange
        if self.asleep:
            state = "asleep"
        elif exchange is not None:
            state = exchange.rounds.describe(exchange.rounds.count)
        elif self._owner is None:
            state = "closed"
        else:
            state = f"of process {self._owner}"
        # Name the rank and its group.
        where = f"rank {self.rank} of {self.size}"
        if self.generation:
            where += f", generation {self.generation}"
        return f"ExpertParallel({where}, {shape}, {self.device}, {state})"


def join_group(
    store: Store,
    *,
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    backend: str = "gloo",
) -> ExpertParallel:
    """Become a new rank of a group whose ranks call `recover` or `resize`. It waits for them.

    The caller loads the experts of this rank: `ep.logical_experts(tag)` says which they are, with
    `placement.live` in each layer. Experts that the others still hold move here by `ep.replace` or
    `Balancer`.

    Args:
        store: that of the other ranks' `recover`.
        device: the device of all tensors, as `ExpertParallel` takes it.
        timeout_s: how long to wait for the group, in seconds.
        backend: the backend of the process group, the same as in `recover`.

    Returns:
        The ExpertParallel, in the group.

    Raises:
        TimeoutError: nobody has taken this rank in within `timeout_s` seconds. Its cause is the
            error of the last attempt.
        ValueError: the store is a FileStore, or holds a decision that no rank has written.
        MemoryError: the windows do not fit.
        PermissionError: other users can write into the folder.
    """
    # Build and load the native library before others wait for this rank.
    if device is not None:
        device_type = torch.device(device).type
    elif torch.cuda.is_initialized():
        device_type = "cuda"
    else:
        device_type = "cpu"
    processor_of(torch.device(device_type)).load()

    # `take_in` calls it once the other ranks have taken this rank in.
    def make(config: EPConfig, confirm: Confirm) -> ExpertParallel:
        ep = ExpertParallel(config, device=device)
        try:
            if not confirm(lambda: len(ep.survivors()) < ep.size):
                raise RuntimeError("the group was not confirmed")
        except BaseException:
            ep.close()
            raise
        return ep

    return take_in(store, make, timeout_s, backend)


def resize(
    ep: ExpertParallel,
    store: Store,
    size: int,
    load_weights: Callable[[tuple[Move, ...]], object],
    *,
    balancer: Balancer | None = None,
    weights: SlotWeights | None = None,
    wait_s: float = 5.0,
    timeout_s: float = 300.0,
    backend: str = "gloo",
) -> bool:
    """Grow or shrink the group between two rounds. Every rank of the group calls it, with the same
    arguments.

    To grow, new processes call `join_group`. They best do so before the ranks call `resize`, since
    the ranks wait for them meanwhile. With `placement.live` the slots of new ranks are empty, and
    `Balancer` or `ep.replace` fills them.

    To shrink, the ranks from `size` on leave. With `placement.live` moves that are under way end
    first, and experts whose copies are all on leaving ranks move to the ranks that stay. In some
    cases these experts cannot move: the ranks that stay have too few slots, a rank dies or refuses
    the moves, or the ranks sleep. Then `load_weights` gets the experts, and loads them.

    Args:
        ep: the ExpertParallel that is to have another size.
        store: the store, as `recover` takes it.
        size: the number of ranks that the group is to have. The group has fewer if new ranks do not
            come within `wait_s`.
        load_weights: gets the moves of this rank, as in `recover`.
        balancer: the balancer of `ep`, if it has one.
        weights: the weights of slots, as `ExpertParallel.replace` takes them.
        wait_s: how long to wait for new ranks, in seconds.
        timeout_s: the limit of the whole call, in seconds, as in `recover`.
        backend: the backend of the process group.

    Returns:
        Whether this rank is in the group. On a rank that has left, `ep` is closed and its process
        may end.

    Raises:
        ValueError: `size` is not positive; and what `recover` and `ExpertParallel.replace` raise.
        EPStateError: that of `recover`, like TimeoutError and MemoryError.
    """
    if not is_int(size) or size < 1:
        raise ValueError(f"`size` must be an integer of at least 1, got {size!r}")
    last_call_s = ep.config.exchange.timeout_s + LAST_CALL_S
    wanted = Wanted(
        min_ranks=1,
        max_ranks=size,
        last_call_s=last_call_s,
        timeout_s=timeout_s,
        backend=backend,
        grow_s=wait_s,
        leaves=ep.rank >= size,
    )

    def move_and_regroup() -> bool:
        # Without windows no expert can move, and the weights are loaded instead. The windows have
        # gone in sleep, or in an earlier call that a signal handler has interrupted.
        has_windows = ep._exchange is not None
        if ep.live.can_move and size < ep.size and has_windows:
            _move_to_staying_ranks(ep, size, balancer, weights)
        return regroup(ep, store, load_weights, wanted)

    return ep.alone(move_and_regroup)


def _move_to_staying_ranks(
    ep: ExpertParallel, size: int, balancer: Balancer | None, weights: SlotWeights | None
) -> None:
    """Move the experts that only leaving ranks hold to the ranks that stay, as far as these have
    slots. The ranks from `size` on leave.

    Collective: all ranks call it before the group becomes smaller. It never fails because ranks
    refuse the moves or are late: the experts that have not moved are loaded later. `balancer` and
    `weights` are the arguments of `resize`.
    """
    # After a timeout some ranks may have moved experts and others not. The group changes all the
    # same, and the ranks compare then which experts each has.
    with suppress(EPTimeoutError):
        # Wait for the end of moves that are under way.
        _end_moves(ep, balancer)

        # Begin the moves. If a signal handler interrupts `replace` on one rank, the moves are
        # refused on all ranks. That rank calls `resize` again, so the others try again, too.
        refusals: list[EPRefusedError] = []
        while len(refusals) < _MOST_TRIES_TO_MOVE:
            slots = _slots_without_leaving_ranks(ep, size)
            if slots is None:
                return
            ep.replace(slots, weights)
            refusals += _end_moves(ep, None)
        _log.warning("resize: experts are loaded, since they could not move: %s", refusals[-1])


def _end_moves(ep: ExpertParallel, balancer: Balancer | None) -> list[EPRefusedError]:
    """Wait for the end of all moves. Returns the error of moves that were refused, in a list that
    is empty if none were. No expert has moved by refused moves.
    """
    refusals = []
    try:
        if balancer is None:
            ep.apply()
        else:
            balancer.finish()
    except EPRefusedError as error:
        refusals.append(error)
        ep.apply()
    return refusals


def _slots_without_leaving_ranks(ep: ExpertParallel, size: int) -> Tensor | None:
    """Make the table of slots [layers, P] in which the ranks below `size` hold all experts, where P
    is the number of slots of all ranks. None if these ranks hold all experts already, or have too
    few slots.
    """
    slots = ep.slots
    S = ep.num_local_experts  # slots of a rank
    if size * S < ep.config.model.num_experts:
        return None

    # Keep the experts in the slots of the ranks that stay, and give free slots there to the experts
    # that have none.
    layers = slots.tolist()
    stay = []
    for rank in range(size):
        own = slice(rank * S, (rank + 1) * S)
        stay.append([layer[own] for layer in layers])
    kept = torch.tensor(keep_slots(ep.config, stay, spread_lost=True), dtype=slots.dtype)
    if torch.equal(kept, slots[:, : size * S]):
        return None

    # Empty the slots of the ranks that leave.
    slots.fill_(EMPTY)
    slots[:, : size * S] = kept
    return slots


# All objects of this process that have been a rank of a group.
_open: WeakSet[ExpertParallel] = WeakSet()


def _disown_all() -> None:
    """Make all objects of the parent unusable in a forked child."""
    for ep in list(_open):
        ep._disown()


# Python calls `_disown_all` in every forked child. So the calls of an ExpertParallel need not ask
# whether they are in the process that made it, which would cost time in each call.
os.register_at_fork(after_in_child=_disown_all)
