"""Updates of vLLM's weights over 2 ranks, in which one rank raises: all ranks have the new version
then, or all have the former one (docs/rl.md). Engines are in test_vllm_weights.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

if "RANK" not in os.environ:
    pytest.skip("needs vLLM and 2 ranks: make stacks", allow_module_level=True)
from interrupted_steps import of_all, settled_steps

from epmoe.group import collective, peers, waiting
from epmoe.integrations.vllm import weights

PARTS = 3
# In an update. This file has the loaders in place of vLLM's.
FILES = {module.__file__ for module in (collective, contextlib, peers, waiting, weights)} | {
    __file__
}


class Engine(weights.VersionEngine):
    """Its weights are the number of a version, in several parts that are loaded one by one."""

    def __init__(self, folder: Path) -> None:
        self.device = torch.device("cpu")
        self.parallel_config = SimpleNamespace(enable_eplb=False, pipeline_parallel_size=1)
        self.parts = [0] * PARTS
        self.load_part: Callable[[int], int] = int
        self.init_transfer_engine(weights.FolderInfo(str(folder)))

    def _layers(self, version: Any) -> dict[str, Any]:
        return {}

    def _load(self, version: Any, layers: dict[str, Any]) -> None:
        for part in range(PARTS):
            self.parts[part] = self.load_part(version.number)


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


@pytest.fixture
def engine(_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """With every version in its folder, and a group that the test itself does not use."""
    group = SimpleNamespace(cpu_group=dist.new_group())
    monkeypatch.setattr(weights, "get_ep_group", lambda: group)
    monkeypatch.setattr(weights, "newest_version", lambda _: 1 << 30)
    monkeypatch.setattr(weights, "map_version", _mapped)
    return Engine(tmp_path / "versions")


def _mapped(_: Path, number: int, __: object) -> Any:
    return SimpleNamespace(number=number, dense={})


@pytest.mark.parametrize("victim", [0, 1])
def test_all_ranks_have_one_version_wherever_a_handler_raises(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """The others hear of it at once, or have the new version."""
    number = 1

    def step(begun: Callable[[], None]) -> None:
        # A handler that raises before a rank is in the update changes nothing: others wait for it.
        monkeypatch.setattr(weights, "named_exchanges", lambda: begun() or {})
        engine.receive_weights(weights.VersionInfo(number))

    held = 0
    rank = dist.get_rank()
    for succeeded in settled_steps(rank, step, victim=victim, files=FILES, stride=1):
        if succeeded:
            held = number
        assert of_all(engine.parts) == [[held] * PARTS] * dist.get_world_size()
        number += 1


def test_a_loader_fails_on_one_rank(engine: Engine) -> None:
    """All ranks raise, and the next update is whole."""

    def fail(number: int) -> int:
        raise ValueError(f"no part of version {number}")

    if dist.get_rank() == 1:
        engine.load_part = fail
        said = "^no part of version 1$"
    else:
        said = "^rank 1: no part of version 1$"
    with pytest.raises(ValueError, match=said):
        engine.receive_weights(weights.VersionInfo(1))
    engine.load_part = int
    engine.receive_weights(weights.VersionInfo(1))
    assert of_all(engine.parts) == [[1] * PARTS] * dist.get_world_size()
