"""The words by which the ranks of a server agree on a version of weights, and on the round after
which all of them flip to it. receiver.py describes the steps.
"""

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
"""Stands in place of the number of a version or of a round if there is none."""
# The places of words: rank 0 writes the first two. From the third on, each rank has one for its
# report.
_TARGET = 0
_ROUND = 1
_STAGED = 2


class Report(NamedTuple):
    """What a rank reports of a version: it has staged it, or could not.

    A report travels as one word, so that no reader sees half of it.
    """

    version: int
    is_staged: bool
    """False if the rank could not stage this version"""

    @property
    def word(self) -> int:
        """The report as one number: the version if it is staged. Otherwise a number below `NONE`
        that says which version has failed.
        """
        if self.is_staged:
            return self.version
        return NONE - 1 - self.version

    @classmethod
    def of(cls, word: int) -> Report | None:
        """The report that a word stands for; None if the rank has not reported yet."""
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
    """ROUND: all ranks flip once they have opened the second round after this one"""
    reports: list[Report | None]
    """by rank, its last report"""

    def ranks_that_failed(self, version: int) -> list[int]:
        """The ranks that could not stage a version."""
        failure = Report(version, is_staged=False)
        return [rank for rank, report in enumerate(self.reports) if report == failure]


def outcome(reports: Sequence[Report | None], version: int) -> bool | None:
    """What becomes of a version: True if all ranks have staged it, False if a rank could not, and
    None while ranks are still staging it.
    """
    if any(report == Report(version, is_staged=False) for report in reports):
        return False
    if all(report == Report(version, is_staged=True) for report in reports):
        return True
    return None


class FlipWords:
    """Reads and writes `words`, int64 [2 + R], in memory that all R ranks share. Rank 0 writes the
    first two words, and each rank the word of its report.
    """

    def __init__(self, words: Tensor, rank: int) -> None:
        self._words = words
        self._report_place = _STAGED + rank
        # TARGET and ROUND, the words of rank 0. Each `tick` reads them here, by their address,
        # since a call of an operator takes longer.
        self.glance = (c_int64 * _STAGED).from_address(words.data_ptr())

    @classmethod
    def share(cls, folder: Path, peers: Any, size: int) -> FlipWords:
        """Make words that are all `NONE`. Collective. Raises what `shared_words` raises."""
        return cls(shared_words(folder, peers, _STAGED + size, NONE), peers.rank)

    def read(self) -> Words:
        """Read the words of all ranks."""
        target, flip_round, *reports = ops.read_words(self._words).tolist()
        return Words(target, flip_round, [Report.of(word) for word in reports])

    def ask_for(self, version: int) -> None:
        """On rank 0: ask all ranks to stage a version."""
        self._post(_TARGET, version)

    def flip_behind(self, round_number: int) -> None:
        """On rank 0: let all ranks flip after this round, or take that back if it is `NONE`."""
        self._post(_ROUND, round_number)

    def report(self, version: int, is_staged: bool) -> None:
        """Report that this rank has staged a version, or could not."""
        self._post(self._report_place, Report(version, is_staged).word)

    def take_report_back(self) -> None:
        """Remove this rank's report, as if it had not reported yet."""
        self._post(self._report_place, NONE)

    def _post(self, place: int, value: int) -> None:
        """Write the word at a place."""
        # The operator takes an offset in bytes; a word has 8.
        ops.post_word(self._words.view(torch.uint8), 8 * place, value)
