"""Short storms; `tests/storms.py` makes long ones, many side by side.

EPMOE_STORM_SEED=<seed>, or EPMOE_FUZZ_FIRST, repeats a storm. EPMOE_STORM_STEPS and
EPMOE_STORM_RANKS make it longer or smaller.
"""

from __future__ import annotations

import os

import pytest
from helpers import ON_THE_CPU, long, slow
from host import Host
from storm.acts import Totals
from storm.kinds import KINDS

FIRST = int(os.environ.get("EPMOE_STORM_SEED", os.environ.get("EPMOE_FUZZ_FIRST", 0)))
STEPS = int(os.environ.get("EPMOE_STORM_STEPS", 6))
RANKS = int(os.environ.get("EPMOE_STORM_RANKS", 4))


@pytest.mark.parametrize("seed", [FIRST, slow(FIRST + 1), *(long(FIRST + n) for n in (2, 3, 4))])
def test_a_storm(host: Host, seed: int):
    """Ranks in seats, whose experts move."""
    totals = Totals()
    KINDS["moving"](host, f"{seed}/0", totals, RANKS).run(STEPS)
    print(totals)


@ON_THE_CPU
@pytest.mark.parametrize("seed", [FIRST, slow(FIRST + 1), *(long(FIRST + n) for n in (2, 3, 4))])
def test_a_storm_of_a_server_with_a_trainer(host: Host, device: object, seed: int):
    """Versions, adapters, checkpoints and sleep."""
    totals = Totals()
    KINDS["served"](host, f"{seed}/0", totals, RANKS).run(STEPS)
    print(totals)


def test_totals_are_one_line():
    totals = Totals()
    totals.waited("stop", 5.0)
    totals.faults.append("a rank does not answer")
    assert str(totals).endswith("longest wait 5.0 s (stop), 1 faults")
