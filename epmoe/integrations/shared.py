"""What every host framework needs around `ExpertParallel`: one for all layers of a model, made at the first call, and
batches of any length.

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
from epmoe.service import ExpertParallel
from epmoe.stages.checks import check_forward_only
from epmoe.stages.quantize import dequantize_rows

Experts = Callable[[Tensor, Tensor], Tensor]
"""Rows [n,D] sorted by expert, and the local expert of each, int64 [n], to their outputs [n,D]; n > 0."""


class SharedExpertParallel:
    """The `ExpertParallel` of all layers with the same shapes on one group: `ep`, and in `seconds` the wall time that
    each stage has taken so far, waiting for other ranks included; on GPUs the host's, which waits only in `agree` and
    `experts`.
    """

    def __init__(self, config: EPConfig, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.ep = ExpertParallel(config, group, device)
        self.seconds = dict.fromkeys(("agree", "dispatch", "experts", "combine"), 0.0)
        self._max_tokens = config.capacity.max_num_tokens_per_rank

    def rounds(self, num_tokens: int) -> int:
        """Rounds that a batch of so many tokens takes; a rank with none still takes part in one."""
        return max(1, -(-num_tokens // self._max_tokens))

    def agree_on_rounds(self, num_tokens: int) -> int:
        """The rounds that the longest batch of all ranks takes; collective."""
        rounds = self.rounds(num_tokens)
        if self.ep.size == 1:
            return rounds
        with self._timed("agree"):
            most = torch.tensor(rounds, device=self.ep.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.ep.group)
            return int(most)

    def run(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Experts, rounds: int) -> Tensor:
        """Weighted expert outputs [T,D] of this rank's tokens; collective, with the same `rounds` on every rank.

        Raises, besides what `ExpertParallel.dispatch` and `combine` raise, what `experts` does; the round is closed.
        """
        starts = range(0, rounds * self._max_tokens, self._max_tokens)
        parts = [slice(start, start + self._max_tokens) for start in starts]
        outputs = [self._round(x_TD[part], ids_TK[part], weights_TK[part], experts) for part in parts]
        return outputs[0] if rounds == 1 else torch.cat(outputs)

    def _round(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        with self._timed("dispatch"):
            dispatched = self.ep.dispatch(x, ids, weights)
        try:
            with self._timed("experts"):
                rows = _run_experts(dispatched, experts)
        except BaseException:
            self.ep.abort(dispatched)
            raise
        with self._timed("combine"):
            return self.ep.combine(rows, dispatched)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - start


def _run_experts(dispatched: Dispatched, experts: Experts) -> Tensor:
    """Outputs [n,D] of the rows that came. Frameworks' experts size their work by n, so it is read back to the host."""
    offsets = dispatched.expert_offsets
    n = int(offsets[-1])
    rows = dispatched.rows[:n]
    if rows.dtype != dispatched.dtype:  # an fp8 payload, with scales per 128 elements
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
    """Set what later calls use, alike on every rank and between forward passes; what is left out stays as it is.

    Args:
        group: the expert-parallel group of layers whose framework names none; at first the world.
        settings: keys of the `capacity` and `exchange` sections of `EPConfig`, above all `max_num_tokens_per_rank`
            (longer batches take several rounds) and `timeout_s`.

    What exists is closed, and made anew at the next call. Raises ConfigError, naming the wrong key.
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
    """Those in use, oldest first."""
    return tuple(_shared.values())


def share(
    x_TD: Tensor, ids_TK: Tensor, num_experts: int, group: dist.ProcessGroup | None = None
) -> SharedExpertParallel:
    """The one of this group and these shapes, made by all its ranks together at their first call."""
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
