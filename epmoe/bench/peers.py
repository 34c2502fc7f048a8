"""Times and checks exchanges and whole layers of other libraries, beside epmoe's and on the same
routing. Such a library is called a peer.

A driver is a Python file whose list `PEERS` holds objects of `Peer`. `epmoe bench --peers FOLDER`
runs all drivers of a folder. A peer that is not installed, or that does not take a case, is left
out, and the report says why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor

from epmoe.bench.layer_sides import WholeLayer
from epmoe.bench.sample import Payload, Sample
from epmoe.bench.sides import Calls, ExchangeSide, Side, poison
from epmoe.config.placement import Placement
from epmoe.group.peers import Peers

_T = TypeVar("_T")


class LeftOut(Exception):
    """A driver raises this where its library does not take a case. The message says why."""


class Peer:
    """One library. A driver overrides `version`, and `exchange` or `layer` or both.

    The placement is linear: each rank has the same number of experts, in order, and there are no
    copies. Every rank has at least one token. The methods may raise anything, even on one rank
    alone. The peer is then left out on all ranks, with the first line of the error as the reason.
    """

    name: str
    """the name in tables"""
    install: str
    """what to install, for the report where the library is absent"""

    def version(self) -> str:
        """The version of the library. Raises ImportError if the library is absent or does not
        load.
        """
        raise NotImplementedError

    def exchange(
        self, sample: Sample, payload: Payload, group: dist.ProcessGroup
    ) -> AbstractContextManager[ExchangeSide]:
        """Make a side that exchanges the tokens of `sample`. Collective. Raises LeftOut if the
        library has no such payload.
        """
        raise NotImplementedError

    def layer(self, case: WholeLayer) -> AbstractContextManager[Callable[[], Tensor]]:
        """Make a function that computes y [T, D] with route, in the dtype of x. Collective.

        The function takes x_TD and logits_TE of `case`. It calls `case.routed()` for the ids int32
        [T, K] and weights fp32 [T, K], so that all layers have the same route in their time. On
        GPUs it is captured into a CUDA graph; y may be the same tensor in every call.
        `case.experts` holds this rank's weights: w_gate_up [e, 2·F, D] and w_down [e, D, F], as fp8
        with gate_up_scales and down_scales [e, n / 128, k / 128] where is_fp8. `case.ep` is our
        exchange, `case.group` the ranks.

        Raises LeftOut if the library has no such layer.
        """
        raise NotImplementedError


class _GivenUp(Exception):
    """A step has failed on at least one rank, so all ranks leave the peer out."""


class Contest:
    """Runs the peers that offer `method`, which is "exchange" or "layer".

    All methods are collective. A peer that raises on one rank is left out on all ranks. For that
    the ranks agree after each step of a peer, before any of them waits for a rank that has given
    up. They cannot agree while a library is within a step. `left_out` has the first reason why a
    peer is missing, by the peer's name.
    """

    def __init__(
        self, peers: Sequence[Peer], method: Literal["exchange", "layer"], group: dist.ProcessGroup
    ) -> None:
        self.group = group
        self.left_out = dict[str, str]()
        self._present: dict[str, Peer] = {}
        for peer in peers:
            # A peer that does not offer the method is never loaded.
            if getattr(type(peer), method) is not getattr(Peer, method):
                with suppress(_GivenUp):
                    version = self._step(peer.name, peer.version, peer.install)
                    self._present[f"{peer.name} {version}".strip()] = peer

    def exchanges(
        self, sample: Sample, payload: Payload, time: Callable[[Side], _T]
    ) -> Iterator[tuple[str, _T]]:
        """Check the exchange of each peer, and yield its name and what `time` says of it."""

        def checked(name: str, side: ExchangeSide) -> Side:
            side.name = name
            # A peer's rows may arrive in another order in each round.
            side.exact = False
            side.check()
            return side

        def enter(peer: Peer) -> AbstractContextManager[ExchangeSide]:
            return peer.exchange(sample, payload, self.group)

        yield from self._measured(sample.placement, sample.tokens, payload, enter, checked, time)

    def layers(
        self, case: WholeLayer, precision: str, time: Callable[[Side], _T]
    ) -> Iterator[tuple[str, _T]]:
        """Check the layer of each peer, and yield its name and what `time` says of it."""

        def checked(name: str, run: Callable[[], Tensor]) -> Side:
            # y may be the same tensor in every call, so the second call must write it again.
            poison([run()])
            case.check_output(name, run())
            return Calls(name, run, exact=False)

        yield from self._measured(
            case.ep.placement,
            len(case.x_TD),
            precision,
            lambda peer: peer.layer(case),
            checked,
            time,
        )

    def _measured(
        self,
        placement: Placement,
        tokens: int,
        case: str,
        enter: Callable[[Peer], AbstractContextManager[Any]],
        checked: Callable[[str, Any], Side],
        time: Callable[[Side], _T],
    ) -> Iterator[tuple[str, _T]]:
        """Open, check, time and close each peer, and yield its name and its figures.

        `enter` opens a peer, `checked` makes a side of what was opened, and `time` takes its times.
        `case` names the case in `left_out`. After a step that has failed on any rank, the peer
        stays open, because closing it is collective and may wait for the rank that has failed.
        """
        E = placement.num_experts
        R = placement.ep_size
        if E % R or placement != Placement.build(E, R):
            if self._present:
                self.left_out["peers"] = (
                    "they want as many experts on each rank, in order and without copies"
                )
            return
        for name, peer in self._present.items() if tokens else ():
            step = partial(self._step, f"{name}, {case}")
            with suppress(_GivenUp), ExitStack() as stack:
                # Each of these steps succeeds on all ranks, or the peer is left out.
                opened = step(lambda stack=stack, peer=peer: stack.enter_context(enter(peer)))  # type: ignore[misc]
                side = step(partial(checked, name, opened))
                figures = step(partial(time, side))
                step(stack.pop_all().close)
                yield name, figures

    def _step(self, name: str, do: Callable[[], _T], install: str = "") -> _T:
        """Call `do` and return its result. If `do` raises on any rank, keep the reason under `name`
        and raise _GivenUp on all ranks.

        `install` is what to install where `do` raises an ImportError.
        """
        problem = ""
        try:
            made = do()
        except LeftOut as error:
            problem = str(error)
        except Exception as error:
            # Whatever a library raises, the benchmark continues without it.
            problem = repr(error)
            if isinstance(error, ImportError) and install:
                problem = f"needs {install}: {error}"
        # All ranks keep the reason of the first rank that has one.
        problems = Peers.of(self.group).all_gather(problem)
        reason = next(filter(None, problems), "")
        if reason:
            self.left_out.setdefault(name, reason.partition("\n")[0])
            raise _GivenUp
        return made


def load(path: Path) -> list[Peer]:
    """Load the peers of a driver, or of all drivers of a folder in the order of their names. Raises
    ValueError if there are none.
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
