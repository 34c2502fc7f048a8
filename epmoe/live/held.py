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
    """A version of the weights that layers of a rank have completely."""

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
    """The version that each layer of an `ExpertParallel` has. None stands for weights of several
    versions or of an unknown one.
    """

    def __init__(self) -> None:
        self._of_layers = WeakKeyDictionary[nn.Module, Held | None]()
        # Text that says what each rank has, where ranks differ: then no round may begin.
        self._differ = ""
        # Layers to which a receiver must bring a version.
        self._without_version = WeakSet[nn.Module]()
        # Whether a receiver has brought a version to any layer since the ranks were compared.
        self._received = False

    def of(self, layers: Iterable[nn.Module]) -> Held | None:
        """The version of these layers, if all have the same."""
        found = {self._of_layers.get(layer, FIRST) for layer in layers}
        return found.pop() if len(found) == 1 else None

    def put(self, layers: Iterable[nn.Module], held: Held | None) -> None:
        """Record the version that these layers have from now on."""
        for layer in layers:
            self._of_layers[layer] = held

    def doubt(self) -> None:
        """Record that weights of an unknown version are loaded into experts."""
        for layer, held in list(self._of_layers.items()):
            if held != FIRST:
                self._of_layers[layer] = None

    def said(self) -> list[Held | None]:
        """The versions of this rank's layers, in the order in which receivers have brought them.
        A rank tells them to the others when it joins a group.
        """
        return [held for held, _ in groupby(self._of_layers.values())] or [FIRST]

    def compare(self, of_ranks: Sequence[Sequence[Any]], whole: bool) -> None:
        """Compare what all ranks of a new group have `said`. Where it is not one version, no round
        may begin until a receiver has brought one.

        `whole`: each rank has the weights of all experts that it is to hold. Otherwise some weights
        come from elsewhere.
        """
        said = [[None if held is None else Held(*held) for held in each] for each in of_ranks]
        first = said[0]
        same = None not in first and all(each == first for each in said)
        differ = ""
        if not same:
            differ = differences([each[0] if len(each) == 1 else None for each in said])
        elif not whole and first != [FIRST]:
            differ = "some of them have come from elsewhere"
        self._without_version = WeakSet(self._of_layers)
        self._received = False
        self._differ = differ

    def mark_received(self, layers: Iterable[nn.Module]) -> None:
        """Record that a receiver of all ranks has brought these layers one version."""
        self._without_version.difference_update(layers)
        self._received = True

    @property
    def rounds_may_begin(self) -> bool:
        """Whether rounds may begin."""
        if self._differ and self._received:
            if self._without_version:
                # Layers of a model that nobody has any more do not count.
                gc.collect()
            if not self._without_version:
                self._differ = ""
        return not self._differ

    def check(self) -> None:
        """Raise EPStateError, which says what to do, where no round may begin."""
        if not self.rounds_may_begin:
            what = f"the group has changed, and ranks have different weights, {self._differ}"
            raise EPStateError(f"{what}: {_REMEDY}")


def differences(of_ranks: Sequence[Held | None]) -> str:
    """Text that says which version each rank has; "" if all have the same one completely."""
    if len(set(of_ranks)) == 1 and of_ranks[0] is not None:
        return ""
    return ", ".join(f"rank {rank} has {_named(held)}" for rank, held in enumerate(of_ranks))


def _named(held: Held | None) -> str:
    if held is None:
        return "weights of several or unknown versions"
    if held == FIRST:
        return "the weights that it began with"
    return f"version {held.version}" + (f" of trainer {held.trainer}" if held.trainer else "")
