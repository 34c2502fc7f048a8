"""Which GPUs are linked by NVLink, and what ranks without it take."""

from __future__ import annotations

import ctypes
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from exchanges import make_config

from epmoe.exchange import links
from epmoe.exchange.memory import LL_MAX_TOKENS, MemoryPlan
from epmoe.group.peers import Peers

GPU = torch.device("cuda", 0)


class Driver:
    """CUDA's driver, or NVML: which pairs of GPUs it says are linked."""

    def __init__(self, linked: set[frozenset[object]], fails: bool = False) -> None:
        self.linked = linked
        self.fails = fails
        self.open = 0

    def cuDeviceGetP2PAttribute(self, value, attribute, a, b) -> int:
        assert attribute == 3
        value._obj.value = frozenset((a, b)) in self.linked
        return int(self.fails)

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle) -> int:
        assert uuid.value.startswith(b"GPU-")
        handle._obj.value = 1 + int(uuid.value[4:])
        return int(self.fails)

    def nvmlDeviceGetP2PStatus(self, a, b, capability, status) -> int:
        assert capability == 2
        pair = frozenset((a.value - 1, b.value - 1))
        status._obj.value = 0 if pair in self.linked else 6
        return 0


@pytest.fixture
def machine(monkeypatch):
    """A machine whose GPUs are called "0", "1", …, of which a process sees some."""

    def make(seen=2, driver=None, nvml=None) -> None:
        libraries = {"libcuda.so.1": driver, "libnvidia-ml.so.1": nvml}

        def load(name: str) -> Driver:
            if libraries[name] is None:
                raise OSError(name)
            return libraries[name]

        def properties(device: torch.device | int) -> SimpleNamespace:
            return SimpleNamespace(uuid=device if isinstance(device, int) else device.index)

        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    return make


PAIR = {frozenset((0, 1))}


@pytest.mark.parametrize(
    ("seen", "driver", "nvml", "linked"),
    [
        (2, Driver(PAIR), None, True),
        (2, Driver(set()), None, False),
        (2, Driver(PAIR, fails=True), None, False),
        # In a virtual machine one of them may not know.
        (2, Driver(set()), Driver(PAIR), True),
        (2, None, Driver(PAIR), True),
        (2, None, Driver(set()), False),
        (2, None, Driver(PAIR, fails=True), False),
        (2, None, None, False),
        # The other GPU is hidden from this process: its number here would be another GPU's.
        (1, Driver(PAIR), None, False),
        (1, Driver(PAIR), Driver(PAIR), True),
        (1, Driver(set()), Driver(set()), False),
    ],
)
def test_who_says_that_gpus_are_linked(machine, seen, driver, nvml, linked):
    machine(seen, driver, nvml)
    assert links.are_linked("0", "1") == linked
    assert nvml is None or nvml.open == 0


def test_ranks_may_share_a_gpu(machine):
    machine(1)
    assert links.are_linked("0", "0")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_on_one_board_are_linked():
    if not any(name in torch.cuda.get_device_name(0) for name in ("H200", "HBM3")):
        pytest.skip("GPUs of this kind may have no NVLink")
    assert links.are_linked(links.uuid_of(0), links.uuid_of(1))


@dataclass(frozen=True)
class OnGpus(Peers):
    """Rank r is on GPU r, and `found` is what the ranks find to be not linked."""

    found: tuple[tuple[int, ...], ...] = ()

    def all_gather(self, value):
        if isinstance(value, str):
            return [str(rank) for rank in range(self.size)]
        assert tuple(value) == self.found[self.rank]
        return list(self.found)


def on_gpus(rank: int, size: int, *found: tuple[int, ...]) -> OnGpus:
    return OnGpus(None, rank, size, list(range(size)), found=found)


def test_all_ranks_give_one_answer(machine):
    """Also one whose own GPU is linked to all others, and ranks of another node."""
    pairs = [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)]
    machine(4, Driver({frozenset(pair) for pair in pairs}))
    with pytest.warns(UserWarning, match="no NVLink between the GPUs of ranks 1 and 2, as far"):
        assert not links.agree_on_lines(on_gpus(0, 4, (), (2,), (1,), ()), GPU, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # rank 0 has said it
        gpu = torch.device("cuda", 2)
        assert not links.agree_on_lines(on_gpus(2, 4, (), (2,), (1,), ()), gpu, 4)
        # Over two nodes of two ranks no line travels between 1 and 2.
        assert links.agree_on_lines(on_gpus(2, 4, (), (), (), ()), gpu, 2)
        # Of four seats two are taken.
        assert links.agree_on_lines(on_gpus(0, 2, (), ()), GPU, 4)


@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_without_nvlink_calls_of_any_size_take_the_simple_protocol(ranks_per_node):
    """No line of the LL protocol has room in the window, whose other buffers are as before."""
    config = make_config(4, max_tokens=64, ranks_per_node=ranks_per_node)
    over_nvlink = MemoryPlan.build(config, nvlink=True)
    over_pcie = MemoryPlan.build(config, nvlink=True, lines=False)
    sizes = over_pcie.sizes
    # A node has the rows of all nodes.
    assert over_nvlink.sizes["ll_max_tokens"] == 64 * (4 // (ranks_per_node or 4)) < LL_MAX_TOKENS
    assert (sizes["ll_max_tokens"], sizes["small_alignment_tokens"]) == (0, 0)
    for here, there in zip(over_pcie.buffers, over_nvlink.buffers, strict=True):
        if here.name.startswith("ll."):
            assert here.nbytes == 0 < there.nbytes
        else:
            assert (here.shape, here.dtype) == (there.shape, there.dtype)
