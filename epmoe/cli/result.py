"""What one run shows, in the terminal and in the report alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epmoe.placement import Placement


@dataclass(frozen=True)
class Check:
    """One thing that had to hold."""

    what: str
    measured: str
    passed: bool


@dataclass(frozen=True)
class Result:
    """Counts are sums over all rounds and ranks; `traffic` counts rows, `load` (token, expert) pairs."""

    name: str
    facts: Mapping[str, str]
    checks: Sequence[Check]
    placement: Placement
    traffic: Sequence[Sequence[int]]
    """[R][R] rows from each source rank (first index) to each destination"""
    load: Sequence[int]
    """[P] tokens that each physical expert computed"""
    seconds: Mapping[str, float]
    """stage → seconds, mean over ranks; waiting for other ranks is part of a stage"""
    rounds: int
    """what `seconds` add up over"""
    health: Mapping[str, int]
    texts: Sequence[tuple[str, str]] = ()
    """(prompt, what the model wrote after it)"""
    unit: str = "round"
    """what `rounds` counts"""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def rows_moved(self) -> int:
        """Rows between different ranks."""
        return sum(count for source, row in enumerate(self.traffic) for rank, count in enumerate(row) if rank != source)

    def rank_rows(self) -> list[tuple[int, int, int, list[int]]]:
        """Per rank: rows sent, rows received, pairs computed, load of each of its experts."""
        rows = []
        for rank in range(self.placement.ep_size):
            load = [self.load[expert] for expert in self.placement.local_experts(rank)]
            received = sum(source[rank] for source in self.traffic)
            rows.append((sum(self.traffic[rank]), received, sum(load), load))
        return rows
