"""The outcome of one run, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epmoe.placement import Placement


@dataclass(frozen=True)
class Check:
    """One condition of a run: what was measured, and whether it is within its limit."""

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
    """stage → seconds in all rounds, mean over ranks; a stage includes waiting for other ranks"""
    rounds: int
    """rounds that `traffic`, `load` and `seconds` are sums of"""
    health: Mapping[str, int]
    texts: Sequence[tuple[str, str]] = ()
    """(prompt, text that the model generated after it), by rank"""
    unit: str = "round"
    """what `rounds` counts: "round" or "token\""""

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
