"""One process group for the session: gloo for CPU tensors, NCCL for CUDA tensors. Every rank runs every test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from exchanges import make_config
from helpers import RANKS_SHARE_GPUS

from epmoe import ExpertParallel
from epmoe.exchange import memory

UNDER_TORCHRUN = "RANK" in os.environ


def pytest_configure(config: pytest.Config) -> None:
    # A rank that fails is out of step with the others for good: it ends at once, and torchrun ends the others.
    if UNDER_TORCHRUN:
        config.option.maxfail = 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here) and item.path.name != "test_factors.py":
            item.add_marker(pytest.mark.distributed)
            if not UNDER_TORCHRUN:
                item.add_marker(pytest.mark.skip(reason="needs several ranks: torchrun --nproc-per-node 2 -m pytest"))


@pytest.fixture(scope="session", autouse=True)
def _group() -> Iterator[None]:
    if not UNDER_TORCHRUN:
        yield
        return
    backend = "cpu:gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        # Ranks share a GPU by time slices, which is slow but tests any number of ranks. NCCL refuses it, gloo does not.
        if RANKS_SHARE_GPUS:
            backend = "cpu:gloo,cuda:gloo"
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _lockstep(_group: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """No rank begins a test before all ranks have passed the previous one."""
    yield
    if UNDER_TORCHRUN and not request.session.testsfailed:
        dist.all_reduce(torch.zeros(1))


@pytest.fixture
def rank() -> int:
    return dist.get_rank()


@pytest.fixture
def size() -> int:
    return dist.get_world_size()


@pytest.fixture
def make_ep(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ExpertParallel]]:
    """Makes ExpertParallels from the options of `make_config`, and closes them after the test.

    On GPUs, calls of up to `ll_max_tokens` tokens use the LL protocol, larger ones the Simple protocol. A small value
    lets a test cover both protocols with small batches.
    """
    made = []

    def make(ll_max_tokens: int = memory.LL_MAX_TOKENS, **options) -> ExpertParallel:
        monkeypatch.setattr(memory, "LL_MAX_TOKENS", ll_max_tokens)
        made.append(ExpertParallel(make_config(dist.get_world_size(), **options), device=device))
        return made[-1]

    yield make
    for ep in made:
        ep.close()
