"""Puts an adapter of all experts into a layer of all ranks: all of them have it afterwards, or none
may use it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from epmoe.checkpoint.adapters import StoredAdapter
from epmoe.group.collective import naming, peers_of
from epmoe.group.errors import EPTimeoutError
from epmoe.group.peers import Peers
from epmoe.local.adapters import ExpertAdapters
from epmoe.local.experts import GroupedExperts
from epmoe.local.weight_formats import plain_shape
from epmoe.service import ExpertParallel


class AdaptedLayer(Protocol):
    """The part of a `MoELayer` that an adapter needs."""

    ep: ExpertParallel
    experts: Any
    adapters: ExpertAdapters | None
    tag: int


def put_on_all_ranks(
    layer: AdaptedLayer,
    call: str,
    number: int,
    block: str,
    read: Callable[[tuple[int, int, int, int], bool], StoredAdapter],
) -> None:
    """Read an adapter on all ranks, and put it in place of the adapter `number` on all of them.
    Collective. Raises the errors of `MoELayer.load_adapter`.

    `read` takes the sizes (E, D, 2F, F) of the experts, and whether their gate and up rows are
    interleaved. `call` and `block` are for the messages of errors.
    """
    adapters = layer.adapters
    experts = layer.experts
    peers = peers_of(layer.ep)
    update = _AdapterUpdate(layer, peers, number, block)
    try:
        with naming(call, [layer.ep]), peers.together(update.confirm):
            if adapters is None or not isinstance(experts, GroupedExperts):
                raise ValueError("`adapters` must be given to the layer, which has no room for any")
            E = layer.ep.config.model.num_experts
            _, D, width = plain_shape(experts.w_down)
            stored = read((E, D, 2 * width, width), experts.interleaved)
            layer.ep.exchange.run(partial(update.put, adapters, stored))
    except BaseException as error:
        # If ranks may disagree about the adapter now, none of them may use it.
        others_may_have_it = update.is_unconfirmed or isinstance(error, EPTimeoutError)
        if adapters is not None and others_may_have_it:
            adapters.lose(number)
        raise


class _AdapterUpdate:
    """One call that puts an adapter into the room of all ranks."""

    def __init__(self, layer: AdaptedLayer, peers: Peers, number: int, block: str) -> None:
        self._layer = layer
        self._peers = peers
        self._number = number
        self._block = block
        self.is_unconfirmed = False
        """whether this rank has changed the adapter, and does not know that all ranks have"""

    def put(self, room: ExpertAdapters, stored: StoredAdapter) -> None:
        """Put this rank's part of an adapter into its room, once all ranks have read the same
        adapter. Collective.
        """
        layer = self._layer
        # An empty slot has the expert −1, and no token reaches it. It gets the part of expert 0.
        local_experts = [max(expert, 0) for expert in layer.ep.logical_experts(layer.tag)]
        local_part = room.checked(self._number, stored.of(local_experts))
        _check_same(
            self._peers,
            tag=layer.tag,
            number=self._number,
            block=self._block,
            adapters=room.count,
            adapter_rank=room.rank,
            digest=stored.digest,
        )
        self.is_unconfirmed = True
        if stored.is_none:
            room.clear_local(self._number)
        else:
            room.put_local(self._number, local_part)

    def confirm(self) -> None:
        """Note that all ranks have the adapter. An exception that comes later does not make the
        layer lose it.
        """
        self.is_unconfirmed = False


def _check_same(peers: Peers, **mine: object) -> None:
    """Raise ValueError on all ranks unless all of them have the same values `mine`, which describe
    the adapter that they are about to put. Collective.
    """
    first, *others = peers.all_gather(mine)
    for rank, theirs in enumerate(others, 1):
        odd = [name for name in first if theirs[name] != first[name]]
        if odd:
            raise ValueError(
                f"all ranks must take the same adapter, but `{odd[0]}` is {first[odd[0]]!r} on "
                f"rank 0 and {theirs[odd[0]]!r} on rank {rank}"
            )
