"""ExpertParallel: owns the windows, placement and memory plan of one group, and offers the stages over them."""

from __future__ import annotations

import dataclasses
import os
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.tuning import Tuning
from epmoe.exchange.call import new_call
from epmoe.exchange.exchange import in_turn
from epmoe.exchange.handles import Dispatched, Layout, Sent
from epmoe.exchange.health import EPStateError, Health
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.moves import Moves, Weights
from epmoe.exchange.peers import Peers
from epmoe.exchange.round_state import MAX_TAG
from epmoe.group import config_of, device_of, group_of
from epmoe.join import Hello
from epmoe.live import LiveExperts
from epmoe.local.route import Routing, route
from epmoe.native.arguments import FLOATS, check_tensor
from epmoe.resume import Resumable
from epmoe.slots import write_slots


class ExpertParallel(Resumable):
    """Dispatch and combine over the ranks of a group. All layers of a model can share one.

    It serves one thread at a time: whoever calls one `ExpertParallel` from several threads orders their calls and
    rounds. A call during the call of another thread raises RuntimeError and changes nothing, which a Python without
    the GIL does not promise. It harms no round of the other thread, also not by the `abort()` or `skip` that follows.
    `health`, `memory_plan` and `repr` may be called at any time. It cannot be pickled or copied. In a forked child
    every call raises RuntimeError, and `close` does nothing.

    Args:
        config: the same on all ranks; or the path of its file or the name of a ready one, for `EPConfig.load`.
        group: a torch process group with a CPU backend (gloo, or cpu:gloo,cuda:nccl), by default the world. Without
            torch.distributed this process is a group of one.
        device: of all tensors; by default the CPU, or with exchange.transport "nvlink" the current GPU.

    Raises:
        TypeError: an argument has another type.
        ValueError: the config does not fit the group or differs between ranks, or the group has no CPU backend.
        EPOpenError: ranks ended, or did not come within `exchange.warmup_timeout_s`. It names them.
        MemoryError: the windows do not fit, on any rank.
        RuntimeError: the ranks are on several machines, or their GPUs cannot reach each other's memory; or another rank
            has failed otherwise, with its error.
        ConfigError: the file of the config, or the tuning table that it names, is missing or wrong.
        BuildError: the native library does not build.
    """

    def __init__(
        self,
        config: EPConfig | str | os.PathLike[str],
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ):
        config = config_of(config)
        self.device = device_of(config, device)
        with torch.inference_mode(False):  # otherwise graphs outside inference mode could not take it
            self.order = torch.zeros(1, dtype=torch.uint8, device=self.device)  # see epmoe/opaque.py
        self._routing = config.routing.options
        self._needs_bias = config.routing.selection_bias
        self._tags: dict[int, weakref.ref[object] | None] = {}  # all that were taken; None: for good
        self._last_tag = 0  # of a round without a tag
        peers = Peers.of(group_of(group), config.exchange.warmup_timeout_s)
        self._join(peers, config, Hello(config.model_dump_json()))

    @property
    def num_local_experts(self) -> int:
        """e: physical experts of this rank."""
        return self.placement.num_local_experts(self.rank)

    @property
    def expert_map(self) -> Tensor:
        """int32: for each id in `recv.ids`, its index among this rank's experts, −1 for an expert of another rank.

        With one node these ids are physical experts. With several, they number the physical experts of this node.
        """
        return self.exchange.views["table.expert_map"]

    def route(self, logits: Tensor, bias: Tensor | None = None, num_tokens: int | Tensor | None = None) -> Routing:
        """`epmoe.route` with the config's routing: logits [T, E] → ids int32 [T, K], weights fp32 [T, K].

        Raises ValueError without `bias` where `routing.selection_bias` is set.
        """
        if bias is None and self._needs_bias:
            raise ValueError("`bias` must be given, since `routing.selection_bias` says that the router has one")
        exchange, model = self.exchange, self.config.model
        shape: tuple[int, ...] = getattr(logits, "shape", ())
        if len(shape) != 2 or shape[1] != model.num_experts or logits.device != self.device:
            check_tensor("logits", logits, FLOATS, ("T", model.num_experts), self.device)
        counters, options = exchange.views["health.counters"], self._routing
        outer = exchange.enter()  # in place: `run` would cost each layer 0.3 µs
        try:
            return route(
                logits, model.num_experts_per_tok, bias=bias, num_tokens=num_tokens, counters=counters, **options
            )
        finally:
            exchange.thread = outer

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
        padded_tokens: int | None = None,
        tag: int = 0,
        aligned: bool = False,
    ) -> Dispatched:
        """Send each token once to each rank that holds one of its experts.

        Collective: every rank calls, also with T = 0. On a GPU the host does not wait for the device, so an
        EPMismatchError, EPOrderError or EPTimeoutError may come from a later call.

        Args:
            x: [T, D] fp32, fp16 or bf16, 0 ≤ T ≤ M. D and dtype may be smaller than the config's but are equal on all
                ranks. Values arrive bit by bit; only the NaN whose bits are all 1 may arrive as another NaN on a GPU.
                With `scales`, fp8 e4m3; then combine takes and returns rows in the config's dtype.
            ids: int32 or int64 [T, K], logical experts. −1, E and any other id out of range mean "no expert".
            weights: fp32, bf16 or fp16 [T, K]. A pair of weight 0 does not travel; NaN and Inf count as 0.
            scales: fp32 [T, D/128] of rows that are already quantised, if `exchange.payload` is fp8. Rows and scales
                arrive bit by bit, as x does otherwise. D must be a multiple of 128, so no block is partly filled.
            num_tokens: int or int32 scalar tensor on the device. Rows at and past it are padding and are not sent.
            layout: "expert" for expert-major rows, "rank" for one slab of rows for each source rank.
            apply_router_weight_on_input: with layout="expert" only. Each pair's row is weight · x, an fp32 product
                rounded once to x's dtype; with an fp8 payload the row's scales are multiplied instead. combine then
                adds without weights.
            padded_tokens: rows of the slab that goes to each other node, by default `capacity.max_rows_per_node`; equal
                on all ranks, which nothing checks, and at least the tokens of any. One node ignores it.
            tag: from 0 to 32767, equal on all ranks, which every rank checks: a number for the layer, so that ranks in
                different layers get an error in place of one another's rows. A CUDA graph keeps the tag of its capture.
                With `placement.live` from 1 to `placement.layers`: it chooses the layer's table.
            aligned: each expert's segment starts at a multiple of `Dispatched.alignment` rows, as GEMMs over blocks of
                rows want it; equal on all ranks. Without effect where `capacity.alignment` is set, which holds anyway.

        Returns:
            The open round, valid until combine, combine_partial or combine_send is called.

        Raises:
            TypeError: an argument has another type or dtype; nothing was sent.
            ValueError: an argument has another value, shape or device; nothing was sent.
            RuntimeError: a round is still open, an input requires grad in grad mode, or this object is closed.
            EPMismatchError: the calls of the ranks did not match.
            EPTimeoutError: ranks did not arrive in time, or left. Ctrl-C, too, ends a wait, and leaves the round open.
        """
        return self.exchange.dispatch(
            new_call(
                (x, ids, weights, scales, num_tokens, layout, apply_router_weight_on_input, padded_tokens, tag, aligned)
            )
        )

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
        padded_tokens: int | None = None,
        tag: int = 0,
        aligned: bool = False,
    ) -> Sent:
        """The send phase of `dispatch`, with its arguments and errors: sends, and waits for no rank (see `abort`).

        Returns the open round, for `dispatch_recv`.

        Other work can run between the two phases, such as the rounds of another `ExpertParallel`. No argument,
        `num_tokens` included, may be overwritten before `dispatch_recv` has returned.
        """
        return self.exchange.dispatch_send(
            new_call(
                (x, ids, weights, scales, num_tokens, layout, apply_router_weight_on_input, padded_tokens, tag, aligned)
            )
        )

    def dispatch_recv(self, sent: Sent) -> Dispatched:
        """The receive phase of `dispatch`: waits for every rank's tokens.

        Args:
            sent: the open round, from `dispatch_send`.

        Returns:
            The same round, as `dispatch` returns it.

        Raises:
            ValueError: `sent` belongs to another round, or was received before.
            EPMismatchError: the calls of the ranks did not match.
            EPTimeoutError: ranks did not arrive in time.
        """
        return self.exchange.dispatch_recv(sent)

    def combine(self, expert_rows: Tensor, dispatched: Dispatched, *, out: Tensor | None = None) -> Tensor:
        """The weighted sum over each token's experts, from expert-major outputs. Collective.

        The sum is fp32, over ranks in rank order: bitwise the same on every run. Padded rows of y are zeros.

        Args:
            expert_rows: [N, D] in the dtype of x, in the order of `dispatched.rows`; N ≥ expert_offsets[e].
            dispatched: the open round, of layout="expert".
            out: y itself, contiguous [T, D] in the dtype of x and aligned to 16 bytes; a new tensor by default.

        Returns:
            y [T, D] in the dtype of x.

        Raises:
            TypeError: `expert_rows` or `out` has another dtype; nothing was sent.
            ValueError: `expert_rows` or `out` has another shape or device, or the round is another one; nothing was
                sent.
            RuntimeError: `expert_rows` requires grad in grad mode, or this object is closed.
            EPMismatchError: the ranks' calls of dispatch did not match (GPU).
            EPTimeoutError: ranks did not arrive in time.
            EPOverflowError: more expert-major rows arrived than `capacity.max_expert_rows`.
            EPAbortedError: other ranks have aborted the round, on a GPU this one or an earlier one.
        """
        return self.exchange.combine("expert", expert_rows, dispatched, out)

    def combine_partial(self, partial: Tensor, dispatched: Dispatched, *, out: Tensor | None = None) -> Tensor:
        """As `combine`, for layout="rank": from rows [R, M, D] that a fused MoE has already weighted and summed over
        this rank's experts."""
        return self.exchange.combine("rank", partial, dispatched, out)

    def combine_send(self, rows: Tensor, dispatched: Dispatched, *, out: Tensor | None = None) -> None:
        """The send phase of `combine`, with its errors: sends, and waits for no rank.

        Args:
            rows: expert-major outputs [N, D], or with layout="rank" the rows [R, M, D] of `combine_partial`.
            dispatched: the open round.
            out: what combine_recv returns, as of `combine`.
        """
        self.exchange.combine_send(rows, dispatched, out)

    def combine_recv(self, dispatched: Dispatched) -> Tensor:
        """The receive phase of `combine`: waits for every rank's rows.

        Args:
            dispatched: the open round, as given to `combine_send`.

        Returns:
            y [T, D] in the dtype of x.

        Raises:
            ValueError: `dispatched` belongs to another round, or combine_send did not come first.
            EPTimeoutError: ranks did not arrive in time.
            EPOverflowError: more expert-major rows arrived than `capacity.max_expert_rows`.
            EPAbortedError: other ranks have aborted the round, on a GPU this one or an earlier one.
        """
        return self.exchange.combine_recv(dispatched)

    def abort(self, dispatched: Sent | Dispatched | None = None) -> None:
        """Close a round that an exception left open, between any two calls. Collective: every rank aborts or combines.

        This rank sends no rows; the other ranks get sums without its experts. It allocates nothing and waits for no
        rank, so it also works after an out-of-memory error and in a signal handler. On the CPU the next dispatch or
        dispatch_send waits instead, until all ranks have ended the round.

        Args:
            dispatched: what the round's last call returned; after combine_send, what combine_send was given. None
                closes whatever round is open, does nothing if there is none, and raises none of the errors below. It
                also does nothing on a thread whose last call was refused, since another thread has the open round.

        Raises:
            ValueError: `dispatched` is not the handle of the open round.
            EPMismatchError: the calls of the ranks did not match.
            EPTimeoutError: an earlier call has timed out.
            EPOverflowError: more expert-major rows arrived than `capacity.max_expert_rows`.
            EPAbortedError: other ranks have aborted the round, on a GPU this one or an earlier one.
        """
        if dispatched is not None or self._exchange is not None:
            self.exchange.abort(dispatched)

    def skip(
        self,
        *,
        tag: int = 0,
        hidden_size: int | None = None,
        top_k: int | None = None,
        dtype: torch.dtype | None = None,
        layout: Layout | None = None,
        apply_router_weight_on_input: bool | None = None,
        padded_tokens: int | None = None,
        aligned: bool | None = None,
    ) -> None:
        """Take part in a round without tokens, and abort it: for a rank that raised before it called dispatch.

        Collective: it takes the place of dispatch and combine. The other ranks get through the round; as after `abort`
        they learn that this rank has aborted it. It waits for no rank, except after a round that was aborted.

        Args:
            tag: of the round, as the other ranks give it to dispatch.
            hidden_size: D of the round, like the next arguments as in dispatch, and by default as in the last round of
                this object, or as in the config before the first.
            top_k: K of the round.
            dtype: of x.
            layout: "expert" or "rank".
            apply_router_weight_on_input: whether dispatch weights the rows.
            padded_tokens: as of dispatch.
            aligned: whether segments are aligned.

        Raises:
            TypeError: an argument has another type; nothing was sent.
            ValueError: an argument has another value; nothing was sent.
            RuntimeError: a round is open (`abort` closes it), this object is closed, or a call of this thread was
                refused, since another thread has the round.
            EPMismatchError: an earlier call of the ranks did not match.
            EPTimeoutError: ranks did not end the last round in time.
        """
        exchange = self.exchange
        if exchange.rounds.is_of_another():
            raise EPStateError("another thread has the round, so this one has none to skip")
        call = exchange.templates.no_tokens(
            exchange.rounds.template, hidden_size, top_k, dtype, layout, apply_router_weight_on_input, aligned
        )
        exchange.abort(exchange.dispatch_send(call._replace(padded_tokens=padded_tokens, tag=tag)))

    def giving_up(self, tag: int, **shape: Any) -> AbstractContextManager[None]:
        """Within it a caller takes part in one round. An exception aborts the round, whether it was opened or not.

        It raises nothing of the exchange in its place.

        Args:
            tag: of the round.
            shape: of the round, other arguments of `skip`.

        Returns:
            The context.
        """
        exchange = self.exchange

        def skip() -> None:
            if exchange is self._exchange:  # not resumed or closed meanwhile
                self.skip(tag=tag, **shape)

        return exchange.giving_up(skip)

    def new_tag(self, tag: int | None = None, owner: object = None) -> int:
        """A tag for one more layer, which no other layer of this object has. All ranks take the same ones.

        Args:
            tag: from 0 to 32767. By default `next_tag`.
            owner: gives the tag back when it is gone; None: nobody does.

        Returns:
            The tag.

        Raises:
            ValueError: another layer has the tag, or there is no further number.
        """
        if tag is None:
            tag = self._last_tag = self.next_tag
        elif tag in self._tags and ((ref := self._tags[tag]) is None or ref() is not None):
            raise ValueError(
                f"tag {tag} must belong to one layer, but another one of this ExpertParallel has it: the tag is "
                f"`layer_id` modulo {MAX_TAG + 1}, or by default the next number that is free"
            )
        self._tags[tag] = None if owner is None else weakref.ref(owner)
        return tag

    @property
    def next_tag(self) -> int:
        """What `new_tag` gives next: the first number above the last one, from 1 on, that nobody has had.

        Raises ValueError where there is none.
        """
        tag = self._last_tag + 1
        while tag in self._tags:
            tag += 1
        if tag > MAX_TAG:
            raise ValueError(f"an ExpertParallel has tags for {MAX_TAG} layers, and all were taken")
        return tag

    @property
    def slots(self) -> Tensor:
        """int32 [layers, P], with `placement.live`, a copy: the logical expert in each slot, or −1. Rank r has slots
        r·S to (r + 1)·S − 1. Raises EPStateError without `placement.live`."""
        return self._moving.slots.clone()

    def save_slots(self, path: str | os.PathLike[str]) -> None:
        """Write `slots` to a JSON file, in one step: with `placement.slots` a later job begins with them. All ranks
        have the same between two moves, so one rank calls it. Raises EPStateError without `placement.live`."""
        write_slots(path, self._moving.slots)

    @in_turn
    def replace(self, slots: Tensor, weights: Weights | None = None, *, loads: Tensor | None = None) -> Moves:
        """Begin to move experts, with `placement.live`: rounds go on meanwhile, also replays of CUDA graphs.

        Every rank calls it with the same arguments, at its own time, and then `poll` between rounds, which takes the
        moves further. No rank waits for another. While an expert moves, its other copies do its work.

        Args:
            slots: int32 or int64 [layers, P], the expert that each slot is to hold, or −1. Every expert has a slot, and
                at most one on a rank. Experts that stay on their rank stay in their slot, whichever this names.
            weights: takes a tag and the index of a local slot, and returns the tensors that hold the slot's weights,
                always the same ones. They have no gaps, lie on the device of `ep`, and have the same sizes and order in
                memory for all slots of a layer, on all ranks. By default those of the `MoELayer` with this tag, whose
                experts must be `GroupedExperts`.
            loads: [layers, E], by which copies share their experts' tokens, as of `share`. By default the last ones.

        Returns:
            The moves: `done`, `cancel()`, `waits_for()`, `stalls`.

        Raises:
            EPStateError: without `placement.live`, or other moves are not done.
            ValueError: an argument does not fit, or experts without a second copy are to change places where no slot is
                free. Nothing has begun then, nor where `weights` raises, and the other ranks drop this call.
            EPRefusedError: from a later `poll`, where another rank raised here or was given other arguments. The moves
                have ended then, on all ranks, and no expert has moved: all ranks may call again.
        """
        return self._moving.replace(slots, weights, loads)

    @in_turn
    def share(self, loads: Tensor) -> None:
        """Divide the tokens of experts among their copies by these loads [layers, E], from a later `poll` on.

        Nothing moves. Ranks may call it at different times; with the same loads, shares are balanced.
        """
        self._moving.share(loads)

    @in_turn
    def loads(self) -> Tensor:
        """float64 [layers, E], on the CPU: rows that experts of all ranks have received since the start or `resume`.

        It sends this rank's counts to all ranks and waits for none, so those of others are of their own last calls.
        """
        self._moving.send_loads()
        self._moving.mail.flush()
        return self._moving.loads()

    @in_turn
    def apply(self, timeout_s: float | None = None) -> None:
        """Wait until all moves are done and all shares in use. Collective: all ranks call it between the same rounds.

        From then on all ranks choose by the same tables, so that y has the same bits on every run.

        Raises EPTimeoutError after `timeout_s`, by default `exchange.timeout_s`, or once a rank has ended. If the ranks
        that it names are only late, rounds go on, and `apply` may be called again.
        """
        self._moving.finish(self.config.exchange.timeout_s if timeout_s is None else timeout_s)

    def logical_experts(self, tag: int = 0) -> list[int]:
        """The logical experts of this rank's local experts, with `placement.live` those of the layer `tag` now, where
        −1 is an empty slot. Raises EPStateError while experts move."""
        if self.live is None:
            return self.placement.logical_experts(self.rank)
        return self.live.experts(tag)

    def holder(self, expert: int, tag: int = 0) -> tuple[int, int]:
        """A rank that holds a logical expert, the same on all ranks, and its index there; `tag` as above."""
        if self.live is None:
            return self.placement.owner(expert), self.placement.local_index[expert]
        return self.live.holder(tag, expert)

    @in_turn
    def retune(self, tuning: Tuning) -> None:
        """Launch the kernels of rounds to come by this table, in place of the one that `exchange.tuning` names."""
        self.exchange.retune(tuning)

    def memory_plan(self) -> MemoryPlan:
        """Every buffer of this rank, to the byte."""
        return self.exchange.plan

    def health(self, wait: bool = True) -> Health:
        """Counts since the start, on this rank. Any thread may read them; not during the capture of a CUDA graph.

        Args:
            wait: on a GPU, first for the current stream. With False this waits for no kernel and delays none, so the
                counts of kernels under way are partial.

        Returns:
            The counts, which never fall.
        """
        health, live = self.exchange.health(wait), self.live
        return health if live is None else dataclasses.replace(health, refused_plans=live.refused_plans)

    def poll(self) -> None:
        """Raise what kernels have reported so far. It never waits, and does not stop the device.

        With `placement.live` it also takes moves and shares further: call it between the rounds, on the stream of their
        replays if they are replays. In a signal handler in the middle of another `poll` it does not.

        Every call looks by itself. The replay of a CUDA graph is no call: after a timeout replays yield zeros for ever,
        so poll at every step. A replay that is still running shows in a later poll.

        Raises:
            EPTimeoutError: ranks did not arrive in time; every poll raises it again.
            EPMismatchError: the calls of the ranks did not match.
            EPOrderError: on a GPU, dispatch and combine of this rank did not alternate.
            EPOverflowError: more expert-major rows arrived than `capacity.max_expert_rows`.
            EPAbortedError: other ranks have aborted the round, on a GPU this one or an earlier one.
            EPRefusedError: of `replace`.
        """
        exchange = self.exchange
        exchange.run(exchange.poll if self.live is None else self._poll)

    @in_turn
    def check(self, timeout_s: float | None = None) -> None:
        """Wait for everything that has been launched on the device, then `poll`.

        A failure that a kernel reports meanwhile is raised at once.

        Args:
            timeout_s: how long to wait for the device, in seconds; None: until it has ended.

        Raises:
            EPTimeoutError: also where the device did not end within `timeout_s`.
        """
        self.exchange.wait_for_device(timeout_s)
        self.poll()

    def _poll(self) -> None:
        self.exchange.poll()
        self._moving.step()

    @property
    def _moving(self) -> LiveExperts:
        _ = self.exchange  # raises once this object is closed
        if self.live is None:
            raise EPStateError("experts stay where they are: `placement.live` is not set")
        return self.live

    def __repr__(self) -> str:
        model, M = self.config.model, self.config.capacity.max_num_tokens_per_rank
        shape = f"E={model.num_experts} K={model.num_experts_per_tok} D={model.hidden_size} {model.dtype}, M={M}"
        exchange = self._exchange
        closed = "closed" if self._owner is None else f"of process {self._owner}"
        state = closed if exchange is None else exchange.rounds.describe(exchange.rounds.count)
        where = f"rank {self.rank} of {self.size}" + (f", generation {self.generation}" if self.generation else "")
        return f"ExpertParallel({where}, {shape}, {self.device}, {state})"
