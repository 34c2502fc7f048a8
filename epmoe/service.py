"""ExpertParallel: dispatch, combine and the other stages over the windows of one group. How it
joins, leaves and changes groups is its `Life` (epmoe/life/life.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from epmoe.config.config import EPConfig
from epmoe.config.placement import Move, Placement
from epmoe.exchange.call import Layout, new_call
from epmoe.exchange.exchange import Exchange, takes_turn_of_exchange
from epmoe.exchange.handles import Dispatched, HoldsWindows, RoundShape, Sent
from epmoe.exchange.health import Health
from epmoe.exchange.layer_tags import LayerTags
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.transports import device_of
from epmoe.group.checks import config_of
from epmoe.group.errors import EPStateError
from epmoe.group.member import Follower
from epmoe.life.life import Life
from epmoe.live.experts import LiveExperts, RankExperts
from epmoe.live.held import HeldVersions
from epmoe.live.moves import Moves, SlotWeights
from epmoe.live.slots import write_slots
from epmoe.local.route import Choice, Routing
from epmoe.native.arguments import FLOATS, check_forward_only, check_tensor, token_count


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

    device: torch.device
    """The device of all tensors."""
    followers: WeakSet[Follower]
    """Objects of this rank's layers that depend on its experts. `resume` tells them of the new
    group.
    """
    versions: HeldVersions
    """The versions of a trainer's weights that this rank's layers have."""
    life: Life
    """The groups of this rank, one after another, with the windows of the present one. For modules
    of this package.
    """
    # The way in which the router of the config chooses experts, once a caller routes.
    _choice: Choice | None = None

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

        # Make what stays when the group changes, and become a rank of the group.
        self._tags = LayerTags()
        self.followers = WeakSet()
        self.versions = HeldVersions()
        self.life = Life(config, group, self.device, self.versions, self.followers)

    @property
    def config(self) -> EPConfig:
        """The config of the group."""
        return self.life.member.config

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None is this process alone, or that this object is closed."""
        return self.life.group

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.life.member.rank

    @property
    def size(self) -> int:
        """R"""
        return self.life.member.size

    @property
    def placement(self) -> Placement:
        """Where the experts are on the ranks of the group."""
        return self.life.member.placement

    @property
    def generation(self) -> int:
        """How many groups the ranks have had before this one: 0 until `resume`."""
        return self.life.member.generation

    @property
    def origin(self) -> str:
        """A name of this object that is the same on all ranks, old and new ones, in all its
        groups.
        """
        return self.life.member.origin

    @property
    def processes(self) -> list[str]:
        """[R], names of the ranks' processes"""
        return self.life.member.processes

    @property
    def live(self) -> RankExperts:
        """The experts of this rank. With `placement.live` they move between ranks."""
        return self.life.live

    def survivors(self) -> list[int]:
        """List the ranks of the group that live and are not missing, as far as this rank knows. It
        waits for no rank.

        The ranks ascend. They have the numbers of the group so far until `resume` has returned.
        After an `EPTimeoutError`, reports of other ranks may still arrive, so ask again before each
        try to form a group. A rank that was too slow for the other ranks is missing in its own
        list, too.
        """
        return self.life.survivors()

    def ended(self) -> list[int]:
        """List the ranks whose processes have ended, as far as this machine sees it. They have the
        same numbers as in `survivors`.
        """
        return self.life.ended()

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
        life = self.life
        return life.alone(partial(life.go_on, group, placement, spread_lost))

    def close(self) -> None:
        """Release the windows and the group. Handles of earlier rounds, and their tensors, must not
        be used any more.

        With a round open, the waits of the other ranks end at once, with an EPTimeoutError that
        names this rank. `rank`, `size`, `survivors` and `resume` still work.
        """
        self.life.close()

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
        self.life.alone(partial(self.life.sleep, free))

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
        life = self.life
        asleep = life.asleep
        if asleep is None:
            raise EPStateError("this ExpertParallel does not sleep: `wake` comes after `sleep`")
        life.alone(partial(life.wake, asleep, restore))

    @property
    def asleep(self) -> bool:
        """Whether `sleep` has been called, and neither `wake` nor `resume` since."""
        return self.life.asleep is not None

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
        return self.life.capture_is_valid(generation)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close this object. After an exception the waits of the other ranks end at once, even if
        no round is open on this rank.
        """
        if kind is not None:
            self.life.end_waits()
        self.close()

    @property
    def exchange(self) -> Exchange:
        """The exchange that carries the rounds, for integrations of a host. Raises EPStateError if
        this object is closed or sleeps.
        """
        # This does what `Life.exchange` does. Every call of a round needs it, and would pay for a
        # second property.
        life = self.life
        exchange = life.opened
        if exchange is None or life.asleep is not None:
            raise EPStateError(life.why_unusable())
        return exchange

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of experts that train, whose last dimension, "ep", is the group; None without a
        group.
        """
        return self.life.mesh

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
        model = self.life.member.config.model
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
        if dispatched is not None or self.life.opened is not None:
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
        if exchange is self.life.opened:
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
        not one that captures a CUDA graph.

        On a GPU it first waits for the current stream. With `wait=False` it waits for no kernel and
        delays none, so the counts of kernels that are running are partial. While this object
        sleeps, the counts are those from before. Raises EPStateError if this object is closed.
        """
        return self.life.health(wait)

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
        # Name the rank and its group.
        where = f"rank {self.rank} of {self.size}"
        if self.generation:
            where += f", generation {self.generation}"
        return f"ExpertParallel({where}, {shape}, {self.device}, {self.life.state()})"
