"""A script that has closed its `ExpertParallel` ends well: nothing of ours outlives the process group."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import slow
from launched import run_two_ranks

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import epmoe

rank, store, nodes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
for time in range(20):
    dist.init_process_group("gloo", init_method=f"file://{store}-{time}", rank=rank, world_size=2)
    config = epmoe.EPConfig(
        model={"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "dtype": "float32"},
        topology={"ep_size": 2, "ranks_per_node": 2 // nodes},
        capacity={"max_num_tokens_per_rank": 4},
    )
    with epmoe.ExpertParallel(config) as ep:
        d = ep.dispatch(torch.ones(2, 64), torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2))
        y = ep.combine(d.rows, d)
    assert "closed" in repr(ep) and (ep.rank, ep.size, ep.survivors()) == (rank, 2, [0, 1])
    dist.all_reduce(y)
    dist.destroy_process_group()
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    assert not any("gloo_run" in name for name in names), names
"""


@pytest.mark.parametrize("nodes", [slow(1), 2])
def test_a_script_ends(nodes, tmp_path: Path):
    """Twenty groups one after the other, and then the interpreter's own end, which a forked child would not have."""
    run_two_ranks(SCRIPT, tmp_path / "store", nodes)
