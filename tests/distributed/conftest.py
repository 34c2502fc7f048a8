"""One process group for the session: gloo for CPU tensors, NCCL for CUDA tensors. Every rank runs
every test.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchanges import make_config
from helpers import RANKS_SHARE_GPUS
from waits import LONG_S

from epmoe import ExpertParallel
from epmoe.exchange import memory
from epmoe.native import build

UNDER_TORCHRUN = "RANK" in os.environ
READ_BY_GPUS = {"ll_max_tokens", "num_sms", "senders", "team"}
"""Parameters of tests that the CPU's exchange does not read."""


def pytest_configure(config: pytest.Config) -> None:
    # A rank that fails is out of step with the others for good: it ends at once, and torchrun ends
    # the others.
    if UNDER_TORCHRUN:
        config.option.maxfail = 1
        build.ready() or build.build()  # outside of the time that a test may take


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    ours = [item for item in items if str(item.path).startswith(here)]
    for item in ours:
        item.add_marker(pytest.mark.distributed)
        item.add_marker(pytest.mark.timeout(LONG_S))
        if not UNDER_TORCHRUN:
            item.add_marker(
                pytest.mark.skip(
                    reason="needs several ranks: torchrun --nproc-per-node 2 -m pytest"
                )
            )
    repeated = repeated_on_the_cpu(ours)
    config.hook.pytest_deselected(items=repeated)
    items[:] = [item for item in items if item not in repeated]


def repeated_on_the_cpu(items: list[pytest.Item]) -> list[pytest.Item]:
    """Cases of the CPU that differ from an earlier one only in what GPUs read."""
    seen = set()
    repeated = []
    for item in items:
        params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        if str(params.get("device")) == "cpu":
            # Two cases are alike if all else is equal.
            case = (
                item.nodeid.partition("[")[0],
                *(f"{k}={v}" for k, v in params.items() if k not in READ_BY_GPUS),
            )
            repeated += [item] if case in seen else []
            seen.add(case)
    return repeated


@pytest.fixture(scope="session", autouse=True)
def _group() -> Iterator[None]:
    if not UNDER_TORCHRUN:
        yield
        return
    # One group for all tests: to make one takes longer than most of them.
    backend = "cpu:gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        # Ranks share a GPU by time slices, which is slow but tests any number of ranks. NCCL
        # refuses it, gloo does not.
        if RANKS_SHARE_GPUS:
            backend = "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=LONG_S))
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
def folder() -> Iterator[Path]:
    """One for all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        # The folder of rank 0 is that of all, until the last rank is done with it.
        of_rank_0 = [mine]
        dist.broadcast_object_list(of_rank_0)
        yield Path(of_rank_0[0])
        dist.barrier()


@pytest.fixture
def make_ep(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ExpertParallel]]:
    """Makes ExpertParallels from the options of `make_config`, and closes them after the test.

    On GPUs, calls of up to `ll_max_tokens` tokens use the LL protocol, larger ones the Simple
    protocol. A small value lets a test cover both protocols with small batches.
    """
    made = []

    def make(ll_max_tokens: int | None = None, **options) -> ExpertParallel:
        if ll_max_tokens is not None:
            monkeypatch.setattr(memory, "most_ll_tokens", lambda *_: ll_max_tokens)
        made.append(ExpertParallel(make_config(dist.get_world_size(), **options), device=device))
        return made[-1]

    yield make
    for ep in made:
        ep.close()


@pytest.fixture
def ep(make_ep: Callable[..., ExpertParallel]) -> ExpertParallel:
    return make_ep(timeout_s=LONG_S)
