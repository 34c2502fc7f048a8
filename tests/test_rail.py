"""The operators of the rail against plain torch: the slabs for each node, slot by slot, and the sum of what returns."""

from __future__ import annotations

import pytest
import torch
from helpers import generator, randn
from torch import Tensor

import epmoe
from epmoe import ops
from epmoe.memory import NUM_COUNTERS, RailSlot

N, G, T, K, D, E = 3, 2, 11, 4, 128, 10
RANK = 3  # of node 1
CONFIG = {
    "model": {"num_experts": E, "num_experts_per_tok": K, "hidden_size": D},
    "topology": {"ep_size": N * G, "ranks_per_node": G},
    "placement": {"strategy": "round_robin", "num_redundant_experts": 3},
    "capacity": {"max_num_tokens_per_rank": T},
}


class Packed:
    """One call of rail_pack, and its slabs by node: [N] of uint8 [rows, slot]."""

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor, slots: int, exact: bool, num_rows: int, payload="auto"):
        self.config = epmoe.EPConfig(**CONFIG, exchange={"payload": payload})
        self.placement, self.slot = epmoe.Placement.from_config(self.config), RailSlot.of(self.config)
        copies, node = self.placement.copies_table(), RANK // G
        self.tables = copies, self.placement.num_copies(), *self.placement.node_ids(G)
        descriptor = torch.tensor([*copies.shape, RANK, node, N, payload == "fp8", *self.slot])
        own, sent = (torch.full((n, slots, self.slot.bytes), 255, dtype=torch.uint8) for n in (1, N - 1))
        self.slots_of, self.counts = torch.full((T, N), 99, dtype=torch.int32), torch.empty(N, dtype=torch.int32)
        self.needed, self.counters = torch.zeros(1, dtype=torch.int32), torch.zeros(NUM_COUNTERS, dtype=torch.int64)
        self.rows_sent = torch.zeros(N, dtype=torch.int64)
        ops.rail_pack(
            x, ids, weights, None, None, num_rows, *self.tables, descriptor, slots, exact, 7, own.flatten(),
            sent.flatten(), self.slots_of, self.counts, self.needed, self.counters, self.rows_sent,
        )  # fmt: skip
        lengths = self.counts.tolist() if exact else [slots] * N
        ends = torch.tensor([0 if m == node else lengths[m] for m in range(N)]).cumsum(0).tolist()
        rows = sent.flatten(0, 1)
        self.slabs = [own[0, :n] if m == node else rows[ends[m] - n : ends[m]] for m, n in enumerate(lengths)]


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(-1, E + 1, (T, K), generator=generator(seed), dtype=torch.int32)
    return randn(T, D, dtype=torch.bfloat16, seed=seed), ids, randn(T, K, seed=seed + 1)


@pytest.mark.parametrize("num_rows", [0, 1, T])
@pytest.mark.parametrize("slots", [3, T])
@pytest.mark.parametrize("exact", [False, True])
def test_each_token_once_for_each_node_in_token_order(exact, slots, num_rows):
    x, ids, weights = inputs()
    got = Packed(x, ids, weights, slots, exact, num_rows)
    copies, num_copies, node_of, local = (table.long() for table in got.tables)
    dropped, most = 0, 0
    for node, slab in enumerate(got.slabs):
        used, row = 0, got.slot
        for t in range(num_rows):
            pairs = [
                (k, copies[i, (t + RANK) % num_copies[i]])
                for k, i in enumerate(ids[t].tolist())
                if 0 <= i < E and weights[t, k] != 0
            ]
            here = {k: int(local[p]) for k, p in pairs if node_of[p] == node}
            if not here or used >= slots:
                assert got.slots_of[t, node] == -1
                dropped, used = dropped + len(here), used + bool(here)
                continue
            slot = slab[used]
            assert got.slots_of[t, node] == used
            assert torch.equal(slot[: 2 * D].view(torch.bfloat16), x[t])
            assert slot[row.ids : row.ids + 4 * K].view(torch.int32).tolist() == [here.get(k, -1) for k in range(K)]
            want = [weights[t, k].item() if k in here else 0.0 for k in range(K)]
            assert slot[row.weights : row.weights + 4 * K].view(torch.float32).tolist() == want
            used += 1
        most = max(most, used)
        used = min(used, slots)
        assert got.counts[node] == got.rows_sent[node] == used
        assert len(slab) == (used if exact else slots)
        assert slab[used:, row.ids : row.ids + 4 * K].contiguous().view(torch.int32).eq(-1).all()
        if not exact:
            assert slab[0, row.tag : row.tag + 16].view(torch.int32).tolist() == [D, K, 2, 7]
    assert got.counters[5] == dropped
    assert got.needed == (most if most > slots else 0)
    assert got.slots_of[num_rows:].eq(-1).all()


def test_rows_are_quantised_as_by_the_stage():
    x, ids, weights = inputs(5)
    got = Packed(x, ids, weights, T, False, T, payload="fp8")
    want = epmoe.quantize_fp8(x)
    for t, node in got.slots_of.ge(0).nonzero().tolist():
        slot = got.slabs[node][got.slots_of[t, node]]
        assert torch.equal(slot[:D], want.q[t].view(torch.uint8))
        assert torch.equal(slot[got.slot.scales : got.slot.ids].view(torch.float32), want.scales[t])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_sum_is_in_fp32_and_in_node_order(dtype, exact):
    got = Packed(*inputs(2), T, exact, T)
    partial = [randn(len(slab), D, dtype=dtype, seed=node) for node, slab in enumerate(got.slabs)]
    y, node = torch.full((T, D), torch.nan, dtype=dtype), RANK // G
    returned = torch.cat([rows for m, rows in enumerate(partial) if m != node])
    ops.rail_sum(partial[node], returned, got.slots_of, got.counts if exact else None, T, node, y)
    want = torch.zeros(T, D)
    for m in range(N):
        for t in range(T):
            if got.slots_of[t, m] >= 0:
                want[t] += partial[m][got.slots_of[t, m]].float()
    assert torch.equal(y, want.to(dtype))
