"""The words by which the ranks of a receiver settle behind which round a version serves."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.live.shared_words import shared_words
from epmoe.native import ops

NONE = -1
"""In place of a version or a round: there is none."""
# The places of words: two of rank 0, then a report of each rank.
_TARGET = 0
_ROUND = 1
_STAGED = 2


class Report(NamedTuple):
    """What a rank reports of a version. It travels as one word, so that nobody sees half of it."""

    version: int
    is_staged: bool
    """False: the rank could not take this version"""

    @property
    def word(self) -> int:
        """The report as a number: the version if it is staged, otherwise a number below `NONE`."""
        if self.is_staged:
            return self.version
        return NONE - 1 - self.version

    @classmethod
    def of(cls, word: int) -> Report | None:
        """The report that a word means; None if the rank has not reported yet."""
        if word == NONE:
            return None
        if word < NONE:
            return cls(NONE - 1 - word, is_staged=False)
        return cls(word, is_staged=True)


class Words(NamedTuple):
    """The words of all ranks at one moment."""

    target: int
    """the version that rank 0 asks for"""
    flip_round: int
    """the round behind which all ranks flip"""
    reports: list[Report | None]
    """the last of each rank"""

    def ranks_that_failed(self, version: int) -> list[int]:
        failure = Report(version, is_staged=False)
        return [rank for rank, report in enumerate(self.reports) if report == failure]


def outcome(reports: Sequence[Report | None], version: int) -> bool | None:
    """What becomes of a version: True if all ranks have staged it, False if one could not, None as
    long as it is open.
    """
    if any(report == Report(version, is_staged=False) for report in reports):
        return False
    if all(report == Report(version, is_staged=True) for report in reports):
        return True
    return None


class FlipWords:
    """`words`, int64 [2 + R], which all ranks share. Rank 0 writes the first two, and each rank its
    own report.
    """

    def __init__(self, words: Tensor, rank: int) -> None:
        self._words = words
        self._staged = _STAGED + rank
        # Those of rank 0 by their address, which costs less than an operator.
        self.glance = (c_int64 * _STAGED).from_address(words.data_ptr())

    @classmethod
    def share(cls, folder: Path, peers: Any, size: int) -> FlipWords:
        """New words. Collective; raises what `shared_words` does."""
        return cls(shared_words(folder, peers, _STAGED + size, NONE), peers.rank)

    def read(self) -> Words:
        target, flip_round, *reports = ops.read_words(self._words).tolist()
        return Words(target, flip_round, [Report.of(word) for word in reports])

    def ask_for(self, version: int) -> None:
        """Rank 0 asks all ranks to stage a version."""
        self._post(_TARGET, version)

    def flip_behind(self, round_number: int) -> None:
        """Rank 0 lets all ranks flip; NONE: it takes back a flip that is to come."""
        self._post(_ROUND, round_number)

    def report(self, version: int, is_staged: bool) -> None:
        self._post(self._staged, Report(version, is_staged).word)

    def take_report_back(self) -> None:
        self._post(self._staged, NONE)

    def _post(self, word: int, value: int) -> None:
        ops.post_word(self._words.view(torch.uint8), 8 * word, value)
