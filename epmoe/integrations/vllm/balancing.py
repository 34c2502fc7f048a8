"""Experts that move while vLLM serves: a `Balancer` for each `ExpertParallel`, one tick for each step of the engine.

vLLM calls a function of its platform before each step, also before replays of CUDA graphs and before the empty steps of
an idle rank. `Balancing` puts itself in front of this function. Where no experts move nothing is put there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from vllm.logger import init_logger
from vllm.platforms import current_platform

from epmoe.config.placement import Placement
from epmoe.group.peers import Peers
from epmoe.live.balancer import Balancer
from epmoe.live.layout import EMPTY
from epmoe.live.slots import write_slots
from epmoe.service import ExpertParallel

logger = init_logger("vllm.epmoe.balancing")

_OF_BALANCER = ("every", "goal", "max_moves", "least_gain")


@contextmanager
def placement_of(
    live: dict[str, Any], first: Placement, layers: int, group: dist.ProcessGroup
) -> Iterator[dict[str, Any]]:
    """The section `placement`: `first` where vLLM has loaded the experts, and the slots behind them empty. Collective.

    Its file of slots exists until the end of the context, and is the same one on all ranks.
    """
    slots = torch.full((first.ep_size, live["slots_per_rank"]), EMPTY, dtype=torch.int32)
    for rank, row in enumerate(slots):
        experts = first.local_experts(rank)
        row[: len(experts)] = torch.tensor(experts)
    with TemporaryDirectory(prefix="epmoe") as folder:
        path = f"{folder}/slots.json"
        if group.rank() == 0:
            write_slots(path, slots.flatten().expand(layers, -1))
        path = Peers.of(group).all_gather(path)[0]
        keys = {key: value for key, value in live.items() if key not in _OF_BALANCER}
        yield {"live": True, "layers": layers, "slots": path} | keys


class Balancing:
    """A `Balancer` that ticks before each step of this engine, on its thread, and logs what it moves.

    `live` has keys of `Balancer`, and of `placement`.
    """

    def __init__(self, ep: ExpertParallel, live: dict[str, Any]) -> None:
        self.balancer = Balancer(ep, **{key: live[key] for key in _OF_BALANCER if key in live})
        self._logged = 0
        if not _open:
            current_platform.set_additional_forward_context = _before_step
        _open.append(self)

    def tick(self) -> None:
        self.balancer.tick()
        history = self.balancer.history
        if len(history) != self._logged:
            self._logged = len(history)
            if history and (step := history[-1]).before and step.moves:  # rank 0 knows the loads
                logger.info(
                    "epmoe moves %d experts: the busiest rank has %.2f of the mean load on average over the layers, "
                    "and is to have %.2f",
                    step.moves, fmean(step.before), fmean(step.after),
                )  # fmt: skip

    def close(self) -> None:
        _open.remove(self)
        if not _open:
            del current_platform.set_additional_forward_context  # the class's own again
        self.balancer.close()


_open: list[Balancing] = []


def _before_step(*arguments: Any, **named: Any) -> dict[str, Any]:
    """In place of `Platform.set_additional_forward_context`."""
    for balancing in _open:
        balancing.tick()
    additional: dict[str, Any] = type(current_platform).set_additional_forward_context(*arguments, **named)
    return additional
