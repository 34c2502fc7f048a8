"""Addresses of windows: they stay while groups come and go, and nothing that is gone is seen behind
them.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from threading import Thread, get_ident
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from epmoe.exchange.addresses import Addresses
from epmoe.exchange.gpu_memory import GpuMemory
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


class MemoryOfGpu(HostMemory):
    """It may not always be freed, as that of GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = False

    def frees_now(self, maker: int) -> bool:
        return not self.captures and maker == get_ident()


def go(memory: HostMemory) -> None:
    """Maps memory, which is left at once."""
    mapped(Places(memory, 2, NBYTES), 2, 1)


@pytest.mark.parametrize("others", [1, 3])
def test_memory_that_is_left_during_a_capture_is_freed_later(others):
    """By the next object that takes memory. Until then it stays."""
    memory = MemoryOfGpu()
    memory.captures = True
    for _ in range(others):
        go(memory)
        assert ranges_of_windows()
    mapped(Places(HostMemory(), 1, NBYTES), 1, 1)  # what may be freed is
    assert ranges_of_windows() == 2 * others
    memory.captures = False
    Places(memory, 1, NBYTES)
    assert ranges_of_windows() == 0


def test_memory_that_is_left_on_another_thread_is_freed_by_its_own():
    memory = MemoryOfGpu()
    places = [Places(memory, 2, NBYTES)]
    mapped(places[0], 2, 1)
    other = Thread(target=places.clear)
    other.start()
    other.join()
    assert ranges_of_windows() == 2
    Places(memory, 1, NBYTES)
    assert ranges_of_windows() == 0


def test_a_group_that_opens_frees_what_a_thread_has_left_that_is_gone(addresses):
    memory = MemoryOfGpu()
    memory.captures = True
    other = Thread(target=go, args=(memory,))
    other.start()
    other.join()
    memory.captures = False
    Places(HostMemory(), 1, NBYTES)
    assert ranges_of_windows() == 2
    addresses.windows(1, NBYTES)
    assert ranges_of_windows() == 0


@pytest.mark.parametrize("for_all", [True, False])
@pytest.mark.parametrize("captures", [True, False])
def test_when_memory_of_gpus_is_freed(monkeypatch, captures, for_all):
    """Not in a capture. A wait for the whole GPU would end that of another thread, too."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    memory = GpuMemory.__new__(GpuMemory)
    memory.device = torch.device("cuda")
    memory._for_all = for_all
    assert memory.frees_now(get_ident()) is not captures
    assert memory.frees_now(0) is not (captures or for_all)
