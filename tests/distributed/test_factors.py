"""The all-pairs generator of the distributed tests covers every pair of values, with a small number of cases."""

from __future__ import annotations

import itertools

from factors import all_pairs


def test_cases_cover_every_pair_of_values():
    factors = {"a": [1, 2, 3, 4], "b": "xyz", "c": [True, False], "d": [None, 0.5, 1.5, 2.5, 3.5]}
    cases = all_pairs(factors, tries=10)
    for f, g in itertools.combinations(factors, 2):
        assert {(case[f], case[g]) for case in cases} == set(itertools.product(factors[f], factors[g]))
    assert len(cases) <= 26 and cases == all_pairs(factors, tries=10)
