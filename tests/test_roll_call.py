"""Who is missing: ranks say so through a store, whose words nobody has to believe."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from epmoe.group import board
from epmoe.group.deaths import has_ended, name_of_process

RANKS, RANK, SIZE = [0, 2, 4], 2, 6
OTHERS = [0, 4]


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ({0: "5", 4: "none"}, [5]),
        ({0: "5,5,1", 4: "1"}, [1, 5]),
        ({0: "none"}, [4]),
        ({0: str(2**40), 4: "6"}, OTHERS),  # no rank of the group: as if nobody knew
        ({0: "-1,x,1e3,,\u0663," + "9" * 5000, 4: "3"}, [3]),
    ],
)
def test_only_ranks_of_the_group_count(monkeypatch, words, missing):
    store = dist.HashStore()
    monkeypatch.setattr(board, "_get_default_store", lambda: store)
    for rank, text in words.items():
        store.set(f"epmoe/x/missing/{rank}", text)
    assert board.RollCall(RANKS, RANK, SIZE, "x").missing([]) == missing
    assert store.get(f"epmoe/x/missing/{RANK}").decode() == ",".join(map(str, missing))


def test_a_rank_that_has_succeeded_is_not_missing(monkeypatch):
    """The last step of an attempt may fail on some ranks only. Successes of earlier attempts do not count."""
    store = dist.HashStore()
    monkeypatch.setattr(board, "_get_default_store", lambda: store)
    board.RollCall(RANKS, 4, SIZE, "x", "first").succeed()
    board.RollCall(RANKS, 0, SIZE, "x", "second").succeed()
    assert board.RollCall(RANKS, RANK, SIZE, "x", "second").missing([]) == [4]
    assert board.RollCall(RANKS, RANK, SIZE, "x").missing([]) == OTHERS


@pytest.mark.parametrize(("found", "missing"), [([], OTHERS), ([3], [3])])
def test_without_a_default_group(found, missing):
    """It may be destroyed while a transfer hangs: the thread that watches it goes on."""
    assert not dist.is_initialized()
    assert board.RollCall(RANKS, RANK, SIZE, "x").missing(found) == missing


@pytest.fixture
def ended() -> str:
    """The name of a process that has ended, and for which nobody has waited yet."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield f"{name_of_process().rpartition('/')[0]}/{process.pid}"
    process.wait()


def test_the_end_of_a_process_is_seen_by_its_name(ended):
    assert has_ended(ended) and not has_ended(name_of_process())
    place, _, number = ended.rpartition("/")
    for name in (f"x{place}/{number}", f"/{number}", "", "/", number, f"{place}/-1", f"{place}/{10**20}", f"{place}/x"):
        assert not has_ended(name)


def test_a_rank_whose_process_has_ended_is_missing_at_once(monkeypatch, ended):
    """Also where a rank that lives has not noticed yet: it may learn of the failure by the leaving of this one only."""
    store = dist.HashStore()
    monkeypatch.setattr(board, "_get_default_store", lambda: store)
    for rank, name in ((0, name_of_process()), (4, ended)):
        monkeypatch.setattr(board, "name_of_process", lambda name=name: name)
        board.RollCall(RANKS, rank, SIZE, "x").arrive()
    begin = time.monotonic()
    assert board.RollCall(RANKS, RANK, SIZE, "x").missing([], answer_s=20.0) == [4]
    assert time.monotonic() - begin < 5
