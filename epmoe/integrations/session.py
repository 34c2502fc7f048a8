"""What every host framework needs around `ExpertParallel`.

All layers of a model share one `ExpertParallel`, which the first call makes. A batch of any length takes as many rounds
as it needs:

    x [T,D] ─ rounds of at most M tokens ─▶ dispatch ─▶ experts(rows [n,D], expert_offsets) ─▶ combine ─▶ y [T,D]

All ranks take as many rounds as the longest batch of any rank needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.config.config import ConfigError, EPConfig, ExchangeConfig
from epmoe.exchange.handles import Dispatched
from epmoe.exchange.health import EPMismatchError, EPTimeoutError
from epmoe.integrations.compiled import forget_numbers
from epmoe.local.quantize import dequantize_rows
from epmoe.native.arguments import check_forward_only, dtype_name
from epmoe.service import ExpertParallel

now: Callable[[], float] = time.perf_counter
"""The clock of `SharedExpertParallel.seconds`. `epmoe.cli.clock` sets one that waits for the GPU."""

Experts = Callable[[Tensor, Tensor], Tensor]
"""(rows [n,D] expert by expert, expert_offsets int32 [e+1]) → outputs [n,D]; n may be 0. Rows past expert_offsets[e]
hold anything; on the CPU there are none.
"""


@contextmanager
def _hinting() -> Iterator[None]:
    """Adds to the message of a timeout what a user of `generate` meets most often."""
    try:
        yield
    except EPTimeoutError as error:
        error.args = (
            f"{error}. If the missing ranks have ended `generate` sooner: give it `synced_gpus=True` on all ranks, so "
            "that they keep stepping",
        )
        raise


class SharedExpertParallel:
    """The `ExpertParallel` of all layers with the same shapes on one group.

    Attributes:
        ep: the `ExpertParallel`.
        static: whether every call is one round, of at most M tokens a rank; see `configure`.
        seconds: wall time of each stage so far, by the clock `now`, waiting for other ranks included. "agree" is the
            wait for the answer whether another round follows. On GPUs this is the time of the host, which waits for no
            kernel otherwise.
    """

    def __init__(
        self, config: EPConfig, group: dist.ProcessGroup | None, device: torch.device, static: bool = False
    ) -> None:
        """Collective; takes the arguments of `ExpertParallel`, and `static`."""
        self.seconds = dict.fromkeys(("set up", "agree", "dispatch", "experts", "combine"), 0.0)
        with self._timed("set up"):
            self.ep = ExpertParallel(config, group, device)
        self.static = static
        self._tags: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._max_tokens = config.capacity.max_num_tokens_per_rank

    def rounds(self, num_tokens: int) -> int:
        """Rounds that a batch of `num_tokens` takes, at least 1: a rank without tokens still takes part."""
        return max(1, -(-num_tokens // self._max_tokens))

    def longest_batch(self, num_tokens: int, tag: int = 0) -> int | None:
        """The most tokens that a rank brings to this call, of which this rank brings `num_tokens`; None: not known yet.

        In static mode it is M. Over several nodes this is collective: a slab for another node has the same length on
        all ranks, so they must agree on it before the first one leaves. They do so through host memory.

        Raises what `Exchange.largest` does. After any other exception, such as a Ctrl-C, this rank takes part without
        tokens in the rounds that follow, whose tag is `tag`; see `run`.
        """
        if self.static:
            return max(num_tokens, self._max_tokens)
        if self.ep.size == 1:
            return num_tokens
        exchange = self.ep._open
        with self._timed("agree"), _hinting():
            largest = exchange.largest(num_tokens)
            if largest is None:
                return None
            try:
                return largest()
            except EPTimeoutError:
                raise
            except BaseException:
                with suppress(RuntimeError):
                    self._see_out(exchange.rounds.count, largest(), tag)
                raise

    def tag_of(self, layer: object) -> int:
        """The tag of a layer's rounds. Layers number themselves in the order of their first calls."""
        if layer not in self._tags:
            self._tags[layer] = self.ep.new_tag()
        return self._tags[layer]

    @_hinting()
    def run(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Experts, longest: int | None, tag: int = 0
    ) -> Tensor:
        """Weighted expert outputs [T,D] of this rank's tokens. Collective. `tag` is that of `ExpertParallel.dispatch`.

        `longest` is the same on every rank: no rank brings more tokens. If it is None, each round says whether another
        one follows, and the host looks for that once the round is launched.

        Raises ValueError in static mode if `longest` is more than M, RuntimeError in a stream capture without
        `longest`, both before anything is sent, and what `ExpertParallel.dispatch`, `ExpertParallel.combine` and
        `experts` raise. An exception closes the round, wherever it comes from. In the rounds that other ranks still
        need, this rank then takes part without tokens and without its experts, so that the ranks stay in step. It
        waits for them as ever; a second exception, such as another Ctrl-C, ends that too.
        """
        M, exchange = self._max_tokens, self.ep._open
        if longest is None and x_TD.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a call in a stream capture cannot look whether another rank needs more rounds: "
                "`configure(static=True)` takes one round a call and looks at nothing"
            )
        batch, own = (x_TD, ids_TK, weights_TK), self.rounds(x_TD.shape[0])
        last_round, outputs = exchange.rounds.count, list[Tensor]()
        try:
            if self.static and longest is not None and longest > M:
                raise ValueError(
                    f"a rank brings {longest} tokens, but static mode takes at most max_num_tokens_per_rank = {M} a "
                    "call: configure more, or send a prompt in chunks (`prefill_chunk_size` of transformers' generate)"
                )
            while not outputs or self._another(len(outputs), longest):
                taken, whole = len(outputs), own == 1 and not outputs
                x, ids, weights = batch if whole else (tensor[taken * M : (taken + 1) * M] for tensor in batch)
                outputs.append(self._round(x, ids, weights, experts, longest, tag, more=taken + 1 < own))
        except EPMismatchError:  # all ranks raise it
            raise
        except BaseException:
            self._see_out(last_round, M if self.static else longest, tag)
            raise
        return outputs[0] if own == 1 else torch.cat(outputs[:own])

    def _another(self, taken: int, longest: int | None) -> bool:
        """Whether all ranks take another round after `taken` ones."""
        if longest is not None:
            return taken < self.rounds(longest)
        with self._timed("agree"):
            return self.ep._open.has_more_rounds()

    def _round(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, longest: int | None, tag: int, more: bool
    ) -> Tensor:
        exchange = self.ep._open
        last_round = exchange.rounds.count
        try:
            with self._timed("dispatch"):
                padded_tokens = self._padded_tokens(longest)
                with exchange.rounds.asking(more) if longest is None else nullcontext():
                    dispatched = self.ep.dispatch(x, ids, weights, padded_tokens=padded_tokens, tag=tag)
            with self._timed("experts"):
                most_tokens = (self.ep.size - 1) * self._most_tokens(longest) + x.shape[0]
                outputs = experts(self._rows(dispatched, most_tokens * ids.shape[1]), dispatched.expert_offsets)
                check_forward_only(outputs)
            with self._timed("combine"):
                return self.ep.combine(outputs, dispatched)
        except BaseException:
            exchange.abort_after(last_round)
            raise

    def _padded_tokens(self, longest: int | None) -> int:
        return self.ep.config.padded_tokens(self._most_tokens(longest))

    def _see_out(self, last_round: int, longest: int | None, tag: int) -> None:
        """After an exception: the rounds after `last_round` that other ranks still need, the first at any rate. It
        raises nothing of the exchange, since the caller has an exception already."""
        exchange = self.ep._open
        taken = exchange.rounds.count - last_round
        if exchange.failed or taken and not exchange.rounds.opened_after(last_round):
            return
        with suppress(RuntimeError):
            while not taken or self._another(taken, longest):
                with exchange.rounds.asking(more=False) if longest is None else nullcontext():
                    self.ep.skip(padded_tokens=self._padded_tokens(longest), tag=tag)
                taken += 1

    def _most_tokens(self, longest: int | None) -> int:
        """The most tokens of a rank in a round."""
        return self._max_tokens if longest is None else min(longest, self._max_tokens)

    def _rows(self, dispatched: Dispatched, most_pairs: int) -> Tensor:
        """The rows that arrived, if all sources together have sent at most `most_pairs` pairs of a token and an expert.

        On the CPU these rows only. On GPUs nobody asks how many they are; padding follows them, as little as the host
        can know.
        """
        rows, scales, ep = dispatched.rows, dispatched.scales, self.ep
        if ep.device.type == "cpu":
            n = int(dispatched.expert_offsets[-1])
        else:
            n = min(rows.shape[0], most_pairs + ep.num_local_experts * (ep.config.capacity.alignment - 1))
        return rows[:n] if scales is None else dequantize_rows(rows[:n], scales[:n], dispatched.dtype)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = now()
        yield
        self.seconds[stage] += now() - start


