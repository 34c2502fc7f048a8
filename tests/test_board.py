"""The board of ranks: its folder, signs of life, and who is missing. Nobody has to believe the
words of others.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from itertools import count, takewhile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import long
from waits import LONG_S, SOON_S, until

from epmoe.group import board
from epmoe.group.board import Board, Meeting, Presence, Sign, sign_of_life
from epmoe.group.deaths import has_ended, name_of_process
from epmoe.group.recovery import Seen, Wanted, decide
from epmoe.group.store import OutlivingStore, folder_store

RANKS = [0, 2, 4]
RANK = 2
SIZE = 6
OTHERS = [0, 4]


@pytest.fixture
def store(monkeypatch) -> dist.HashStore:
    """The store of the default group."""
    store = dist.HashStore()
    monkeypatch.setattr(board, "_get_default_store", lambda: store)
    return store


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
def test_only_ranks_of_the_group_count(store, words, missing):
    for rank, text in words.items():
        store.set(f"epmoe/x/missing/{rank}", text)
    assert board.RollCall(RANKS, RANK, SIZE, "x").missing([]) == missing
    assert store.get(f"epmoe/x/missing/{RANK}").decode() == ",".join(map(str, missing))


@pytest.mark.usefixtures("store")
def test_a_rank_that_has_succeeded_is_not_missing():
    """The last step of an attempt may fail on some ranks only. Successes of earlier attempts do not
    count.
    """
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
    for name in (
        f"x{place}/{number}",
        f"/{number}",
        "",
        "/",
        number,
        f"{place}/-1",
        f"{place}/{10**20}",
        f"{place}/x",
    ):
        assert not has_ended(name)


@pytest.mark.usefixtures("store")
def test_a_rank_whose_process_has_ended_is_missing_at_once(monkeypatch, ended):
    """Also where a rank that lives has not noticed yet: it may learn of the failure by the leaving
    of this one only.
    """
    for rank, name in ((0, name_of_process()), (4, ended)):
        monkeypatch.setattr(board, "name_of_process", lambda name=name: name)
        board.RollCall(RANKS, rank, SIZE, "x").arrive()
    begin = time.monotonic()
    assert board.RollCall(RANKS, RANK, SIZE, "x").missing([], answer_s=LONG_S) == [4]
    assert time.monotonic() - begin < SOON_S


def write_for_ever(folder: Path, word: str) -> None:
    store = OutlivingStore(folder)
    for number in count():
        store.set("key", word * 25_000)
        store.compare_set(f"first/{number}", "", word * 25_000)


@pytest.mark.parametrize("repeats", [20, long(300)])
def test_a_rank_that_is_killed_leaves_no_half_word(tmp_path, repeats):
    """Which would stop all ranks that read it."""
    board = Board(OutlivingStore(tmp_path), "first")
    fork = multiprocessing.get_context("fork")
    draw = random.Random(0)
    for _ in range(repeats):
        # A child writes long words, and is killed.
        child = fork.Process(target=write_for_ever, args=(tmp_path, "word"))
        child.start()
        time.sleep(draw.uniform(0.0, 0.02))
        child.kill()
        child.join()
        # Those that are there are whole.
        found = [board.store.get("key")] if board.store.check(["key"]) else []
        found += [board.read(n).encode() for n in takewhile(board.read, count())]
        assert all(len(text) == 100_000 for text in found)


def test_the_first_word_stays(tmp_path):
    for store in (
        OutlivingStore(tmp_path),
        dist.HashStore(),
        dist.TCPStore("localhost", 0, is_master=True),
    ):
        board = Board(store, "x/y/1")
        assert (
            board.read("key") == ""
            and board.write_once("key", "one") == board.write_once("key", "two") == "one"
        )
        board.write("key", "three")
        assert board.read("key") == store.get("x/y/1/key").decode() == "three"


def meet(folder: Path, rank: int, heard) -> None:
    dist.init_process_group("gloo", store=folder_store(folder), rank=rank, world_size=2)
    total = torch.tensor([rank + 1.0])
    # torch asks the store again, of which nobody but the library has a reference.
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    heard.put(total.item())
    dist.destroy_process_group()


def test_the_first_group_meets_in_a_folder_of_this_user(tmp_path):
    """Without a port, which every user of the machine would reach."""
    heard = multiprocessing.get_context("fork").SimpleQueue()
    fork = multiprocessing.get_context("fork").Process
    ranks = [fork(target=meet, args=(tmp_path / "new", rank, heard)) for rank in range(2)]
    # Both ranks meet, in a folder that they make.
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert [heard.get(), heard.get()] == [3.0, 3.0]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    # Others could write into it now.
    (tmp_path / "new").chmod(0o777)
    with pytest.raises(PermissionError):
        folder_store(tmp_path / "new")


def test_a_folder_as_a_store_of_torch(tmp_path):
    store = OutlivingStore(tmp_path / "new" / "folder")
    assert store.add("count", 2) == 2 and store.add("count", -1) == 1
    long = "/".join(["name"] * 200)
    store.set(long, b"bytes")
    assert store.get(long) == b"bytes"
    with pytest.raises(dist.DistStoreError, match="nobody has set"):
        store.wait(["absent"], timedelta(seconds=0.02))
    with pytest.raises(NotImplementedError):
        store.compare_set("count", "1", "2")


@pytest.mark.parametrize("which", ["", "epmoe-board", "a link"])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_folder_of_another_user_is_refused(tmp_path, which):
    """What it says would decide which ranks go on."""
    folder = tmp_path / "folder"
    OutlivingStore(folder)
    # A link, the folder, or a part of it is of another user, or all can write.
    if which == "a link":
        folder = tmp_path / "other"
        folder.mkdir(0o700)
        (folder / "epmoe-board").symlink_to(tmp_path / "folder" / "epmoe-board")
        os.chown(folder / "epmoe-board", 54321, -1, follow_symlinks=False)
    elif which:
        os.chown(folder / which, 54321, -1)
    else:
        folder.chmod(0o777)
    with pytest.raises(
        PermissionError, match=r"belongs to user 54321|can be written by every user"
    ):
        OutlivingStore(folder)


def test_a_file_store_is_refused(tmp_path):
    store = dist.PrefixStore("prefix", dist.FileStore(str(tmp_path / "file")))
    with pytest.raises(ValueError, match="`store` must be a folder or a TCPStore"):
        OutlivingStore(store)


@pytest.mark.parametrize("word", ["{", "[]", '{"members": [0]}', "\udcff", "null"])
def test_a_word_that_is_no_decision_is_named(tmp_path, word):
    store = OutlivingStore(tmp_path)
    store.set("epmoe/group/0/decision", word.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="^epmoe/group/0/decision in the store holds no decision"):
        Meeting(Board(store, "epmoe"), "group/0").decision()


def test_silence_is_counted_in_looks(monkeypatch):
    """A rank that was stopped for an hour itself has not heard that another one was silent for an
    hour.
    """
    times = iter([3600.0, 3600.1, 3600.2])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    sign = Sign("word", 0.0)
    sign.look("word", "")
    sign.look("word", "")
    assert 0.1 < sign.silent_s < 0.5 and not sign.fresh
    sign.look("another", "")
    assert sign.silent_s == 0 and sign.fresh


def test_a_rank_is_there_until_it_ends(tmp_path):
    meeting = Meeting(Board(OutlivingStore(tmp_path), "epmoe"), "group/0")
    here = Presence(meeting.root, meeting.key_of(0))
    until(lambda: meeting.sign_of(0).fresh)
    assert not meeting.lost(0, 10.0)
    here.ended = True
    until(lambda: meeting.lost(0, 0.5))


def test_a_rank_whose_process_has_ended_is_lost_at_once(ended):
    meeting = Meeting(Board(dist.HashStore(), "epmoe"), "group/0")
    meeting.root.write(meeting.key_of(1), f"{ended} 1")
    meeting.root.write(meeting.key_of(0), sign_of_life())
    assert meeting.lost(1, 10.0) and not meeting.lost(0, 10.0)


def test_a_process_that_computes_and_has_not_called_is_waited_for():
    """It may import for seconds. One that hangs is given up, and in the end one that
    never calls.
    """
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        name = f"{name_of_process().rpartition('/')[0]}/{process.pid}"
        meeting = Meeting(Board(dist.HashStore(), "epmoe"), "group/0", [name])
        last_call_s = 0.5
        # One that computes is waited for four times as long,
        until(lambda: meeting.lost(0, last_call_s))
        assert meeting.signs[0].waited_s > 4 * last_call_s > meeting.signs[0].silent_s
        # and one that hangs is not.
        process.send_signal(signal.SIGSTOP)
        meeting = Meeting(Board(dist.HashStore(), "epmoe"), "group/0", [name])
        until(lambda: meeting.lost(0, last_call_s))
        assert meeting.signs[0].waited_s < 3 * last_call_s
    finally:
        process.kill()
        process.wait()


ALL_THERE = Seen(
    came=[0, 2], gone=set(), lost={1}, new=[], arrivals=0, may_answer=False, expected=3
)


@pytest.mark.parametrize(
    ("seen", "wanted", "waited_s", "members"),
    [
        ({}, {}, 0.0, [0, 2]),
        ({"lost": set()}, {}, 99.0, None),  # rank 1 may come
        ({"lost": set(), "gone": {1}}, {}, 0.0, [0, 2]),
        ({"new": [-1, -3]}, {}, 0.0, [0, 2, -1]),  # a place for one
        ({"came": [0, 1, 2], "lost": set(), "new": [-1]}, {}, 0.0, [0, 1, 2]),
        ({"new": [-1]}, {"max_ranks": 1}, 0.0, [0, 2]),  # former ranks stay
        ({"may_answer": True}, {}, 99.0, None),
        ({}, {"min_ranks": 3}, 99.0, None),
        ({"new": [-2]}, {"min_ranks": 3}, 0.0, [0, 2, -2]),
        ({}, {"grow_s": 5.0}, 4.0, None),
        ({}, {"grow_s": 5.0}, 6.0, [0, 2]),
        ({"new": [-1]}, {"grow_s": 5.0}, 4.0, [0, 2, -1]),  # as many as there may be
        ({"expected": 2}, {"grow_s": 5.0}, 4.0, [0, 2]),  # those of the last attempt
    ],
)
def test_what_a_rank_decides(seen, wanted, waited_s, members):
    limits = {"min_ranks": 1, "max_ranks": 3, "last_call_s": 1.0, "timeout_s": 9.0} | wanted
    wants = Wanted(**limits, backend="gloo")
    assert decide(ALL_THERE._replace(**seen), 3, wants, waited_s) == members
