"""The windows of a model in vLLM: one ExpertParallel for each power of two of tokens, shared by all
layers.

vLLM's experts work on every slot of the slabs, used or not: R·M rows. With one M for prefill and
decode, a decode step of 8 tokens would cost what a prefill of 8192 costs. A step therefore takes
the smallest M that holds the longest batch of all ranks, which every rank knows from vLLM's own
agreement before each step. All M together need at most twice the memory of the largest.
"""

from __future__ import annotations

import os
import signal
import time
from bisect import bisect_left
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from threading import Thread
from typing import Any, Literal

import torch
import torch.distributed as dist
import vllm
from prometheus_client import REGISTRY, start_http_server
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.platforms import current_platform

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.exchange.call import Layout
from epmoe.group.errors import EPMismatchError, EPOrderError, EPStateError, EPTimeoutError
from epmoe.group.waiting import start_thread
from epmoe.integrations.balancing import Balancing, section_with_slots
from epmoe.integrations.prometheus import HealthCollector
from epmoe.integrations.session import Session, make_config
from epmoe.integrations.vllm.choice import Choice
from epmoe.native.formats import PayloadName
from epmoe.service import ExpertParallel

logger = init_logger("vllm.epmoe")  # vLLM shows what is logged below "vllm"

TIMEOUT_S = 300.0
"""vLLM waits this long for a step. A rank may compile its kernels meanwhile, which
takes minutes.
"""


@dataclass(frozen=True)
class Shape:
    """The sizes and formats of rounds that can share windows."""

    num_experts: int
    """P: vLLM's physical experts. Their copies are vLLM's own (EPLB), so epmoe makes none."""
    top_k: int
    hidden_size: int
    dtype: torch.dtype
    max_tokens: int
    """Most tokens that a rank brings to a step."""
    placement: Literal["linear", "round_robin"]
    payload: PayloadName
    layout: Layout
    aligned: bool = False
    """Segments are aligned. vLLM's experts take every row of the worst case, which has gaps then:
    for Qwen3-30B-A3B on two ranks, with one token each, 4096 rows instead of 16.
    """
    live_layers: int = 0
    """Layers whose experts move; 0: they stay where vLLM has put them."""

    def first(self, ep_size: int) -> Placement:
        """The placement by which vLLM loads the experts."""
        return Placement.build(self.num_experts, ep_size, strategy=self.placement)


