"""Moves experts while a host framework serves: every step of the framework drives a `Balancer`."""

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

# Keys of `live` that are arguments of `Balancer`; all others are keys of the section `placement`.
_BALANCER_KEYS = ("every", "goal", "max_moves", "least_gain")


def section_of(live: dict[str, Any], layers: int, **keys: Any) -> dict[str, Any]:
    """Make the section `placement` of a configuration with `layers` layers of experts that move.

    `keys` are the framework's own values. Keys of `live`, which the user has set, override them;
    the arguments of `Balancer` among them do not belong into the section and are left out.
    """
    user_keys = {key: value for key, value in live.items() if key not in _BALANCER_KEYS}
    return {"live": True, "layers": layers} | keys | user_keys


@contextmanager
def section_with_slots(
    live: dict[str, Any], first: Placement, layers: int, group: dist.ProcessGroup
) -> Iterator[dict[str, Any]]:
    """Make the section of `section_of` for a framework that has loaded the experts of each rank as
    `first` says. The remaining slots of a rank start empty. Collective.

    The section names a file that says which expert is in which slot. All ranks name the same file,
    which exists until the end of the context. If rank 0 cannot write it, all ranks raise.
    """
    # [R, S]: the expert in each of the S slots of each of the R ranks.
    slots_RS = torch.full((first.ep_size, live["slots_per_rank"]), EMPTY, dtype=torch.int32)
    for rank, slots_S in enumerate(slots_RS):
        experts = first.local_experts(rank)
        slots_S[: len(experts)] = torch.tensor(experts)
    with TemporaryDirectory(prefix="epmoe") as folder:
        path = f"{folder}/slots.json"
        peers = Peers.of(group)
        with peers.together():
            if peers.rank == 0:
                write_slots(path, slots_RS.flatten().expand(layers, -1))
            # All ranks read the file that rank 0 has written.
            path = peers.all_gather(path)[0]
        yield section_of(live, layers, slots=path)


class Balancing:
    """An `ExpertParallel` of a serving framework, with a `Balancer` where its experts move.

    `live` has arguments of `Balancer` and keys of the section `placement`. If it is None, experts
    stay where they are, and there is no balancer. Rank 0 logs the moves to `logger`.
    """

    def __init__(
        self, ep: ExpertParallel, live: dict[str, Any] | None, logger: logging.Logger
    ) -> None:
        self.ep = ep
        self._logger = logger
        self._balancer: Balancer | None = None
        if live is not None:
            arguments = {key: live[key] for key in _BALANCER_KEYS if key in live}
            self._balancer = Balancer(ep, **arguments)
        # How many entries of the balancer's history have been logged.
        self._num_logged = 0
        # False after a step of the framework, since moves may be under way until `slots` ends them.
        self._moves_have_ended = True

    def poll(self) -> None:
        """Raise what kernels have reported, and let the balancer go on with its moves.

        The framework calls this before each of its steps, on the thread and stream of the step. The
        call waits for no rank.
        """
        if self._balancer is None:
            self.ep.poll()
            return
        # The balancer may begin moves now.
        self._moves_have_ended = False
        self._balancer.tick()
        # Log each plan once, and only plans with moves. Rank 0 alone knows the loads: the lists of
        # the other ranks are empty.
        history = self._balancer.history
        if len(history) == self._num_logged:
            return
        self._num_logged = len(history)
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
        """Register the weights of the layer with this tag, so that its experts can move. Where
        experts stay, nothing happens.
        """
        tensors = [parameter.detach() for parameter in experts.parameters()]

        def weights_of(tag: int, slot: int) -> list[Tensor]:
            return [tensor[slot] for tensor in tensors]

        self.ep.live.register(tag, weights_of)

    def slots(self, tag: int) -> list[int] | None:
        """List the expert in each slot of this rank, or −1 for an empty slot, in the layer with
        this tag. Returns None where experts stay.

        The framework calls this while it loads a layer's weights, for the first time or again. The
        first call after a step of the framework is collective: it ends the moves that are under
        way.
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
