"""Peers: exchanges and whole layers of other libraries, timed and checked like ours, on the same routing in one run.

A driver is a Python file whose `PEERS` lists peers; `epmoe bench --peers FOLDER` runs all drivers of a folder. A peer
that is absent, or that does not take a case, is left out, and the report says why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from epmoe.bench.graphs import slowest
from epmoe.bench.layer_sides import Calls, WholeLayer
from epmoe.bench.sample import Payload, Sample
from epmoe.bench.sides import Exchange, Side, poison
from epmoe.config.placement import Placement

_T = TypeVar("_T")


class LeftOut(Exception):
    """A peer does not take a case; the message says why."""


class Peer:
    """One library. A driver overrides `version`, and `exchange` or `layer` or both.

    name: in tables. install: what to install, said where the library is absent.
    """

    name: str
    install: str

    def version(self) -> str:
        """The version that runs. Raises ImportError, where the library is absent or does not load."""
        raise NotImplementedError

    def exchange(self, sample: Sample, payload: Payload, group: dist.ProcessGroup) -> AbstractContextManager[Exchange]:
        """A side that exchanges the tokens of `sample`. Collective. Raises LeftOut."""
        raise NotImplementedError

    def layer(self, case: WholeLayer) -> AbstractContextManager[Callable[[], Tensor]]:
        """What computes y [T, D] from `case.logits_TE`, by `case.routed`. Collective. Raises LeftOut."""
        raise NotImplementedError


class Peers:
    """The peers of a run, and why others were left out: the first reason, by name. All methods are collective."""

    def __init__(self, peers: Sequence[Peer], group: dist.ProcessGroup) -> None:
        self.group, self.left_out = group, dict[str, str]()
        self._present: dict[str, Peer] = {}
        for peer in peers:
            with self._agreed(peer.name, peer.install) as made:
                made.append(f"{peer.name} {peer.version()}".strip())
            self._present |= dict.fromkeys(made, peer)

    def exchanges(self, sample: Sample, payload: Payload, time: Callable[[Side], _T]) -> Iterator[tuple[str, _T]]:
        """What `time` says of each exchange that takes this case, by name."""
        for name, peer in self._taking("exchange", sample.placement, sample.tokens):
            with self._agreed(f"{name}, {payload}") as made, peer.exchange(sample, payload, self.group) as side:
                side.name = name
                side.check()
                made.append(time(side))
            yield from ((name, result) for result in made)

    def layers(self, case: WholeLayer, precision: str, time: Callable[[Side], _T]) -> Iterator[tuple[str, _T]]:
        """Likewise of each layer."""
        for name, peer in self._taking("layer", case.ep.placement, len(case.x_TD)):
            with self._agreed(f"{name}, {precision}") as made, peer.layer(case) as run:
                poison([run()])
                case.check_output(name, run())
                made.append(time(Calls(name, run, exact=False)))
            yield from ((name, result) for result in made)

    def _taking(self, method: str, placement: Placement, tokens: int) -> list[tuple[str, Peer]]:
        """The peers that have `method`, by name; none where they cannot take the placement or the tokens."""
        own = getattr(Peer, method)
        having = [(name, peer) for name, peer in self._present.items() if getattr(type(peer), method) is not own]
        E, R = placement.num_experts, placement.ep_size
        if E % R == 0 and placement == Placement.build(E, R):
            return having if tokens else []
        if having:
            self.left_out["peers"] = "they want as many experts on each rank, in order and without copies"
        return []

    @contextmanager
    def _agreed(self, name: str, install: str = "") -> Iterator[list[Any]]:
        """A list for what the block makes. It is emptied, and the reason kept, if a rank could not make it."""
        made: list[Any] = []
        problem = ""
        try:
            yield made
        except LeftOut as error:
            problem = str(error)
        except Exception as error:  # whatever a library raises: the run goes on without it
            problem = f"needs {install}: {error}" if isinstance(error, ImportError) and install else repr(error)
        if slowest([bool(problem)], self.group)[0]:
            made.clear()
            self.left_out.setdefault(name, problem.partition("\n")[0] or "another rank could not run it")


def load(path: Path) -> list[Peer]:
    """The peers of a driver, or of all drivers of a folder in the order of their names.

    Raises ValueError if there are none.
    """
    files = [path] if path.suffix == ".py" else sorted(path.glob("[!_]*.py"))
    peers: list[Peer] = []
    for file in files:
        spec = importlib.util.spec_from_file_location(f"epmoe_peer_{file.stem}", file)
        if spec is None or spec.loader is None or not file.is_file():
            raise ValueError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        peers += getattr(module, "PEERS", [])
    if not peers:
        raise ValueError(f"{path} holds no driver: a Python file with a list PEERS")
    return peers