@dataclass
class Sizes:
    """The exchanges of one shape, by ascending M. If experts move there is one, since a table of
    slots has one.
    """

    most: int
    """tokens that a rank brings to a step; more than the largest M, they take several rounds"""
    exchanges: list[ExpertParallel] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    balancing: Balancing = field(init=False)

    @classmethod
    def make(
        cls, shape: Shape, group: dist.ProcessGroup, device: torch.device, choice: Choice
    ) -> Sizes:
        """Collective, with the same arguments on every rank of `group`."""
        # Where experts move, a file says where vLLM has loaded them.
        sizes = cls(shape.max_tokens)
        tokens = min(shape.max_tokens, choice.max_num_tokens_per_rank or shape.max_tokens)
        section: AbstractContextManager[dict[str, Any]] = nullcontext({"strategy": shape.placement})
        if choice.live is not None:
            section = section_with_slots(
                choice.live, shape.first(group.size()), shape.live_layers, group
            )
        with section as placement:
            # From the largest M down to 1, by halves.
            while True:
                config = _config(shape, tokens, group.size(), choice.exchange, placement)
                sizes.tokens.insert(0, tokens)
                sizes.exchanges.insert(0, ExpertParallel(config, group, device))
                if tokens == 1 or shape.live_layers:
                    break
                tokens = -(-tokens // 2)
        sizes.balancing = Balancing(sizes.exchanges[0], choice.live, logger)
        if choice.live is not None:
            current_platform.set_additional_forward_context = _before_step
        return sizes

    def for_this_step(self) -> tuple[ExpertParallel, int]:
        """The exchange of the step that vLLM is running, and the most tokens that a rank brings to
        a round of it: the same on every rank.
        """
        longest = min(self._longest(), self.tokens[-1])
        return self.exchanges[bisect_left(self.tokens, longest)], longest

    def parts(self) -> list[slice]:
        """The tokens of each round of this step, as many rounds as the longest batch of any rank
        needs.
        """
        M = self.tokens[-1]
        # One round holds any step, unless the user has set a smaller M.
        longest = M if self.most == M else max(1, self._longest())
        return [slice(first, first + M) for first in range(0, longest, M)]

    def _longest(self) -> int:
        """The most tokens that a rank brings to this step, by vLLM's own agreement."""
        if not is_forward_context_available():
            return self.most
        metadata = get_forward_context().dp_metadata
        if metadata is None:
            return self.most
        # Within a layer vLLM says it for each rank, which has its replica's tokens or a part of
        # them.
        tokens = metadata.local_sizes or metadata.num_tokens_across_dp_cpu.tolist()
        return min(self.most, max(tokens))

    def window_bytes(self) -> int:
        """Bytes of all windows of this rank."""
        return sum(ep.memory_plan().window_bytes for ep in self.exchanges)

    def poll(self) -> None:
        """Raise the failures after which no round works, of every size. Any thread may call it,
        also during a round.
        """
        for ep in self.exchanges:
            try:
                exchange = ep.exchange
            except EPStateError:  # it sleeps
                continue
            exchange.check()

    def close(self) -> None:
        # Ticks before steps end, and the first exchange with its balancer.
        if current_platform.set_additional_forward_context is _before_step:
            # Without it the class has its own again.
            del current_platform.set_additional_forward_context
        self.balancing.close()
        for ep in self.exchanges[1:]:
            ep.close()


_session: Session[Sizes] = Session()


def _before_step(*arguments: Any, **named: Any) -> dict[str, Any]:
    """Tick before a step of vLLM, in place of `Platform.set_additional_forward_context`, if experts
    move.

    vLLM calls it before each step, also before the empty steps of an idle rank, and not before
    steps that model runner V2 replays as one CUDA graph.
    """
    for sizes in _session.entries():
        sizes.balancing.poll()
    additional: dict[str, Any] = type(current_platform).set_additional_forward_context(
        *arguments, **named
    )
    return additional


def shared(shape: Shape, group: dist.ProcessGroup, device: torch.device, choice: Choice) -> Sizes:
    """Find the exchanges of all layers of this shape. The first call makes them and is
    collective.
    """

    def make(ep_size: int) -> Sizes:
        sizes = Sizes.make(shape, group, device, choice)
        ep = sizes.exchanges[-1]
        logger.info(
            "epmoe exchanges the tokens of the experts: layout %s, rank %d of %d, windows of %.1f "
            "MiB for up to %d tokens a round, in %d sizes; the seat is RoutedExperts of vLLM %s",
            choice.layout,
            ep.rank,
            ep_size,
            sizes.window_bytes() / 2**20,
            sizes.tokens[-1],
            len(sizes.exchanges),
            vllm.__version__,
        )
        # Metrics of this rank, and an end where an exchange fails in a graph.
        if choice.metrics_port is not None:
            _serve_metrics(choice.metrics_port + ep.rank)
        if device.type == "cuda":
            start_thread(Thread(target=watch, args=(sizes,), name="epmoe", daemon=True))
        return sizes

    return _session.share(shape, group, device, make)


@cache
def _serve_metrics(port: int) -> None:
    """Serve the metrics of this rank for Prometheus: vLLM's own port belongs to another process."""
    REGISTRY.register(HealthCollector(named_exchanges))
    start_http_server(port)


def named_exchanges() -> dict[str, ExpertParallel]:
    """Every exchange of this process, by the number of its shape and the most tokens that a rank
    brings to it.
    """
    named = {}
    for i, sizes in enumerate(_session.entries()):
        for M, ep in zip(sizes.tokens, sizes.exchanges, strict=True):
            named[f"{i}-{M}"] = ep
    return named


def watch(sizes: Sizes, interval_s: float = 1.0) -> None:
    """End this worker, as vLLM expects of a failed one, once an exchange has failed on the GPU.

    vLLM replays CUDA graphs, which after a failure yield zeros and raise nothing.
    """
    try:
        while True:
            sizes.poll()
            time.sleep(interval_s)
    except (EPTimeoutError, EPMismatchError, EPOrderError) as error:
        logger.critical("epmoe: %s: this worker ends", error)
        os.kill(os.getpid(), signal.SIGTERM)


def _config(
    shape: Shape, max_tokens: int, ep_size: int, settings: dict[str, Any], placement: dict[str, Any]
) -> EPConfig:
    """Make the configuration of windows for so many tokens a rank."""
    rows: dict[str, Any] = {}
    if shape.layout == "rank":
        # Rank-major rows are R·M; the expert-major ones, up to R·M·K, then need no memory.
        rows = {"max_expert_rows": 1, "on_overflow": "drop"}
    if not shape.aligned:
        rows["alignment"] = 1
    sections: dict[str, dict[str, Any]] = {
        "placement": placement,
        "capacity": {"max_num_tokens_per_rank": max_tokens, **rows},
        "exchange": {"payload": shape.payload, "timeout_s": TIMEOUT_S, **settings},
    }
    return make_config(
        shape.num_experts, shape.top_k, shape.hidden_size, shape.dtype, ep_size, sections
    )
