"""A short soak: `make soak` runs for minutes."""

from __future__ import annotations

from soak import Soak, soak


def test_a_short_soak(rank, size, device):
    for rounds, wrong, _ in soak(device, seed=size, most_rounds=100, seconds=60.0):
        assert rounds > 0 and wrong == 0


def test_wrong_sums_are_counted(rank, size, device):
    run = Soak(device, seed=3)
    for rounds in run.all():
        rounds.ones[0] = 2.0  # the weights of a token; what y must be stays
    for _ in range(20):
        run.turn()
    assert run.wrong() > 0
    run.close()
