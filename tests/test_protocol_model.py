"""docs/protocol.md as a model: every interleaving of its steps keeps its promises, and none of its
rules is idle.

The model's files are in tests/protocol: what a rank does in `cpu.py`, `cuda.py` and `mail.py`, how
stores and ranks move in `machine.py`, the search in `explorer.py`. Hosts meet after a death in
`board.py`, take versions of weights in `versions.py`, replay graphs in `replays.py`, and are idle
in `lobby.py`. The rules of all of them are rows of `rules.py`.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product

import pytest
from helpers import ROOT, long, slow
from protocol.explorer import Violation, explore
from protocol.models import build, model
from protocol.replays import KERNELS, SEATS
from protocol.rules import (
    COPIED,
    CPU,
    HOLDS,
    LL,
    LOBBY,
    MAIL,
    MEETINGS,
    PROTOCOLS,
    REPLAYS,
    RULES,
    SENDS,
)

SCENARIOS = {  # those of few states first, in which most rules are missed
    "some ranks send nothing": {"one_way": True},
    "aborts, and some ranks send nothing": {"aborts": True, "one_way": True},
    "no failure": {},
    "a deadline passes": {"late": [0]},
    "a rank dies": {"dying": [0]},
    "aborts": {"aborts": True},
    "aborts, and a deadline passes": {"aborts": True, "late": [0]},
}
# At least this many states in all scenarios of a protocol together: a model that stands still must
# not pass.
LEAST_STATES = {2: 10_000, 3: 20_000}
# The stage that a rank has opened last, D(n) or C(n), by its node of round n. In all others it is
# C(n).
BEFORE_COMBINE = ("opened", "sent", "dispatched")


@cache
def reached(
    protocol: str, ranks: int, scenario: str, *, lazy: bool
) -> tuple[int, set[tuple[int, ...]]]:
    """The number of states, and every set of nodes where the ranks can stand at the same time."""
    states = explore(build(protocol, ranks, **SCENARIOS[scenario], lazy=lazy))
    return len(states), {state.nodes for state in states}


@pytest.mark.parametrize("ranks", [2, slow(3)])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_interleaving_keeps_the_promises(protocol, ranks):
    """Nothing is overwritten unread, no read comes too early, and whoever waits goes on. Over two
    ranks every store arrives at any time, over three where it matters.
    """
    counts = {
        scenario: reached(protocol, ranks, scenario, lazy=ranks == 2)[0] for scenario in SCENARIOS
    }
    print(protocol, ranks, counts)
    assert sum(counts.values()) >= LEAST_STATES[ranks]
    assert counts["no failure"] < counts["aborts"] < counts["aborts, and a deadline passes"]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [CPU, COPIED, long(LL)])
def test_three_ranks_whose_stores_arrive_at_any_time(protocol):
    states, nodes = reached(protocol, 3, "no failure", lazy=True)
    print(protocol, states)
    assert states > 50_000
    assert nodes == reached(protocol, 3, "no failure", lazy=False)[1]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_early_arrival_hides_nothing(protocol, scenario):
    """The reduction that machine.py argues for: with it, ranks can stand at the same places at the
    same time.
    """
    states, nodes = reached(protocol, 2, scenario, lazy=True)
    fewer_states, same_nodes = reached(protocol, 2, scenario, lazy=False)
    assert nodes == same_nodes
    assert states > fewer_states


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_interleaving_of_mail_keeps_the_promises(ranks):
    """No part is overwritten before it is copied or read before it has arrived, and
    the moves end.
    """
    states, nodes = reached(MAIL, ranks, "no failure", lazy=True)
    print(states)
    assert states > 100 and nodes == reached(MAIL, ranks, "no failure", lazy=False)[1]


@pytest.mark.parametrize("scenario", ["no failure", "aborts"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ranks_are_at_most_one_stage_apart(protocol, scenario):
    """The page says so. On the CPU an abort opens combine early, which makes it two."""
    machine = build(protocol, 3, **SCENARIOS[scenario])

    def opened(rank: int, node: int) -> int:
        name, n = machine.programs[rank][node].name.rsplit(" ", 1)
        return 2 * int(n) - (name in BEFORE_COMBINE)

    apart = 0
    for nodes in reached(protocol, 3, scenario, lazy=False)[1]:
        stages = [opened(rank, node) for rank, node in enumerate(nodes)]
        apart = max(apart, max(stages) - min(stages))
    assert apart == (2 if scenario == "aborts" and protocol == CPU else 1)


OF_HOSTS = {  # those of few states first
    MEETINGS: {
        "no failure": {"ranks": 3},
        "two leaders": {"ranks": 3, "slow": (0,)},  # each with a list of its own
        "a death at any write": {"ranks": 3, "deaths": 1},
        "a slow member": {"ranks": 3, "slow": (0,), "errors": 1},
        "a failed attempt": {"ranks": 3, "errors": 1},
        "a rank loads for long": {"ranks": 3, "misses": 1},
        "a rank leaves": {"ranks": 3, "leaves": (2,), "deaths": 2},
    },
    SENDS: {"sends fail": {"versions": 4, "failures": 3}},
    HOLDS: {
        "a flip": {"versions": 1},
        "a flip is interrupted, and the folder goes": {"versions": 1, "interrupts": 1, "losses": 1},
        "a rank joins a rank that has a version": {
            "ranks": 1,
            "versions": 1,
            "joins": 1,
            "losses": 1,
        },
        "two versions": {"versions": 2},
        "two trainers, and a death between flips": {
            "versions": 2,
            "joins": 1,
            "deaths": 1,
            "losses": 2,
            "rounds": 1,
        },
        "a death between flips": {"ranks": 3, "versions": 1, "deaths": 1, "losses": 1},
        "two versions over three ranks": {"ranks": 3, "versions": 2},
    },
    REPLAYS: {
        f"addresses stay: {alike}, the other rank {other}": {"alike": alike, "other": other}
        for alike, other in product((True, False), SEATS)
    },
    LOBBY: {
        "two ranks": {"ranks": 2, "rounds": 3},
        "three ranks": {"ranks": 3, "rounds": 2},
        "a round is given up": {"ranks": 2, "rounds": 3, "give_ups": 2},
        "one of three gives a round up": {"ranks": 3, "rounds": 2, "give_ups": 1},
    },
}


@pytest.mark.parametrize(
    ("rule", "protocol"), [(rule, protocol) for rule in RULES for protocol in RULES[rule]]
)
def test_no_rule_can_be_left_out(rule, protocol):
    """Without it, a scenario ends in a violation."""
    scenarios = OF_HOSTS.get(protocol)
    if scenarios is None:
        # With final rows, two sources follow one another in a place.
        ranks = 3 if rule == "final-rows" else 2
        scenarios = {name: options | {"ranks": ranks} for name, options in SCENARIOS.items()}
    for options in scenarios.values():
        try:
            explore(model(protocol, without=rule, **options))
        except Violation:
            return
    pytest.fail(f"{protocol} keeps its promises without the rule {rule}")


@pytest.mark.parametrize(
    "options",
    [
        *OF_HOSTS[MEETINGS].values(),
        slow({"ranks": 3, "deaths": 2}),
        slow({"ranks": 3, "deaths": 1, "misses": 1}),
        slow({"ranks": 3, "deaths": 1, "errors": 1}),
        slow({"ranks": 3, "deaths": 1, "slow": (0,)}),
        slow({"ranks": 3, "deaths": 2, "errors": 1, "leaves": (1, 2)}),
    ],
)
def test_ranks_form_one_group_and_none_that_lives_is_left_out(options):
    """Whatever ends or fails, the others go on in the same attempt with the same members, and
    nobody waits for ever.
    """
    states = explore(model(MEETINGS, **options))
    print(len(states))
    assert len(states) > 90


def test_a_whole_version_stays_and_failed_sends_are_told():
    (options,) = OF_HOSTS[SENDS].values()
    assert len(explore(model(SENDS, **options))) > 1000


@pytest.mark.parametrize("options", OF_HOSTS[HOLDS].values(), ids=OF_HOSTS[HOLDS])
def test_a_round_has_one_version_or_the_ranks_are_told(options):
    """Whichever rank dies, joins or is interrupted, and whatever becomes of the folder."""
    assert len(explore(model(HOLDS, **options))) > 500


@pytest.mark.parametrize("options", OF_HOSTS[LOBBY].values(), ids=OF_HOSTS[LOBBY])
def test_idle_ranks_wait_without_a_deadline_and_none_sleeps_through_a_round(options):
    """Whoever brings tokens, and whoever gives a round up before it has begun."""
    assert len(explore(model(LOBBY, **options))) > 500


@pytest.mark.parametrize("options", OF_HOSTS[REPLAYS].values(), ids=OF_HOSTS[REPLAYS])
def test_replays_find_their_own_windows_or_are_told(options):
    """Also one that starts in a group and ends in the next."""
    states = explore(model(REPLAYS, **options))
    whole = {state for state in states if state.ended == KERNELS and not state.told}
    assert any(state.mapped == 1 for state in whole) and any(state.told for state in states)


def test_the_page_names_the_rules_of_the_model():
    text = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    named = re.findall(r"\*\*Rule ([\w-]+)\.\*\*", text)
    assert sorted(named) == sorted(RULES)