_settings: dict[str, Any] = {}
_group: dist.ProcessGroup | None = None
_static = False
_shared: dict[tuple[object, ...], SharedExpertParallel] = {}


def configure(*, group: dist.ProcessGroup | None = None, static: bool | None = None, **settings: Any) -> None:
    """Change the settings of later calls. Call it on every rank with the same arguments, between forward passes.

    Settings that a call leaves out keep their values. Every `ExpertParallel` in use is closed; the next forward pass
    makes new ones.

    Args:
        group: the expert-parallel group of layers whose framework names no group; the world by default.
        static: with True, a rank brings at most `max_num_tokens_per_rank` tokens to a call, and a longer batch is a
            ValueError before anything is sent. Then ranks agree on nothing and the host waits for no kernel, so that a
            forward pass can be compiled and captured into a CUDA graph. The first pass, which makes the windows, must
            be neither. False is the default.
        settings: keys of the `capacity` and `exchange` sections of `EPConfig`, above all `max_num_tokens_per_rank`
            (longer batches take several rounds, unless `static`) and `timeout_s`; and `ranks_per_node` of `topology`,
            where the group spans machines.

    Raises:
        ConfigError: a key or its value is wrong; the message names the key.
    """
    global _settings, _group, _static
    changed = {**_settings, **settings}
    if static is not None and not isinstance(static, bool):
        raise ConfigError(f"`static` must be True or False, got {static!r}")
    _config(1, 1, 128, torch.float32, 1, changed)
    close()
    _settings, _group = changed, group or _group
    _static = _static if static is None else static


