"""Every kind of fault twice, on one group of ranks that goes on after each; `make faults` runs more of them."""

from __future__ import annotations

import pytest
import torch
from faults.__main__ import main
from faults.nodes import NAMESPACES


@pytest.mark.slow
def test_every_fault_twice(device):
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert not main(["--runs", "2", "--device", device.type, "--ranks", "3" if device.type == "cpu" else "2"])


@pytest.mark.slow
def test_faults_of_two_nodes(monkeypatch):
    """Ranks fail. `make faults FAULTS="--nodes 2"` also has failures of the network between the nodes."""
    monkeypatch.setenv(NAMESPACES, "")
    assert not main(["--runs", "1", "--nodes", "2"])
