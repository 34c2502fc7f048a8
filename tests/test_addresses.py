"""Addresses of windows: they stay while groups come and go, and nothing that is gone is seen behind
them.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from epmoe.exchange.addresses import Addresses
from epmoe.exchange.places import HostMemory, Places
from epmoe.exchange.processors import processor_of

NBYTES = 3 * HostMemory.granule


@pytest.fixture
def addresses() -> Addresses:
    return Addresses(HostMemory(), processor_of(torch.device("cpu")))


def mapped(places: Places, ranks: int, value: int) -> list[Tensor]:
    """A window of each rank, all of the same memory."""
    descriptor = places.create(NBYTES)
    windows = [places.map(rank, descriptor, NBYTES) for rank in range(ranks)]
    os.close(descriptor)
    windows[0].fill_(value)
    assert all(bool((window == value).all()) for window in windows)
    return windows


def starts(windows: list[Tensor]) -> list[int]:
    return [window.data_ptr() for window in windows]


def ranges_of_windows() -> int:
    return sum("epmoe-window" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_groups_of_no_more_ranks_and_bytes_have_the_same_addresses(addresses):
    places = addresses.windows(3, NBYTES)
    first = mapped(places, 3, 1)
    places.unmap()
    assert ranges_of_windows() == 0
    assert addresses.windows(2, NBYTES - 1) is places
    assert starts(mapped(places, 2, 2)) == starts(first)[:2]
    assert not first[2].any(), "the window of a rank that is gone"
    first[2].fill_(3)  # by who still has it: harms nobody
    places.unmap()
    assert addresses.windows(3, NBYTES) is places
    assert starts(mapped(places, 3, 4)) == starts(first)


def test_memory_that_is_still_read_stays_mapped(addresses, monkeypatch):
    places = addresses.windows(1, NBYTES)
    mapped(places, 1, 1)
    monkeypatch.setattr(addresses.memory, "unmap", Mock(side_effect=TimeoutError))
    with pytest.raises(TimeoutError):
        places.unmap()
    monkeypatch.undo()
    assert places.mapped and addresses.windows(1, NBYTES) is not places, (
        "nobody gets these addresses"
    )


def test_addresses_that_there_are_not(addresses):
    with pytest.raises(MemoryError, match="cannot map|failed"):
        addresses.memory.reserve(1 << 60)


@pytest.mark.parametrize(("ranks", "nbytes"), [(3, NBYTES), (2, NBYTES + 1)])
def test_larger_groups_have_others(addresses, ranks, nbytes):
    before = addresses.windows(2, NBYTES)
    assert addresses.windows(ranks, nbytes) is not before


def test_windows_in_use_keep_theirs(addresses):
    """A kernel or another thread may still use them: the next group has other addresses."""
    windows = mapped(addresses.windows(2, NBYTES), 2, 1)
    places = addresses.windows(2, NBYTES)
    others = mapped(places, 2, 2)
    assert not set(starts(others)) & set(starts(windows)) and bool((windows[0] == 1).all())


def test_memory_is_free_once_the_last_tensor_is_gone():
    addresses = Addresses(HostMemory(), processor_of(torch.device("cpu")))
    view = mapped(addresses.windows(2, NBYTES), 2, 1)[1][:8].view(torch.int64)
    del addresses
    assert ranges_of_windows() == 2 and view.item() == 0x0101010101010101
    child = os.fork()
    if not child:
        del view
        os._exit(ranges_of_windows())  # a child leaves its parent's places alone
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    del view
    assert ranges_of_windows() == 0
