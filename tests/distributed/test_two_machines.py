"""What only a real network shows: the bytes of each interface, and a window across machines that is
refused.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchanges import make_tokens, run_round

pytestmark = pytest.mark.parametrize("device", [torch.device("cpu")])
INTERFACE = (
    Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "none") / "statistics/tx_bytes"
)
LOCAL_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))


@pytest.fixture(autouse=True)
def _two_machines(size: int) -> None:
    if not INTERFACE.exists() or size != 2 * LOCAL_SIZE:
        pytest.skip("needs two machines: make two-machines")


def test_a_window_across_machines_is_refused(make_ep, size):
    with pytest.raises(
        RuntimeError, match="set topology.ranks_per_node to the ranks of one machine"
    ):
        make_ep(ranks_per_node=size)


@pytest.mark.parametrize("most", [None, 40])
def test_a_token_crosses_once_per_node(make_ep, rank, size, most):
    """Over 50 rounds, what the interface has sent is the slabs and what comes back, within 3 % and
    headers.
    """
    T = 32
    K = 8
    D = 1024
    rounds = 50
    ep = make_ep(
        ranks_per_node=LOCAL_SIZE, experts=32, top_k=K, hidden=D, dtype="bfloat16", max_tokens=64
    )
    tokens = make_tokens(ep.config, rank, T)
    run_round(ep, tokens)
    dist.barrier()
    before = int(INTERFACE.read_text())
    with ep.at_most(most):
        for _ in range(rounds):
            d = ep.dispatch(tokens.x, tokens.ids, tokens.weights)
            ep.combine(d.rows, d)
    dist.barrier()
    sent = (int(INTERFACE.read_text()) - before) / rounds
    here = range(rank // LOCAL_SIZE * LOCAL_SIZE, (rank // LOCAL_SIZE + 1) * LOCAL_SIZE)
    out = 0
    back = 0
    for source in range(size):
        rows = most or ep.config.rows_per_node
        out, back = (out + rows, back) if source in here else (out, back + rows)
    # One row lies behind each slab that comes back: see `Slabs.back`.
    notes = LOCAL_SIZE * (size // LOCAL_SIZE - 1)
    want = out * (2 * D + 8 * K + 16) + (back + notes) * 2 * D
    if most is None:  # what `epmoe plan` prints
        plan = ep.memory_plan()
        assert want == LOCAL_SIZE * (plan["rail.sent"].nbytes + plan["rail.returned"].nbytes)
    assert want < sent < 1.03 * want + 66 * (want / 1448 + 8 * LOCAL_SIZE), (sent, want)
