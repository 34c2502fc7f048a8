"""Another network is one class and its name in `RAILS`: here a store, and a heap that owns what is
received.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar
from weakref import WeakMethod

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_y, make_tokens, run_round
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from epmoe.config.deadlines import Deadlines
from epmoe.group.board import RollCall
from epmoe.rail.opening import RAILS
from epmoe.rail.rail import RailError, Transfer

pytestmark = pytest.mark.parametrize("device", [torch.device("cpu")])


class Messages:
    """Slabs that come as values of a store, by their keys."""

    def __init__(self, store: dist.Store, coming: dict[str, Tensor]) -> None:
        self.store = store
        self.coming = coming

    def is_completed(self) -> bool:
        return not self.coming or self.store.check(list(self.coming))

    def wait(self) -> None:
        for key, slab in self.coming.items():
            slab.copy_(
                torch.frombuffer(bytearray(self.store.get(key)), dtype=slab.dtype).view_as(slab)
            )
            self.store.delete_key(key)
        self.coming = {}


class StoreRail:
    """A `Rail` over the store of torch.distributed."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(
        self, roll_call: RollCall, deadlines: Deadlines, device: torch.device, connect: timedelta
    ) -> None:
        self.roll_call = roll_call
        self.deadlines = deadlines
        self.heaps = list[Tensor]()
        self.store = dist.PrefixStore(f"{roll_call.name}/store", _get_default_store())
        self.number = 0

    def allocate(self, nbytes: int) -> Tensor:
        self.heaps.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.heaps[-1]

    def start(self, transfer: Transfer) -> None:
        owned = {heap.untyped_storage().data_ptr() for heap in self.heaps}
        assert transfer.received.untyped_storage().data_ptr() in owned, "memory of another owner"
        self.number += 1
        mine = self.roll_call.rank
        others = self.roll_call.ranks
        for rank, slab in zip(others, transfer.sent.split(transfer.sent_rows), strict=True):
            if slab.numel():
                self.store.set(
                    f"{self.number}/{mine}/{rank}",
                    slab.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
                )
        slabs = zip(others, transfer.received.split(transfer.received_rows), strict=True)
        coming = {f"{self.number}/{rank}/{mine}": slab for rank, slab in slabs if slab.numel()}
        transfer.started.append(Messages(self.store, coming))

    def wait(self, transfer: Transfer, look: Callable[[], None]) -> None:
        deadline = time.monotonic() + self.deadlines.wait_s(returning=transfer.returning)
        while not transfer.started[0].is_completed():
            look()
            time.sleep(1e-4)
            if time.monotonic() > deadline:
                raise RailError("the slabs did not come in time")
        transfer.started[0].wait()

    def watch(self, on_late: WeakMethod[Callable[[], None]], latched: Tensor) -> None:
        pass

    def missing(self, found: Sequence[int]) -> list[int]:
        return self.roll_call.missing(found)

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.heaps.clear()


@pytest.fixture(autouse=True)
def _rail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RAILS, "store", StoreRail)


def test_rounds_by_another_rail(make_ep, rank):
    """Each rank is a node."""
    rails = ({"rail": rail} for rail in ("store", "gloo"))
    ep, by_gloo = (make_ep(ranks_per_node=1, exchange=exchange) for exchange in rails)
    for n in range(4):
        tokens = make_tokens(ep.config, rank, (5 * n + rank) % 17, seed=n)
        y = run_round(ep, tokens)
        assert_y(y, ep.config, tokens)
        assert torch.equal(y, run_round(by_gloo, tokens))


@pytest.mark.parametrize("name", ["nccl", "pigeon"])
def test_a_rail_that_the_device_has_not(make_ep, size, name):
    with pytest.raises(
        ValueError, match=f"`exchange.rail` must be auto or gloo or store on cpu, got '{name}'"
    ):
        make_ep(ranks_per_node=1, exchange={"rail": name})
    assert make_ep(ranks_per_node=size, exchange={"rail": name}).size == size, (
        "one node has no rail"
    )
