"""Peers: exchanges and whole layers of other libraries, timed and checked like ours, on the same routing in one run.

A driver is a Python file whose `PEERS` lists peers; `epmoe bench --peers FOLDER` runs all drivers of a folder. A peer
that is absent, or that does not take a case, is left out, and the report says why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch.distributed as dist
from torch import Tensor

from epmoe.bench.layer_sides import Calls, WholeLayer
from epmoe.bench.sample import Payload, Sample
from epmoe.bench.sides import Exchange, Side, poison
from epmoe.config.placement import Placement
from epmoe.group.peers import Peers as Ranks

_T = TypeVar("_T")
_Opened = TypeVar("_Opened")


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


class _GivenUp(Exception):
    """A rank could not take a step, so all leave the peer out."""


class Peers:
    """The peers of a run that have `method`, and why others were left out: the first reason, by name.

    All methods are collective. A peer that raises on one rank is left out on all: ranks agree after each step, before
    one of them waits for a rank that has given up. What a library does within a step is its own.
    """

    def __init__(self, peers: Sequence[Peer], method: Literal["exchange", "layer"], group: dist.ProcessGroup) -> None:
        self.group, self.left_out = group, dict[str, str]()
        self._present: dict[str, Peer] = {}
        for peer in peers:
            if getattr(type(peer), method) is not getattr(Peer, method):  # others need not be loaded
                with suppress(_GivenUp):
                    version = self._step(peer.name, peer.version, peer.install)
                    self._present[f"{peer.name} {version}".strip()] = peer

    def exchanges(self, sample: Sample, payload: Payload, time: Callable[[Side], _T]) -> Iterator[tuple[str, _T]]:
        """What `time` says of each exchange that takes this case, by name."""

        def check(name: str, side: Exchange) -> None:
            side.name = name
            side.check()

        for name, peer in self._taking(sample.placement, sample.tokens):
            opened = partial(peer.exchange, sample, payload, self.group)
            yield from self._measured(name, payload, opened, partial(check, name), time)

    def layers(self, case: WholeLayer, precision: str, time: Callable[[Side], _T]) -> Iterator[tuple[str, _T]]:
        """Likewise of each layer."""

        def check(name: str, run: Callable[[], Tensor]) -> None:
            poison([run()])
            case.check_output(name, run())

        def timed(name: str, run: Callable[[], Tensor]) -> _T:
            return time(Calls(name, run, exact=False))

        for name, peer in self._taking(case.ep.placement, len(case.x_TD)):
            opened = partial(peer.layer, case)
            yield from self._measured(name, precision, opened, partial(check, name), partial(timed, name))

    def _taking(self, placement: Placement, tokens: int) -> list[tuple[str, Peer]]:
        """The peers by name; none where they cannot take the placement or the tokens."""
        E, R = placement.num_experts, placement.ep_size
        if E % R == 0 and placement == Placement.build(E, R):
            return list(self._present.items()) if tokens else []
        if self._present:
            self.left_out["peers"] = "they want as many experts on each rank, in order and without copies"
        return []

    def _measured(
        self,
        name: str,
        case: str,
        opened: Callable[[], AbstractContextManager[_Opened]],
        check: Callable[[_Opened], None],
        time: Callable[[_Opened], _T],
    ) -> Iterator[tuple[str, _T]]:
        """What `time` says of what `opened` gives; nothing if a step fails.

        What was opened is then left open on ranks that could open it, since to close it is collective.
        """
        step = partial(self._step, f"{name}, {case}")
        with suppress(_GivenUp), ExitStack() as stack:
            one = step(lambda: stack.enter_context(opened()))
            step(lambda: check(one))
            result = step(lambda: time(one))
            step(stack.pop_all().close)
            yield name, result

    def _step(self, name: str, do: Callable[[], _T], install: str = "") -> _T:
        """What `do` returns. Raises _GivenUp on all ranks, and keeps the reason, if it raises on one."""
        problem = ""
        try:
            made = do()
        except LeftOut as error:
            problem = str(error)
        except Exception as error:  # whatever a library raises: the run goes on without it
            problem = f"needs {install}: {error}" if isinstance(error, ImportError) and install else repr(error)
        if reason := next(filter(None, Ranks.of(self.group).all_gather(problem)), ""):
            self.left_out.setdefault(name, reason.partition("\n")[0])
            raise _GivenUp
        return made


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
