"""Who is missing: ranks say so through a store, whose words nobody has to believe."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from epmoe.group import roll_call

RANKS, RANK, SIZE = [0, 2, 4], 2, 6
OTHERS = [0, 4]


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ({0: "5", 4: ""}, [5]),
        ({0: "5,5,1", 4: "1"}, [1, 5]),
        ({0: ""}, [4]),
        ({0: str(2**40), 4: "6"}, OTHERS),  # no rank of the group: as if nobody knew
        ({0: "-1,x,1e3,,\u0663," + "9" * 5000, 4: "3"}, [3]),
    ],
)
def test_only_ranks_of_the_group_count(monkeypatch, words, missing):
    store = dist.HashStore()
    monkeypatch.setattr(roll_call, "_get_default_store", lambda: store)
    for rank, text in words.items():
        store.set(f"epmoe/x/missing/{rank}", text)
    assert roll_call.RollCall(RANKS, RANK, SIZE, "x").missing([]) == missing
    assert store.get(f"epmoe/x/missing/{RANK}").decode() == ",".join(map(str, missing))


def test_a_rank_that_has_succeeded_is_not_missing(monkeypatch):
    """The last step of an attempt may fail on some ranks only. Successes of earlier attempts do not count."""
    store = dist.HashStore()
    monkeypatch.setattr(roll_call, "_get_default_store", lambda: store)
    roll_call.RollCall(RANKS, 4, SIZE, "x", "first").succeed()
    roll_call.RollCall(RANKS, 0, SIZE, "x", "second").succeed()
    assert roll_call.RollCall(RANKS, RANK, SIZE, "x", "second").missing([]) == [4]
    assert roll_call.RollCall(RANKS, RANK, SIZE, "x").missing([]) == OTHERS


@pytest.mark.parametrize(("found", "missing"), [([], OTHERS), ([3], [3])])
def test_without_a_default_group(found, missing):
    """It may be destroyed while a transfer hangs: the thread that watches it goes on."""
    assert not dist.is_initialized()
    assert roll_call.RollCall(RANKS, RANK, SIZE, "x").missing(found) == missing
