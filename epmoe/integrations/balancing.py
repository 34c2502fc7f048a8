"""Experts that move while a host framework serves: a `Balancer` that the framework's steps tick."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.config.placement import Placement
from epmoe.group.peers import Peers
from epmoe.live.balancer import Balancer
from epmoe.live.layout import EMPTY
from epmoe.live.slots import write_slots
from epmoe.local.experts import GroupedExperts
from epmoe.service import ExpertParallel

_OF_BALANCER = ("every", "goal", "max_moves", "least_gain")


def section_of(live: dict[str, Any], layers: int, **keys: Any) -> dict[str, Any]:
    """The section `placement`: `keys`, and those of `live` that are not the balancer's."""
    of_user = {key: value for key, value in live.items() if key not in _OF_BALANCER}
    return {"live": True, "layers": layers} | keys | of_user


@contextmanager
def section_with_slots(
    live: dict[str, Any], first: Placement, layers: int, group: dist.ProcessGroup
) -> Iterator[dict[str, Any]]:
    """Make the section of `section_of` if the framework has loaded the experts as in `first`, and
    the slots behind them are empty. Collective.

    Its file of slots exists until the end of the context, and is the same one on all ranks.
    """
    slots_RS = torch.full((first.ep_size, live["slots_per_rank"]), EMPTY, dtype=torch.int32)
    for rank, slots_S in enumerate(slots_RS):
        experts = first.local_experts(rank)
        slots_S[: len(experts)] = torch.tensor(experts)
    with TemporaryDirectory(prefix="epmoe") as folder:
        path = f"{folder}/slots.json"
        if group.rank() == 0:
            write_slots(path, slots_RS.flatten().expand(layers, -1))
        # All ranks read the file of rank 0.
        path = Peers.of(group).all_gather(path)[0]
        yield section_of(live, layers, slots=path)


class Balancing:
    """An `ExpertParallel`, and with `live` the `Balancer` of its experts, which logs what it moves.

    `live` has keys of `Balancer`, and of the section `placement`. None: experts stay where they
    are.
    """

    def __init__(
        self, ep: ExpertParallel, live: dict[str, Any] | None, logger: logging.Logger
    ) -> None:
        self.ep = ep
        self._logger = logger
        self._balancer: Balancer | None = None
        if live is not None:
            of_balancer = {key: live[key] for key in _OF_BALANCER if key in live}
            self._balancer = Balancer(ep, **of_balancer)
        # Steps of the balancer's history that the log has.
        self._logged = 0
        self._moves_have_ended = True

    def poll(self) -> None:
        """Look for failures, and tick, before each step of the framework, on its thread and stream.
        It waits for no rank. Raises what kernels have reported.
        """
        if self._balancer is None:
            self.ep.poll()
            return
        # Moves may begin in a tick.
        self._moves_have_ended = False
        self._balancer.tick()
        # Log a plan once. Rank 0 alone knows the loads.
        history = self._balancer.history
        if len(history) == self._logged:
            return
        self._logged = len(history)
        step = history[-1] if history else None
        if step is None or not step.moves or not step.before:
            return
        self._logger.info(
            "epmoe moves %d experts: the busiest rank has %.2f of the mean load on average over "
            "the layers, and is to have %.2f",
            step.moves,
            fmean(step.before),
            fmean(step.after),
        )

    def move(self, tag: int, experts: GroupedExperts) -> None:
        """Let the experts of the layer with this tag move, if experts do."""
        tensors = [parameter.detach() for parameter in experts.parameters()]

        def weights_of(tag: int, slot: int) -> list[Tensor]:
            return [tensor[slot] for tensor in tensors]

        self.ep.live.register(tag, weights_of)

    def slots(self, tag: int) -> list[int] | None:
        """The expert in each slot of this rank, −1 for none, of a layer whose weights are loaded,
        for the first time or again. None if experts stay.

        The first call after a step is collective: it ends the moves.
        """
        if self._balancer is None:
            return None
        if not self._moves_have_ended:
            self._balancer.finish()
            self._moves_have_ended = True
        return self.ep.live.experts(tag)

    def close(self) -> None:
        if self._balancer is not None:
            self._balancer.close()
        self.ep.close()
