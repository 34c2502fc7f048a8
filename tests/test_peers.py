"""What ranks send to one another is data: JSON of a bounded length, and nothing that is run."""

from __future__ import annotations

import pickle
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers import ROOT

from epmoe.group.peers import Peers


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("it ran",)


def sent_by_another(data: bytes, length: int | None = None) -> Peers:
    """A group of two, as rank 0. Rank 1 sends this in place of a value, and of its length, which
    comes first.
    """
    begin = (length or len(data)).to_bytes(8, "little", signed=True) + data[:4096]
    theirs = iter(torch.tensor(list(part), dtype=torch.uint8) for part in (begin, data[4096:]))

    def allgather(
        rows: list[list[torch.Tensor]], mine: list[torch.Tensor], options: object
    ) -> SimpleNamespace:
        sent = next(theirs)
        rows[0][0].copy_(mine[0])
        rows[0][1][: len(sent)] = sent
        return SimpleNamespace(wait=lambda: None)

    return Peers(cast(Any, SimpleNamespace(allgather=allgather)), 0, 2, [0, 1])


def test_values_are_json():
    peers = sent_by_another(b'[null, {"a": [1, "\\u00e9"]}]')
    assert peers.all_gather((0, "x")) == [[0, "x"], {"a": [1, "é"]}]
    assert sent_by_another(b'[null, "' + b"y" * 5000 + b'"]').all_gather("x") == ["x", "y" * 5000]


@pytest.mark.parametrize("data", [pickle.dumps((None, Runs())), b"\x80", b"[null"])
def test_other_values_are_refused(data):
    with pytest.raises(ValueError):
        sent_by_another(data).all_gather(0)


def test_nothing_of_another_rank_is_unpickled():
    """torch's collectives of objects would."""
    files = [
        path
        for folder in ("epmoe", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    calls = re.compile(r"\bdist\.\w+_object(_list)?\(|\bpickle\.loads?\(")
    assert len(files) > 100 and not [
        str(path) for path in files if calls.search(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("length", [-1, 2**24 + 1, 2**62])
def test_a_length_that_no_value_has(length):
    with pytest.raises(RuntimeError, match="at most 16777216"):
        sent_by_another(b"[null, 0]", length).all_gather(0)
