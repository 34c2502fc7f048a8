"""Remembers which version of a trainer's weights the layers of a rank have. It belongs to an
`ExpertParallel`, and so outlives each `WeightReceiver` that has brought a version.
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
    """the name of the group of ranks that has sent the version; "" if the host has loaded it"""


FIRST = Held(-1, "")
"""Stands for weights that no receiver has brought."""

_REMEDY = (
    "make a new WeightReceiver on all ranks, which takes the newest version; or load the same "
    "weights on all ranks, and say so by its `version=`"
)


class HeldVersions:
    """The version that each layer of an `ExpertParallel` has.

    A `Held` names the version, and `FIRST` stands for weights that no receiver has brought. None
    stands for weights of several versions mixed, or of an unknown version.
    """

    def __init__(self) -> None:
        self._of_layers = WeakKeyDictionary[nn.Module, Held | None]()
        # If ranks have different weights, a text that says what each rank has. Then no round may
        # begin. It is "" if they have the same.
        self._differences = ""
        # The layers to which a receiver must bring a version before rounds may begin again.
        self._without_version = WeakSet[nn.Module]()
        # Whether a receiver has brought a version to any layer since `compare`.
        self._received = False

    def of(self, layers: Iterable[nn.Module]) -> Held | None:
        """The version of these layers if all have the same; otherwise None."""
        found = {self._of_layers.get(layer, FIRST) for layer in layers}
        return found.pop() if len(found) == 1 else None

    def put(self, layers: Iterable[nn.Module], held: Held | None) -> None:
        """Record the version that these layers have from now on."""
        for layer in layers:
            self._of_layers[layer] = held

    def doubt(self) -> None:
        """Record that weights of an unknown version are loaded into experts, such as lost experts
        from a checkpoint. Layers that no receiver has served stay as they are.
        """
        for layer, held in list(self._of_layers.items()):
            if held != FIRST:
                self._of_layers[layer] = None

    def said(self) -> list[Held | None]:
        """The versions of this rank's layers, which a rank tells the other ranks when it joins a
        group.

        They are in the order in which receivers have brought them, the same on all ranks. Layers
        that follow one another with the same version count once.
        """
        return [held for held, _ in groupby(self._of_layers.values())] or [FIRST]

    def compare(self, of_ranks: Sequence[Sequence[Any]], whole: bool) -> None:
        """Compare the versions that the ranks of a new group have. If they differ, no round may
        begin until a receiver has brought one version to all ranks.

        `of_ranks` has what `said` returned on each rank. `whole` says whether each rank has the
        weights of all experts that it is to hold. If not, some weights come from elsewhere, and
        their version is unknown.
        """
        # The lists have come as JSON, in which a `Held` is a list of its fields.
        by_rank: list[list[Held | None]] = []
        for versions in of_ranks:
            by_rank.append([None if held is None else Held(*held) for held in versions])
        first = by_rank[0]
        are_equal = None not in first and all(versions == first for versions in by_rank)
        differences_text = ""
        if not are_equal:
            # A rank whose layers have several versions has no single one.
            single_versions = []
            for versions in by_rank:
                single_versions.append(versions[0] if len(versions) == 1 else None)
            differences_text = differences(single_versions)
        elif not whole and first != [FIRST]:
            differences_text = "some of them have come from elsewhere"
        self._without_version = WeakSet(self._of_layers)
        self._received = False
        self._differences = differences_text

    def mark_received(self, layers: Iterable[nn.Module]) -> None:
        """Record that these layers have the same version on all ranks, which a receiver has just
        brought or compared.
        """
        self._without_version.difference_update(layers)
        self._received = True

    @property
    def rounds_may_begin(self) -> bool:
        """Whether rounds may begin: ranks had the same weights when the group formed, or receivers
        have brought a version to all layers since then.
        """
        if self._differences and self._received:
            if self._without_version:
                # Layers of a deleted model do not count. Without this call they could still be in
                # the WeakSet.
                gc.collect()
            if not self._without_version:
                self._differences = ""
        return not self._differences

    def check(self) -> None:
        """Raise EPStateError if no round may begin. The error says what to do."""
        if not self.rounds_may_begin:
            what = f"the group has changed, and ranks have different weights, {self._differences}"
            raise EPStateError(f"{what}: {_REMEDY}")


def differences(of_ranks: Sequence[Held | None]) -> str:
    """Say which version each rank has, for an error. `of_ranks` has the version of each rank.

    Returns "" if all ranks have the same version, and none of them is None.
    """
    if len(set(of_ranks)) == 1 and of_ranks[0] is not None:
        return ""
    return ", ".join(f"rank {rank} has {_named(held)}" for rank, held in enumerate(of_ranks))


def _named(held: Held | None) -> str:
    """Words for what a rank has."""
    if held is None:
        return "weights of several or unknown versions"
    if held == FIRST:
        return "the weights that it began with"
    if not held.trainer:
        return f"version {held.version}"
    return f"version {held.version} of trainer {held.trainer}"