def close() -> None:
    """Release every `ExpertParallel` made here; a later call makes new ones.

    Compiled models notice. CUDA graphs that were captured by hand must not be replayed any more.
    """
    forget_numbers()
    while _shared:
        _shared.popitem()[1].ep.close()


def poll() -> None:
    """`ExpertParallel.poll` of every `ExpertParallel` in use: raises what kernels have reported so far, never waits.

    A replay of a CUDA graph is no call and raises nothing, so poll once in each step, as a `BaseStreamer` of
    transformers' generate can.
    """
    with _hinting():
        for layers in _shared.values():
            layers.ep.poll()


def shared() -> tuple[SharedExpertParallel, ...]:
    """Every `SharedExpertParallel` in use, oldest first."""
    return tuple(_shared.values())


def share(
    x_TD: Tensor, ids_TK: Tensor, num_experts: int, group: dist.ProcessGroup | None = None
) -> SharedExpertParallel:
    """The `SharedExpertParallel` of this group and these shapes. The first call makes it and is collective.

    Raises RuntimeError if that first call is captured into a CUDA graph.
    """
    group = group or _group
    ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)
    hidden_size, top_k = x_TD.shape[1], ids_TK.shape[1]
    key = (ranks, num_experts, top_k, hidden_size, x_TD.dtype, x_TD.device)
    if key not in _shared:
        if x_TD.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("call the model once before the capture: the first call makes the windows")
        config = _config(num_experts, top_k, hidden_size, x_TD.dtype, len(ranks), _settings)
        _shared[key] = SharedExpertParallel(config, group, x_TD.device, _static)
    return _shared[key]


def _config(
    num_experts: int, top_k: int, hidden_size: int, dtype: torch.dtype, ep_size: int, settings: dict[str, Any]
) -> EPConfig:
    exchange = {key: value for key, value in settings.items() if key in ExchangeConfig.model_fields}
    topology = {key: value for key, value in settings.items() if key == "ranks_per_node"}
    return EPConfig(
        model={
            "num_experts": num_experts,
            "num_experts_per_tok": top_k,
            "hidden_size": hidden_size,
            "dtype": dtype_name(dtype),
        },
        topology={"ep_size": ep_size, **topology},
        capacity={key: value for key, value in settings.items() if key not in exchange | topology},
        exchange=exchange,
    )
