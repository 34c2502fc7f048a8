"""Scripts of two ranks, as users run them: a forked child touches nothing of its parent's, and a
script that has closed its `ExpertParallel` ends well.

The scripts end as an interpreter does, with its destructors, which a forked child of a test would
not.
"""

from __future__ import annotations

import pytest
import sanitizer
from launched import run_two_ranks

BEGIN = """
import gc, os, sys
import torch, torch.distributed as dist
import epmoe

rank, store, nodes, end = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
config = epmoe.EPConfig(
    model={"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "dtype": "float32"},
    topology={"ep_size": 2, "ranks_per_node": 2 // nodes},
    capacity={"max_num_tokens_per_rank": 4},
    exchange={"timeout_s": 10.0},
)
x, ids, weights = torch.ones(2, 64), torch.tensor([[0, 3], [1, 2]]), torch.full((2, 2), 0.5)

def meet(time):
    dist.init_process_group("gloo", init_method=f"file://{store}-{time}", rank=rank, world_size=2)
"""
FORK = """
meet(0)
ep = epmoe.ExpertParallel(config)

def in_the_child(d):
    calls = [
        lambda: ep.dispatch(99 * x, ids, weights),
        lambda: ep.combine(99 * d.rows, d),
        lambda: ep.abort(d),
        lambda: ep.skip(),
        lambda: ep.expert_map,
        ep.health,
        ep.check,
        ep.poll,
        ep.memory_plan,
        ep.resume,
    ]
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            assert "is a fork" in str(error) and str(os.getppid()) in str(error), error
        else:
            raise AssertionError("a call of the child went through")
    ep.abort()
    assert f"of process {os.getppid()}" in repr(ep) and ep.survivors() == [0, 1]
    ep.close()

for time in range(2):
    d = ep.dispatch(x, ids, weights)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(ep.combine(d.rows, d), x)
    else:
        in_the_child(d)
        del ep, d
        gc.collect()
        os._exit(0) if end == "as multiprocessing" else sys.exit(0)
ep.close()
dist.destroy_process_group()
store += "-forked"
"""
GROUPS = """
for time in range(8):
    meet(time)
    with epmoe.ExpertParallel(config) as ep:
        d = ep.dispatch(x, ids, weights)
        y = ep.combine(d.rows, d)
    assert "closed" in repr(ep) and (ep.rank, ep.size, ep.survivors()) == (rank, 2, [0, 1])
    dist.all_reduce(y)
    dist.destroy_process_group()
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    assert not any("gloo_run" in name for name in names), names
"""


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "end"), [(1, "as multiprocessing"), (2, "as an interpreter")])
def test_a_forked_child_touches_nothing(nodes, end, tmp_path):
    """Every call of the child raises, and its end is harmless, by destructors or without them."""
    run_two_ranks(BEGIN + FORK, tmp_path / "store", nodes, end)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_script_ends(nodes, tmp_path):
    """Nothing of ours outlives any of the groups."""
    run_two_ranks(BEGIN + GROUPS, tmp_path / "store", nodes, "")


def test_a_script_that_forks_ends(tmp_path):
    """Both in one script: an interpreter takes seconds to import torch."""
    run_two_ranks(BEGIN + FORK + GROUPS, tmp_path / "store", 2, "as multiprocessing")


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [part for part, (script, *_) in sanitizer.PARTS.items() if sanitizer.BEGIN in script]
)
def test_parts_of_the_sanitizer_run_on_cpus(part):
    script, ranks, _ = sanitizer.PARTS[part]
    for run in sanitizer.sanitize(None, script, ranks=ranks, device="cpu"):
        assert run.returncode == 0 and "done" in run.stdout, run.stderr[-2000:]
