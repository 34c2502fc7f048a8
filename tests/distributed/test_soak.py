"""A short soak: `make soak` runs for minutes."""

from __future__ import annotations

import pytest
from soak import soak


@pytest.mark.slow
def test_a_short_soak(rank, size, device):
    most_rounds = 100 if device.type == "cpu" else 10_000
    for rounds, wrong, _ in soak(device, seed=size, most_rounds=most_rounds, seconds=60.0):
        assert rounds > 0 and wrong == 0
