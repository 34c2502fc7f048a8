"""All pairs: few cases in which every two values of any two factors still meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def all_pairs(factors: Mapping[str, Sequence[Any]], seed: int = 0, tries: int = 30) -> list[dict[str, Any]]:
    """Cases, one value of each factor, that cover every pair of values of every two factors.

    Greedy, as in AETG (Cohen et al., 1997): each case starts from a pair not yet met, gets its other factors in
    random order, each the value that meets most new pairs, and the best of `tries` such cases is kept.
    """
    rng = random.Random(seed)
    open_pairs = {
        frozenset([(f, i), (g, j)])
        for f, g in itertools.combinations(factors, 2)
        for i in range(len(factors[f]))
        for j in range(len(factors[g]))
    }

    def met(case: dict[str, int]) -> set[frozenset]:
        return {pair for pair in map(frozenset, itertools.combinations(case.items(), 2)) if pair in open_pairs}

    def candidate() -> dict[str, int]:
        case = dict(rng.choice(sorted(map(sorted, open_pairs))))
        for f in rng.sample(sorted(factors), len(factors)):
            if f not in case:
                values = rng.sample(range(len(factors[f])), len(factors[f]))
                case[f] = max(values, key=lambda i: len(met(case | {f: i})))
        return case

    cases = []
    while open_pairs:
        best = max((candidate() for _ in range(tries)), key=lambda case: len(met(case)))
        open_pairs -= met(best)
        cases.append({f: factors[f][best[f]] for f in factors})
    return cases
