"""Pairwise (all-pairs) testing: a small set of cases that covers every combination of two values of
two factors.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def all_pairs(
    factors: Mapping[str, Sequence[Any]], seed: int = 0, tries: int = 30
) -> list[dict[str, Any]]:
    """Cases, with one value of each factor, that cover every pair of values of every two factors.

    The search is greedy, as in AETG (Cohen et al., 1997). A candidate starts from an uncovered
    pair. It takes the other factors in random order, each with the value that covers most uncovered
    pairs. The best of `tries` candidates becomes a case.
    """
    rng = random.Random(seed)
    # A pair is two factors with the number of a value of each.
    uncovered = {
        frozenset([(f, i), (g, j)])
        for f, g in itertools.combinations(factors, 2)
        for i in range(len(factors[f]))
        for j in range(len(factors[g]))
    }

    def newly_covered(case: dict[str, int]) -> set[frozenset]:
        return {
            pair
            for pair in map(frozenset, itertools.combinations(case.items(), 2))
            if pair in uncovered
        }

    def covered_with(case: dict[str, int], value: tuple[str, int]) -> int:
        """The uncovered pairs that a value makes with those of a case."""
        return sum(frozenset([value, other]) in uncovered for other in case.items())

    def candidate(pairs: list) -> dict[str, int]:
        case = dict(rng.choice(pairs))
        for f in rng.sample(sorted(factors), len(factors)):
            if f not in case:
                values = rng.sample(range(len(factors[f])), len(factors[f]))
                case[f] = max(values, key=lambda i: covered_with(case, (f, i)))
        return case

    # Until every pair has a case: the best of some candidates is the next one.
    cases = []
    while uncovered:
        pairs = sorted(map(sorted, uncovered))
        candidates = [candidate(pairs) for _ in range(tries)]
        best = max(candidates, key=lambda case: len(newly_covered(case)))
        uncovered -= newly_covered(best)
        cases.append({f: factors[f][best[f]] for f in factors})
    return cases
