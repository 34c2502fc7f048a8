"""Which ranks are missing: ranks report it in the store of torch.distributed, which needs no rank to answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from epmoe.config.deadlines import ANSWER_S, OPENING_ANSWER_S
from epmoe.group.deaths import has_ended, name_of_process
from epmoe.group.peers import MissingRankError, Peers
from epmoe.group.waiting import interruptible

_SEND_S = 0.1  # to write a word into the store, where it can be reached


@dataclass(frozen=True)
class RollCall:
    """Some ranks of a group, which report to one another after a failure. They are numbered in the group."""

    ranks: list[int]
    rank: int
    size: int  # of the whole group
    name: str  # the same on all ranks of the group, and of no other group
    attempt: str = ""  # the name of this attempt, once this rank knows it

    def arrive(self) -> None:
        """Leave the name of this process: others then need not wait for the answer of a rank that has ended."""
        self._send(f"process/{self.rank}", name_of_process())

    def succeed(self) -> None:
        """Report that the attempt has succeeded here: where it fails elsewhere, this rank is not missing."""
        self._send(f"{self.attempt}/{self.rank}", "")

    def missing(self, found: Sequence[int], answer_s: float = ANSWER_S) -> list[int]:
        """After a failure: who is missing, at least one rank; all others of this roll call where the store is silent.

        A rank that notices a failure reports it, and what it has `found`; one that does not within `answer_s` seconds
        is missing, and one whose process has ended is so at once.
        """
        others = [rank for rank in self.ranks if rank != self.rank]
        reports: dict[int, set[int]] = {}
        with suppress(RuntimeError, ValueError):  # ValueError: the default group is destroyed
            interruptible(partial(self._ask, self._store(), found, others, reports, answer_s), answer_s)
        reports = dict(reports)  # the thread may go on writing
        named, silent = set().union(*reports.values()), set(others) - set(reports)
        result = sorted(set(found) or named or silent or others)
        self._send(str(self.rank), ",".join(map(str, result)))  # for ranks that come too late
        return result

    @classmethod
    def after(cls, error: MissingRankError, what: str, found: Sequence[int] = (), attempt: str = "") -> list[int]:
        """After a collective of a group has failed: its ranks that are missing. `found` is that of `missing`."""
        return cls.of(error.peers, what, attempt).missing(found, OPENING_ANSWER_S)

    @classmethod
    def of(cls, peers: Peers, what: str, attempt: str = "") -> RollCall:
        """All ranks of a group, which take part in `what`."""
        assert peers.group is not None
        return cls(list(range(peers.size)), peers.rank, peers.size, f"{what}/{peers.group.group_name}", attempt)

    def _send(self, key: str, word: str) -> None:
        with suppress(RuntimeError, ValueError):
            interruptible(partial(self._store().set, key, word), _SEND_S)

    def _store(self) -> dist.Store:
        return dist.PrefixStore(f"epmoe/{self.name}/missing", _get_default_store())

    def _ask(
        self, store: dist.Store, found: Sequence[int], others: list[int], reports: dict[int, set[int]], answer_s: float
    ) -> None:
        """Report what this rank has found, and fill `reports` with what the others have. It may never end.

        Ranks that know of an end wait for no further report: others may learn of it by their leaving only.
        """
        store.set(str(self.rank), ",".join(map(str, found)))
        deadline, silent, ended = time.monotonic() + answer_s, set(others), set[int]()
        while silent and not found and not ended and time.monotonic() < deadline:
            for rank in sorted(silent):
                if store.check([str(rank)]):
                    reports[rank] = _ranks_in(store.get(str(rank)), self.size)
                elif self.attempt and store.check([f"{self.attempt}/{rank}"]):
                    reports[rank] = set()
                elif store.check([f"process/{rank}"]) and has_ended(store.get(f"process/{rank}").decode()):
                    ended.add(rank)
                    reports[rank] = {rank}
            silent.difference_update(reports)
            time.sleep(0.02)


def _ranks_in(text: bytes, size: int) -> set[int]:
    """The ranks of a group of `size` in a list from the store. Other words in it do not count."""
    words = [word for word in text.split(b",") if word.isdigit() and len(word) < 10]
    return {rank for rank in map(int, words) if rank < size}
