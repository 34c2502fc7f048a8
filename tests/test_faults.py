"""Every kind of fault twice, on one group of ranks that goes on after each; `make faults` runs more of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faults.kinds import Group, kinds_of
from faults.nodes import NAMESPACES, Nodes, kinds_of_nodes

RANKS = {"cpu": 3, "cuda": 2}


@pytest.fixture
def group(tmp_path: Path, device: torch.device) -> Iterator[Group]:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    group = Group(tmp_path, device, RANKS[device.type])
    yield group
    group.close()


@pytest.mark.slow
def test_every_fault_twice(group, device):
    for name, kind in kinds_of(device).items():
        for seed in range(2):
            outcome = group.hurt(kind, seed)
            assert outcome.named and outcome.alive and outcome.resumed and not outcome.hung, (name, seed, outcome)


@pytest.mark.slow
def test_faults_of_two_nodes(tmp_path, monkeypatch):
    """Ranks fail. `make faults FAULTS="--nodes 2"` also has failures of the network between the nodes."""
    monkeypatch.setenv(NAMESPACES, "")
    for name, kind in kinds_of_nodes().items():
        outcome = Nodes(tmp_path).hurt(kind, 2)
        assert outcome.named and outcome.alive and outcome.resumed and not outcome.hung, (name, outcome)
