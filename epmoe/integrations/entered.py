"""A round that a layer of a host framework has come to, so that whatever raises in it gives it up:
a signal handler of the framework, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

from epmoe.exchange.exchange import Exchange
from epmoe.exchange.handles import RoundShape
from epmoe.service import ExpertParallel


class Entered(NamedTuple):
    """Where an exchange was before a layer's round."""

    ep: ExpertParallel
    exchange: Exchange
    rounds_before: int

    @classmethod
    def of(cls, ep: ExpertParallel) -> Self:
        """The round that comes next. Raises EPStateError while `ep` sleeps, and once it is
        closed.
        """
        exchange = ep.exchange
        return cls(ep, exchange, exchange.rounds.count)

    def give_up(self, tag: int, shape: Callable[[], RoundShape | None] = lambda: None) -> None:
        """After an exception: `ExpertParallel.give_up`."""
        self.ep.give_up(self.exchange, self.rounds_before, tag, shape)
