"""The memory plan: offsets and sizes of every buffer before anything is allocated; allocation:
tests/distributed.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from launched import run_python

import epmoe
from epmoe.exchange.memory import BUFFER_ALIGNMENT, MemoryPlan

SMALL = {
    "model": {"num_experts": 10, "num_experts_per_tok": 2, "hidden_size": 64, "dtype": "bfloat16"},
    "topology": {"ep_size": 4},
    "capacity": {"max_num_tokens_per_rank": 8, "alignment": 1},
}


def plan_of(rank: int = 0, **sections) -> MemoryPlan:
    merged = {name: SMALL.get(name, {}) | sections.get(name, {}) for name in SMALL | sections}
    return MemoryPlan.build(epmoe.EPConfig(**merged), rank)


def test_by_hand():
    """R=4, M=8, K=2, D=64, two bytes: 4·8 slots in the window, 4·8·2 expert-major rows."""
    plan = plan_of()
    assert (plan["recv.x"].shape, plan["recv.x"].nbytes) == ((4, 8, 64), 4096)
    assert (plan["recv.ids"].nbytes, plan["recv.weights"].nbytes) == (256, 256)
    assert (plan["rows"].shape, plan["rows"].nbytes) == ((64, 64), 8192)
    assert plan["recv.scales"].nbytes == plan["combine.scales"].nbytes == 0
    # The first 10 mod 4 ranks own one expert more.
    assert [plan_of(rank)["tokens_per_expert"].shape for rank in range(4)] == [
        (3,),
        (3,),
        (2,),
        (2,),
    ]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"capacity": {"alignment": 128}},
        {"capacity": {"max_expert_rows": 40}},
        {"placement": {"num_redundant_experts": 7}},
        {"model": {"hidden_size": 512}, "exchange": {"payload": "fp8", "combine_payload": "fp8"}},
        {"model": {"hidden_size": 7168, "dtype": "float32"}},
    ],
)
def test_buffers_lie_apart_and_fill_their_region(sections):
    plan = plan_of(**sections)
    for region, size in (("window", plan.window_bytes), ("scratch", plan.scratch_bytes)):
        buffers = [b for b in plan.buffers if b.region == region]
        assert all(b.offset % BUFFER_ALIGNMENT == 0 for b in buffers)
        assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(buffers))
        assert buffers[-1].offset + buffers[-1].nbytes <= size
        assert size - sum(b.nbytes for b in buffers) < BUFFER_ALIGNMENT * len(buffers) + 4096
        memory = torch.empty(size, dtype=torch.uint8)
        assert all(
            (view := b.view(memory)).shape == b.shape and view.dtype == b.dtype for b in buffers
        )
    assert plan.total_bytes == plan.window_bytes + plan.scratch_bytes


@pytest.mark.parametrize("nvlink", [False, True])
@pytest.mark.parametrize("rows", [None, 572, 640])
def test_rows_are_rounded_up_to_the_alignment(rows, nvlink):
    """Grouped GEMMs on blocks of 128 rows check that the rows are whole blocks."""
    capacity = {"max_num_tokens_per_rank": 8, "alignment": 128, "max_expert_rows": rows}
    config = epmoe.EPConfig(**SMALL | {"capacity": capacity})
    plan = MemoryPlan.build(config, rank=3, nvlink=nvlink)
    want = 640 if rows else 512 if nvlink else 384  # 64 + 3 · 127 or 64 + 2 · 127, rounded up
    assert plan["rows"].shape == (want, 64) and plan.sizes["max_rows"] == want


@pytest.mark.parametrize(
    ("experts", "ranks", "tokens"), [(128, 2, 1023), (256, 8, 511), (8, 8, 15), (256, 2, 1024)]
)
def test_small_gaps_end_where_large_blocks_are_full(experts, ranks, tokens):
    """That is, where an expert gets 128 rows on average, or past the tokens that travel by LL."""
    model = {
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "hidden_size": 64,
        "dtype": "bfloat16",
    }
    config = epmoe.EPConfig(
        model=model, topology={"ep_size": ranks}, capacity={"max_num_tokens_per_rank": 4096}
    )
    sizes = MemoryPlan.build(config, rank=0, nvlink=True).sizes
    assert sizes["small_alignment_tokens"] == tokens
    assert (sizes["small_alignment"], sizes["alignment"]) == (64, 128)


def test_needs_no_native_library():
    script = (
        "from epmoe.exchange.memory import MemoryPlan; from epmoe.config.config import EPConfig; "
    )
    script += f"print(MemoryPlan.build(EPConfig(**{SMALL!r})).total_bytes)"
    run = run_python("-c", script, EPMOE_LIBRARY="/nowhere/libepmoe.so")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == plan_of().total_bytes


NODES = {"topology": {"ep_size": 4, "ranks_per_node": 2}, "capacity": {"max_rows_per_node": 3}}


@pytest.mark.parametrize("payload", ["auto", "fp8"])
def test_the_rail_to_the_byte(payload):
    """Two nodes: a slot has a row, its scales, K ids, K weights and 16 bytes more, in whole 16
    bytes.
    """
    plan = plan_of(3, **NODES, model={"hidden_size": 256}, exchange={"payload": payload})
    D = 256
    K = 2
    M = 8
    row = D + 4 * (D // 128) if payload == "fp8" else D * 2
    slot = -(-(row + 8 * K + 16) // 16) * 16
    assert plan["rail.received"].shape == (2, 3, slot) and plan["rail.sent"].shape == (1, 3, slot)
    assert plan["rail.returned"].nbytes == (3 + 1) * D * 2
    assert plan["rail.slots"].shape == (M, 2)
    # Within the node, a rank brings a slab of each node.
    assert plan["recv.ids"].shape == (2, 2 * 3, K)
    assert plan.total_bytes == plan.window_bytes + plan.scratch_bytes + plan.rail_bytes
    ends = [buffer.offset + buffer.nbytes for buffer in plan.buffers if buffer.region == "rail"]
    assert max(ends) <= plan.rail_bytes < max(ends) + 128


SERVICE = {
    "model": {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "hidden_size": 7168,
        "dtype": "bfloat16",
    },
    "topology": {"ep_size": 8},
    "placement": {"strategy": "explicit", "assignment": [6] * 128 + [7] * 128},
}


@pytest.mark.parametrize("tokens", [1, 128, 1024, 4096])
@pytest.mark.parametrize("nvlink", [False, True])
def test_a_rank_without_experts_has_15_percent_of_the_bytes(nvlink, tokens):
    config = epmoe.EPConfig(**SERVICE, capacity={"max_num_tokens_per_rank": tokens})
    plans = [MemoryPlan.build(config, rank, nvlink=nvlink) for rank in range(8)]
    without, whole = plans[0], plans[7]
    assert [plan.window_bytes for plan in plans] == list(whole.windows)
    assert without.total_bytes <= 0.15 * whole.total_bytes
    # On CPUs expert-major rows lie in scratch.
    if nvlink:
        assert without.window_bytes <= 0.15 * whole.window_bytes
    # Ranks write into one another's windows, so offsets are the same.
    offsets = [
        {buffer.name: buffer.offset for buffer in plan.buffers if buffer.region == "window"}
        for plan in plans
    ]
    assert all(of_rank == offsets[0] for of_rank in offsets)


def test_windows_are_whole_where_experts_may_come():
    """Experts that move come to any rank."""
    live = {"live": True, "slots_per_rank": 64, "layers": 2}
    plan = MemoryPlan.build(epmoe.EPConfig(**SERVICE | {"placement": live}))
    assert len(set(plan.windows)) == 1
