"""What every host framework needs around `ExpertParallel`.

All layers of a model share one `ExpertParallel`, which the first call makes. A batch of any length takes as many rounds
as it needs:

    x [T,D] ─ rounds of at most M tokens ─▶ dispatch ─▶ experts(rows [n,D], local ids [n]) ─▶ combine ─▶ y [T,D]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.config import EPConfig, ExchangeConfig
from epmoe.handles import Dispatched
from epmoe.rounds import abort_after
from epmoe.service import ExpertParallel
from epmoe.stages.checks import check_forward_only
from epmoe.stages.quantize import dequantize_rows

now: Callable[[], float] = time.perf_counter
"""The clock of `SharedExpertParallel.seconds`. `epmoe.integrations.clock` sets one that waits for the GPU."""

Experts = Callable[[Tensor, Tensor], Tensor]
"""(rows [n,D] sorted by expert, local expert of each row, int64 [n]) → outputs [n,D]; n > 0."""


class SharedExpertParallel:
    """The `ExpertParallel` of all layers with the same shapes on one group.

    Attributes:
        ep: the `ExpertParallel`.
        seconds: wall time of each stage so far, by the clock `now`, waiting for other ranks included. On GPUs this is
            the time of the host, which waits for the device only in the stages `agree` and `experts`.
    """

    def __init__(self, config: EPConfig, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Collective; takes the arguments of `ExpertParallel`."""
        self.seconds = dict.fromkeys(("set up", "agree", "dispatch", "experts", "combine"), 0.0)
        with self._timed("set up"):
            self.ep = ExpertParallel(config, group, device)
        self._max_tokens = config.capacity.max_num_tokens_per_rank

    def rounds(self, num_tokens: int) -> int:
        """Rounds that a batch of `num_tokens` takes, at least 1: a rank without tokens still takes part."""
        return max(1, -(-num_tokens // self._max_tokens))

    def agree_on_rounds(self, num_tokens: int) -> int:
        """Rounds that the longest batch of all ranks takes. Collective."""
        rounds = self.rounds(num_tokens)
        if self.ep.size == 1:
            return rounds
        with self._timed("agree"):
            most = torch.tensor(rounds, device=self.ep.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.ep.group)
            return int(most)

    def run(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Experts, rounds: int) -> Tensor:
        """Weighted expert outputs [T,D] of this rank's tokens. Collective, with the same `rounds` on every rank.

        Raises what `ExpertParallel.dispatch`, `ExpertParallel.combine` and `experts` raise. An exception closes the
        round, wherever it comes from.
        """
        starts = range(0, rounds * self._max_tokens, self._max_tokens)
        parts = [slice(start, start + self._max_tokens) for start in starts]
        outputs = [self._round(x_TD[part], ids_TK[part], weights_TK[part], experts) for part in parts]
        return outputs[0] if rounds == 1 else torch.cat(outputs)

    def _round(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        exchange = self.ep._open
        last_round = exchange.rounds.count
        try:
            with self._timed("dispatch"):
                dispatched = self.ep.dispatch(x, ids, weights)
            with self._timed("experts"):
                rows = _run_experts(dispatched, experts)
            with self._timed("combine"):
                return self.ep.combine(rows, dispatched)
        except BaseException:
            abort_after(exchange, last_round)
            raise

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = now()
        yield
        self.seconds[stage] += now() - start


def _run_experts(dispatched: Dispatched, experts: Experts) -> Tensor:
    """Outputs [n,D] of the rows that arrived. Frameworks' experts need n on the host, so this reads it back."""
    offsets = dispatched.expert_offsets
    n = int(offsets[-1])
    rows = dispatched.rows[:n]
    if dispatched.scales is not None:  # an fp8 payload
        rows = dequantize_rows(rows, dispatched.scales[:n], dispatched.dtype)
    if n == 0:
        return rows
    outputs = experts(rows, torch.repeat_interleave(offsets.diff().long(), output_size=n))
    check_forward_only(outputs)
    return outputs


_settings: dict[str, Any] = {}
_group: dist.ProcessGroup | None = None
_shared: dict[tuple[object, ...], SharedExpertParallel] = {}


def configure(*, group: dist.ProcessGroup | None = None, **settings: Any) -> None:
    """Change the settings of later calls. Call it on every rank with the same arguments, between forward passes.

    Settings that a call leaves out keep their values. Every `ExpertParallel` in use is closed; the next forward pass
    makes new ones.

    Args:
        group: the expert-parallel group of layers whose framework names no group; the world by default.
        settings: keys of the `capacity` and `exchange` sections of `EPConfig`, above all `max_num_tokens_per_rank`
            (longer batches take several rounds) and `timeout_s`.

    Raises:
        ConfigError: a key or its value is wrong; the message names the key.
    """
    global _settings, _group
    changed = {**_settings, **settings}
    _config(1, 1, 128, torch.float32, 1, changed)
    close()
    _settings, _group = changed, group or _group


def close() -> None:
    """Release every `ExpertParallel` made here; a later call makes new ones."""
    while _shared:
        _shared.popitem()[1].ep.close()


def shared() -> tuple[SharedExpertParallel, ...]:
    """Every `SharedExpertParallel` in use, oldest first."""
    return tuple(_shared.values())


def share(
    x_TD: Tensor, ids_TK: Tensor, num_experts: int, group: dist.ProcessGroup | None = None
) -> SharedExpertParallel:
    """The `SharedExpertParallel` of this group and these shapes. The first call makes it and is collective."""
    group = group or _group
    ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)
    hidden_size, top_k = x_TD.shape[1], ids_TK.shape[1]
    key = (ranks, num_experts, top_k, hidden_size, x_TD.dtype, x_TD.device)
    if key not in _shared:
        config = _config(num_experts, top_k, hidden_size, x_TD.dtype, len(ranks), _settings)
        _shared[key] = SharedExpertParallel(config, group, x_TD.device)
    return _shared[key]


def _config(
    num_experts: int, top_k: int, hidden_size: int, dtype: torch.dtype, ep_size: int, settings: dict[str, Any]
) -> EPConfig:
    exchange = {key: value for key, value in settings.items() if key in ExchangeConfig.model_fields}
    return EPConfig(
        model={
            "num_experts": num_experts,
            "num_experts_per_tok": top_k,
            "hidden_size": hidden_size,
            "dtype": str(dtype).removeprefix("torch."),
        },
        topology={"ep_size": ep_size},
        capacity={key: value for key, value in settings.items() if key not in exchange},
        exchange=exchange,
    )
