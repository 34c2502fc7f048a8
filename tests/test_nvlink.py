"""What windows over NVLink need of a machine, on machines that have neither GPU nor NVLink."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from epmoe.exchange.window_nvlink import _check_peer_access
from epmoe.group.peers import Peers


@dataclass(frozen=True)
class OnGpus(Peers):
    """Rank r is on GPU r."""

    def all_gather(self, value):
        return list(range(self.size))


def test_gpus_without_peer_access_are_named(monkeypatch):
    """GPU 0 reaches GPU 1, but not 2; GPU 3 is hidden from this process, so that only the driver knows."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 2)
    peers = OnGpus(None, 0, 4, [0, 1, 2, 3])
    with pytest.raises(RuntimeError, match=r"the GPU of rank 0 has no peer access to that of rank\(s\) \[2\]"):
        _check_peer_access(peers, torch.device("cuda", 0))
    _check_peer_access(OnGpus(None, 0, 2, [0, 1]), torch.device("cuda", 0))
