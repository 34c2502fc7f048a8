"""Which version of a trainer's weights the layers of a rank have, whichever `WeightReceiver` has
brought it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn


class Held(NamedTuple):
    """What a rank has whole."""

    version: int
    trainer: str
    """the group of ranks that has sent it"""


FIRST = Held(-1, "")
"""Weights that no receiver has brought."""


class HeldVersions:
    """What the layers of an `ExpertParallel` have. None: weights of several versions, or of which
    nobody knows the version.
    """

    def __init__(self) -> None:
        self._of_layers = WeakKeyDictionary[nn.Module, Held | None]()

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
