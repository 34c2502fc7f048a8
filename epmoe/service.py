"""ExpertParallel: owns one group's windows, placement and plan, and offers the stages over them."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe import ops
from epmoe.config import EPConfig
from epmoe.exchange import Exchange
from epmoe.group import check_group, check_multiprocessor, device_of, members_of
from epmoe.handles import Dispatched, Layout, Sent
from epmoe.health import EPMismatchError, Health
from epmoe.memory import MemoryPlan
from epmoe.placement import Placement
from epmoe.stages import combine as combine_stage
from epmoe.stages import dispatch as dispatch_stage
from epmoe.stages.route import Routing, route
from epmoe.tuning import Tuning
from epmoe.window import SharedMemoryWindow, Window
from epmoe.window_nvlink import NVLinkWindow


class ExpertParallel:
    """Dispatch and combine over the ranks of a group; every layer of a model can share one.

    Args:
        config: the same on all ranks.
        group: a torch process group with a CPU backend (gloo, or cpu:gloo,cuda:nccl), by default the world; without
            torch.distributed, a group of one.
        device: where the tensors live, by default the CPU, or the current GPU where exchange.transport is nvlink.

    Raises:
        ValueError: the config does not fit the group or differs between ranks, or the group has no CPU backend.
        MemoryError: the windows do not fit.
    """

    def __init__(
        self, config: EPConfig, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
    ):
        self.config = config
        self.device = device_of(config, device)
        nvlink = self.device.type == "cuda"
        self.group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
        self.rank, self.size, global_ranks = members_of(self.group)
        check_group(config, self.group, self.rank, self.size)
        _ = ops.dispatch  # a library that does not build fails here, and not in a round that others wait in
        self.placement = Placement.from_config(config)
        if nvlink:
            check_multiprocessor(self.placement, self.device)
        plan = MemoryPlan.build(config, self.rank, self.placement, nvlink)
        with torch.inference_mode(False):  # else the buffers could not be written outside inference mode
            window: Window
            if nvlink:
                window = NVLinkWindow(
                    plan.window_bytes, self.rank, self.size, self.group, self.device, unset=plan.unset
                )
            else:
                window = SharedMemoryWindow(plan.window_bytes, self.rank, self.size, self.group)
            self._exchange: Exchange | None = Exchange.create(
                config, plan, self.placement, window, self.rank, global_ranks, self.device
            )

    @property
    def num_local_experts(self) -> int:
        """e: physical experts of this rank."""
        return self.placement.num_local_experts(self.rank)

    def route(self, logits: Tensor, bias: Tensor | None = None, num_tokens: int | Tensor | None = None) -> Routing:
        """`epmoe.route` with the config's routing: logits [T,E] → ids int32 [T,K], weights fp32 [T,K]."""
        routing = self.config.routing
        return route(
            logits,
            self.config.model.num_experts_per_tok,
            scoring=routing.scoring,
            bias=bias,
            renormalize=routing.renormalize,
            num_expert_groups=routing.num_expert_groups,
            top_groups=routing.top_groups,
            routed_scaling_factor=routing.routed_scaling_factor,
            num_tokens=num_tokens,
            counters=self._open.views["health.counters"],
        )

    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        num_tokens: int | Tensor | None = None,
        layout: Layout = "expert",
        apply_router_weight_on_input: bool = False,
    ) -> Dispatched:
        """Send each token once to each rank that holds one of its experts; every rank takes part, also with T = 0.

        Args:
            x: [T, D], 0 ≤ T ≤ M; D and dtype may be smaller than the config's but are equal on all ranks. Rows arrive
                bit by bit as they are; only on GPUs the NaN of all ones may arrive as another NaN.
            ids: int32 or int64 [T, K], logical experts. −1, E and any id out of range mean no expert.
            weights: fp32, bf16 or fp16 [T, K]. A pair of weight 0 does not travel; NaN and Inf count as 0.
            num_tokens: rows at and past it are padding and are not sent.
            layout: "expert" for expert-major rows, "rank" for what came, slab by source.
            apply_router_weight_on_input: with layout="expert" only. Each pair's row is weight · x, an fp32 product
                rounded once to x's dtype (with an fp8 payload the row's scales are multiplied), and combine only adds.

        Raises:
            TypeError, ValueError: an argument is not as above; nothing was sent.
            RuntimeError: a round is still open, or an input requires grad in grad mode.
            EPMismatchError: the ranks brought different K, D or dtype; the round is closed.
            EPTimeoutError: ranks did not arrive in time.

        On a GPU nothing here waits for the device, so these two come from whichever call sees them first.
        """
        exchange = self._open
        sent = dispatch_stage.open_round(exchange, x, ids, weights, num_tokens, layout, apply_router_weight_on_input)
        return _looked_at(exchange, dispatch_stage.dispatch(exchange, sent))

    def dispatch_send(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        num_tokens: int | Tensor | None = None,
        layout: Layout = "expert",
        apply_router_weight_on_input: bool = False,
    ) -> Sent:
        """The first half of `dispatch`, with its arguments and errors: sends, and waits for no rank.

        Between the halves other work runs, also the rounds of another `ExpertParallel`: two micro-batches take turns
        on two of them, in one stream in any order, or on two CUDA streams if both run in halves alone. Then what waits
        leaves a quarter of the multiprocessors to others; a whole `dispatch` or `combine`, an `abort`, memory allocated
        and kernels loaded for the first time take or wait for all of them. No argument, `num_tokens` included, must be
        written before `dispatch_recv` has returned.
        """
        exchange = self._open
        sent = dispatch_stage.open_round(exchange, x, ids, weights, num_tokens, layout, apply_router_weight_on_input)
        return dispatch_stage.dispatch_send(exchange, sent)

    def dispatch_recv(self, sent: Sent) -> Dispatched:
        """The second half of `dispatch`: waits for every rank's tokens.

        Raises:
            ValueError: `sent` is of another round, or was received before.
            EPMismatchError, EPTimeoutError: as `dispatch` does.
        """
        exchange = self._open
        return _looked_at(exchange, dispatch_stage.dispatch_recv(exchange, sent))

    def combine(self, expert_rows: Tensor, dispatched: Dispatched) -> Tensor:
        """Weighted sum over a token's experts: expert-major outputs [N, D] → y [T, D], in x's dtype.

        fp32 accumulation, over ranks in rank order: bitwise the same on every run. Padded rows of y are zeros.

        Raises:
            TypeError, ValueError: other rows, or the handle of another round; nothing was sent.
            EPTimeoutError, EPOverflowError: as their docstrings say.
        """
        return combine_stage.combine(self._open, expert_rows, dispatched)

    def combine_partial(self, partial: Tensor, dispatched: Dispatched) -> Tensor:
        """As `combine`, from rank-major rows [R, M, D] that a fused MoE has already weighted and summed."""
        return combine_stage.combine_partial(self._open, partial, dispatched)

    def combine_send(self, rows: Tensor, dispatched: Dispatched) -> None:
        """The first half of `combine`, with its errors: sends, and waits for no rank.

        `rows` are expert-major outputs [N, D], or with layout="rank" the partial rows [R, M, D] of `combine_partial`.
        """
        combine_stage.combine_send(self._open, rows, dispatched)

    def combine_recv(self, dispatched: Dispatched) -> Tensor:
        """The second half of `combine`: waits for every rank's rows → y [T, D].

        Raises:
            ValueError: `dispatched` is of another round, or combine_send did not come first.
            EPTimeoutError, EPOverflowError: as their docstrings say.
        """
        return combine_stage.combine_recv(self._open, dispatched)

    def abort(self, dispatched: Sent | Dispatched) -> None:
        """Close a round that an exception left open, between any two calls. Collective: every rank aborts or combines.

        Takes what the round's last call returned; after combine_send, what went into it.
        """
        combine_stage.abort(self._open, dispatched)

    def retune(self, tuning: Tuning) -> None:
        """Launch the kernels of rounds to come by this table; the one of `exchange.tuning` no longer holds."""
        self._open.retune(tuning)

    def memory_plan(self) -> MemoryPlan:
        """Every buffer of this rank, to the byte."""
        return self._open.plan

    def health(self) -> Health:
        """Counts since the start, on this rank."""
        views = self._open.views
        names = ("health.counters", "health.tokens_per_expert", "health.rows_sent")
        return Health.read(*(views[name] for name in names))

    def check(self) -> None:
        """Wait for what has been launched, and raise whatever has gone wrong so far.

        Raises:
            EPTimeoutError, EPMismatchError, EPOverflowError: as their docstrings say.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._open.check()
        self._open.check_overflow()

    def close(self) -> None:
        """Let go of the windows. What dispatch returned must not be used any more."""
        self._exchange = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _open(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError("this ExpertParallel is closed")
        return self._exchange


def _looked_at(exchange: Exchange, dispatched: Dispatched) -> Dispatched:
    try:
        exchange.check()
    except EPMismatchError:  # everyone sees it, so everyone closes the round
        combine_stage.abort(exchange, dispatched)
        raise
    return dispatched
