"""Which version of a trainer's weights the layers of a rank have, whichever `WeightReceiver` has
brought it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from epmoe.group.errors import EPStateError


class Held(NamedTuple):
    """What a rank has whole."""

    version: int
    trainer: str
    """the group of ranks that has sent it"""


FIRST = Held(-1, "")
"""Weights that no receiver has brought."""


_REMEDY = (
    "make a new WeightReceiver on all ranks, which takes the newest version; or load the same "
    "weights on all ranks, and say so by its `version=`"
)


class HeldVersions:
    """What the layers of an `ExpertParallel` have. None: weights of several versions, or of which
    nobody knows the version.
    """

    def __init__(self) -> None:
        self._of_layers = WeakKeyDictionary[nn.Module, Held | None]()
        self._differ = ""  # what the ranks of this group have, where no round may begin on it
        self._unsettled = WeakSet[nn.Module]()  # layers to which a receiver must bring a version
        self._received = False  # whether a receiver has brought one to other layers at least

    def of(self, layers: Iterable[nn.Module]) -> Held | None:
        """What all of these layers have, if it is one."""
        found = {self._of_layers.get(layer, FIRST) for layer in layers}
        return found.pop() if len(found) == 1 else None

    def put(self, layers: Iterable[nn.Module], held: Held | None) -> None:
        """Say what these layers have from now on."""
        for layer in layers:
            self._of_layers[layer] = held

    def doubt(self) -> None:
        """Somebody else loads weights of experts, of a version that nobody knows."""
        for layer, held in list(self._of_layers.items()):
            if held != FIRST:
                self._of_layers[layer] = None

    def said(self) -> list[Held | None]:
        """What this rank tells the others when it joins a group: what its layers have, in the order
        in which receivers have brought it.
        """
        return [held for held, _ in groupby(self._of_layers.values())] or [FIRST]

    def compare(self, of_ranks: Sequence[Sequence[Any]], whole: bool) -> None:
        """What all ranks of a new group have `said`. `whole`: each has the weights of all experts
        that it is to hold; otherwise some come from elsewhere.

        Where that is not one version, no round may begin until a receiver has brought one.
        """
        said = [[None if held is None else Held(*held) for held in each] for each in of_ranks]
        first = said[0]
        same = None not in first and all(each == first for each in said)
        differ = ""
        if not same:
            differ = differences([each[0] if len(each) == 1 else None for each in said])
        elif not whole and first != [FIRST]:
            differ = "some of them have come from elsewhere"
        self._unsettled = WeakSet(self._of_layers)
        self._received = False
        self._differ = differ

    def settle(self, layers: Iterable[nn.Module]) -> None:
        """A receiver of all ranks has brought these layers one version."""
        self._unsettled.difference_update(layers)
        self._received = True

    @property
    def is_settled(self) -> bool:
        """Whether rounds may begin."""
        if self._differ and self._received:
            if self._unsettled:
                gc.collect()  # layers of a model that nobody has any more do not count
            if not self._unsettled:
                self._differ = ""
        return not self._differ

    def check(self) -> None:
        """Raises EPStateError, which says what to do, where no round may begin."""
        if not self.is_settled:
            what = f"the group has changed, and ranks have different weights, {self._differ}"
            raise EPStateError(f"{what}: {_REMEDY}")


def differences(of_ranks: Sequence[Held | None]) -> str:
    """What the ranks have, where it is not one version that is whole; "" otherwise."""
    if len(set(of_ranks)) == 1 and of_ranks[0] is not None:
        return ""
    return ", ".join(f"rank {rank} has {_named(held)}" for rank, held in enumerate(of_ranks))


def _named(held: Held | None) -> str:
    if held is None:
        return "weights of several or unknown versions"
    if held == FIRST:
        return "the weights that it began with"
    return f"version {held.version}" + (f" of trainer {held.trainer}" if held.trainer else "")
