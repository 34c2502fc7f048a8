"""The operators of the rail against plain torch: the slabs for each node, slot by slot, and the sum
of what returns.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from helpers import ON_GPUS, generator, poison_, randn
from torch import Tensor
from waits import until

import epmoe
from epmoe.exchange.call import Call
from epmoe.exchange.handles import RoundShape
from epmoe.exchange.memory import MemoryPlan
from epmoe.native import ops
from epmoe.rail.memory import RailMemory
from epmoe.rail.rail import Rail
from epmoe.rail.slabs import Slabs

N = 3
G = 2
T = 11
K = 4
D = 128
E = 10
RANK = 3  # of node 1
CONFIG = {
    "model": {"num_experts": E, "num_experts_per_tok": K, "hidden_size": D},
    "topology": {"ep_size": N * G, "ranks_per_node": G},
    "placement": {"strategy": "round_robin", "num_redundant_experts": 3},
    "capacity": {"max_num_tokens_per_rank": T},
}


def memory_of(config: epmoe.EPConfig, device: torch.device) -> RailMemory:
    """That of `RANK`, as a rail gives it."""
    placement = config.place_experts()
    on_gpu = device.type == "cuda"
    rail = SimpleNamespace(
        allocate=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device=device)
    )
    plan = MemoryPlan.build(config, RANK, placement, nvlink=on_gpu)
    return RailMemory(config, plan, placement, RANK, device, cast(Rail, rail))


class Packed:
    """One call packed on `device`, and on the host what that wrote: slabs by node, [N] of uint8
    [rows, slot].
    """

    def __init__(
        self,
        device: torch.device,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        slots: int,
        num_tokens: int | Tensor,
        payload: str = "auto",
        scales: Tensor | None = None,
    ):
        T = len(x)
        config = CONFIG | {"capacity": {"max_num_tokens_per_rank": max(len(x), slots)}}
        self.memory = memory = memory_of(
            epmoe.EPConfig(**config, exchange={"payload": payload}), device
        )
        for name in ("rail.received", "rail.sent", "rail.slots"):
            poison_(memory.views[name])
        given = (t if t is None else t.to(device) for t in (x, ids, weights, scales))
        call = Call(*given, num_tokens.to(device) if isinstance(num_tokens, Tensor) else num_tokens)
        slabs = Slabs(
            memory, RoundShape(D, K, x.dtype), call, epoch=7, node_epoch=1, most_tokens=slots
        )
        # The stamp of CPUs is another one than that of GPUs.
        slabs.tag = slabs.tag._replace(stamp=7)
        slabs.pack(call.operands(T, call.x.device))  # with the index of a GPU
        self.tag = slabs.tag
        self.slot = memory.slot
        views = {name: t.cpu() for name, t in memory.views.items()}
        self.slots_of, self.counts, self.needed, self.counters, self.rows_sent = (
            views[f"rail.{name}"]
            for name in ("slots", "counts", "total.needed", "total.counters", "total.rows_sent")
        )
        self.slots_of = self.slots_of[:T]
        own, sent = (views[name].flatten(0, 1) for name in ("rail.received", "rail.sent"))
        self.slabs = [*sent[: (N - 1) * slots].split(slots)]
        self.slabs.insert(memory.node, own[:slots])

    def outputs(self) -> list[Tensor]:
        """All that the call wrote, bytes between the parts of a slot included."""
        return [*self.slabs, self.slots_of, self.counts, self.needed, self.counters, self.rows_sent]


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(-1, E + 1, (T, K), generator=generator(seed), dtype=torch.int32)
    return randn(T, D, dtype=torch.bfloat16, seed=seed), ids, randn(T, K, seed=seed + 1)


@pytest.mark.parametrize("num_rows", [0, 1, T])
@pytest.mark.parametrize("slots", [3, T])
def test_each_token_once_for_each_node_in_token_order(device, slots, num_rows):
    x, ids, weights = inputs()
    got = Packed(device, x, ids, weights, slots, num_rows)
    copies, num_copies, node_of, local = (table.cpu().long() for table in got.memory.tables)
    dropped = 0
    most = 0
    # Each node, and its tokens in order.
    for node, slab in enumerate(got.slabs):
        used = 0
        row = got.slot
        for t in range(num_rows):
            # The physical experts of the token, and those of them on this node.
            pairs = [
                (k, copies[i, (t + RANK) % num_copies[i]])
                for k, i in enumerate(ids[t].tolist())
                if 0 <= i < E and weights[t, k] != 0
            ]
            here = {k: int(local[p]) for k, p in pairs if node_of[p] == node}
            if not here or used >= slots:
                assert got.slots_of[t, node] == -1
                dropped = dropped + len(here)
                used = used + bool(here)
                continue
            # Its slot has the row, and the ids and weights of this node.
            slot = slab[used]
            assert got.slots_of[t, node] == used
            assert torch.equal(slot[: 2 * D].view(torch.bfloat16), x[t])
            assert slot[row.ids : row.ids + 4 * K].view(torch.int32).tolist() == [
                here.get(k, -1) for k in range(K)
            ]
            want = [weights[t, k].item() if k in here else 0.0 for k in range(K)]
            assert slot[row.weights : row.weights + 4 * K].view(torch.float32).tolist() == want
            used += 1

        # What is left of the slab has no pairs, and its head says what was called.
        most = max(most, used)
        used = min(used, slots)
        assert got.counts[node] == got.rows_sent[node] == used
        assert len(slab) == slots
        assert slab[used:, row.ids : row.ids + 4 * K].contiguous().view(torch.int32).eq(-1).all()
        assert slab[0, row.tag : row.tag + 16].view(torch.int32).tolist() == list(got.tag)
    assert got.counters[5] == dropped
    assert got.needed == (most if most > slots else 0)
    assert got.slots_of[num_rows:].eq(-1).all()


def test_rows_are_quantized_as_by_the_stage(device):
    x, ids, weights = inputs(5)
    got = Packed(device, x, ids, weights, T, T, payload="fp8")
    want = epmoe.quantize_fp8(x)
    for t, node in got.slots_of.ge(0).nonzero().tolist():
        slot = got.slabs[node][got.slots_of[t, node]]
        assert torch.equal(slot[:D], want.q[t].view(torch.uint8))
        assert torch.equal(slot[got.slot.scales : got.slot.ids].view(torch.float32), want.scales[t])


def test_what_differs_between_nodes_is_named_within_its_bits():
    """A tag has 15 bits, whatever another rank has sent in its place."""
    memory = memory_of(epmoe.EPConfig(**CONFIG), torch.device("cpu"))
    x, ids, weights = inputs()
    # Tags of two nodes: another dtype, and another length of rows with bits that mean nothing.
    another_dtype = ([1, 5], (3, 1, 5), {"dtype": ("bfloat16", "float32")})
    another_row = (
        [5],
        (3, 5, 32767),
        {"hidden size (D)": (64, 32), "dtype": ("bfloat16", "unknown (255)")},
    )
    for tags, want in (
        ([[64, 4, 0x3F00_0500], [64, 2, 2 | 3 << 8]], another_dtype),
        ([[64, 4, 2 | 3 << 8], [32, 4, -1]], another_row),
    ):
        shape = RoundShape(64, ids.shape[1], x.dtype)
        call = Call(x[:, :64], ids, weights, tag=3)
        # They have come in the first slot of each slab.
        slabs = Slabs(memory, shape, call, epoch=7, node_epoch=1, most_tokens=None)
        first = slabs._space()[slabs.slab_rows :][: 2 * slabs.stride : slabs.stride]
        sent = torch.tensor([[*tag, slabs.tag.stamp] for tag in tags], dtype=torch.int32)
        first[:, memory.slot.tag : memory.slot.tag + 16] = sent.view(torch.uint8)
        assert slabs.mismatch() == want


@ON_GPUS
@pytest.mark.parametrize("payload", ["auto", "fp8", "fp8 rows"])
@pytest.mark.parametrize("tokens", [0, 1, 31, 700, 1500])  # more than one tile of a block
def test_gpus_write_what_cpus_write(device, tokens, payload):
    """Wrong, missing and repeated ids, weights that are no numbers, infinite rows: bit by bit,
    counts included.
    """
    seed = tokens
    x = randn(tokens, D, dtype=torch.bfloat16, seed=seed)
    ids = torch.randint(-3, E + 3, (tokens, K), generator=generator(seed), dtype=torch.int64)
    weights = randn(tokens, K, seed=seed + 1)
    # Odd values among them.
    if tokens:
        x[0, 5] = torch.inf
        x[-1, 7] = torch.nan
        weights[tokens // 2, 0] = torch.nan
        weights[-1, 1] = 0.0
    scales = None
    if payload == "fp8 rows":
        x, scales = epmoe.quantize_fp8(x)
        payload = "fp8"
    # Slabs with room for all and for half, and fewer real tokens.
    for slots in (max(tokens, 1), max(tokens // 2, 1)):
        for real in (
            tokens,
            torch.tensor(tokens - tokens // 3, dtype=torch.int32),
            torch.tensor(-2, dtype=torch.int32),
        ):
            call = x, ids, weights, slots, real, payload, scales
            on_cpu, on_gpu = (Packed(on, *call) for on in (torch.device("cpu"), device))
            for want, got in zip(on_cpu.outputs(), on_gpu.outputs(), strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [D, 37])
def test_the_sum_is_in_fp32_and_in_node_order(device, width, dtype):
    got = Packed(device, *inputs(2), T, T)
    partial = [
        randn(len(slab), width, dtype=dtype, seed=node) for node, slab in enumerate(got.slabs)
    ]
    y = torch.full((T, width), torch.nan, dtype=dtype, device=device)
    # The own rows lie apart.
    node = RANK // G
    returned = torch.cat([rows for m, rows in enumerate(partial) if m != node])
    own, back, slots_of = (t.to(device) for t in (partial[node], returned, got.slots_of))
    ops.rail_sum(own, back, slots_of, T, node, None, None, None, y)
    # In the order of nodes.
    want = torch.zeros(T, width)
    for m in range(N):
        for t in range(T):
            if got.slots_of[t, m] >= 0:
                want[t] += partial[m][got.slots_of[t, m]].float()
    assert torch.equal(y.cpu(), want.to(dtype))


@pytest.fixture
def words(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of `rail_mark`: the count on the device, that of the host, and its `RailStop`."""
    return (
        torch.zeros(1).long().to(device),
        torch.zeros(1).long().pin_memory(),
        torch.zeros(3).long().pin_memory(),
    )


@ON_GPUS
def test_sums_after_a_failure_are_zeros(words, device):
    """Once a rank of the node has missed one of another node, or one of the node, or another node
    sends a void slab. The rank latches then, also without a token, and its host learns of it,
    unless it knows of calls that differ.
    """
    slots_of = torch.zeros(3, 2, dtype=torch.int32, device=device)
    rows = torch.ones(1, 8, device=device)
    void = rows.clone()
    count, shown, stop = words
    # A void slab, as a node that has failed sends it.
    stop[1] = 1  # of the host, for which the mark would wait
    failed = torch.ones(1, dtype=torch.int32, device=device)
    ops.rail_mark(count, shown, failed, stop, False, void.view(torch.uint8).flatten(), 1)
    # What came back, what was missed, latched and noticed before; what y, the latch and the word
    # are then.
    cases = (
        (rows, 0, 0, 0, (2.0, 0, 0)),
        (rows, 5, 0, 0, (0.0, 1, -1)),
        (rows, 0, 1, 0, (0.0, 1, -1)),
        (void, 0, 0, 0, (0.0, 1, -1)),
        (void, 0, 0, 2, (0.0, 1, 2)),
    )
    for (returned, last, latches, noticed, want), T in itertools.product(cases, (3, 0)):
        missed = torch.zeros(40).long().to(device)
        latched = torch.full((1,), latches, device=device).int()
        missed[39] = last
        word = torch.full((1,), noticed).pin_memory()
        y = torch.full((T, 8), torch.nan, device=device)
        ops.rail_sum(rows, returned, slots_of[:T], 1, 0, missed, latched, word, y)
        torch.cuda.synchronize()
        assert (y.unique().tolist(), latched.item(), word.item()) == ([want[0]][:T], *want[1:])


@ON_GPUS
def test_words_that_graphs_write_are_given_to_no_other_group(device):
    groups = (memory_of(epmoe.EPConfig(**CONFIG), device).views for _ in range(3))
    words = [
        (views["rail.noticed"].data_ptr(), views["rail.total.needed"].data_ptr())
        for views in groups
    ]
    assert len({*itertools.chain(*words)}) == 6


@ON_GPUS
def test_slots_that_do_not_exist_add_nothing(device):
    slots_of = torch.tensor(
        [[0, 1], [-1, -7], [2**31 - 1, 1], [2, 0]], dtype=torch.int32, device=device
    )
    rows = torch.ones(2, 8, device=device)
    y = torch.empty(4, 8, device=device)
    ops.rail_sum(rows, rows, slots_of, 2, 0, None, None, None, y)
    assert y[:, 0].tolist() == [2, 0, 1, 1]


@ON_GPUS
def test_what_the_host_sees_of_transfers(words):
    """Replays of a graph count, too."""
    count, shown, _ = words
    ops.rail_mark(count, shown, None, None, False, None, 0)
    torch.cuda.synchronize()
    assert shown.item() == 1
    # A mark in a graph.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.rail_mark(count, shown, None, None, False, None, 0)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert shown.item() == count.item() == 4


@ON_GPUS
def test_a_node_that_has_failed_sends_no_more(words, device):
    """The transfer starts once the host has cut the rail, and its slabs are void."""
    count, shown, stop = words
    latched = torch.zeros(1, dtype=torch.int32, device=device)
    slabs = torch.zeros(3, 32, dtype=torch.uint8, device=device)
    call = count, shown, latched, stop, False, slabs.flatten(), 3
    # A mark of a node that works.
    ops.rail_mark(*call)
    torch.cuda.synchronize()
    assert shown.item() == 1 and stop.tolist() == [0, 0, 0] and slabs.eq(0).all()
    # One that has failed waits for the host.
    latched.fill_(1)
    ops.rail_mark(*call)
    until(lambda: stop[0])
    assert shown.item() == 1 and stop.tolist() == [1, 0, 0]
    # The host has cut the rail: the slabs are void.
    stop[1] = 1
    torch.cuda.synchronize()
    assert shown.item() == 2
    assert slabs.eq(slabs[0]).all() and slabs[0, :16].ne(0).all() and slabs[0, 16:].eq(0).all()


@ON_GPUS
def test_a_cut_transfer_latches(words, device):
    """No kernel behind it takes leftovers for rows."""
    count, shown, stop = words
    latched = torch.zeros(1, dtype=torch.int32, device=device)
    for cut in (0, 1):
        stop[2] = cut
        ops.rail_mark(count, shown, latched, stop, True, None, 0)
        assert latched.item() == cut


@ON_GPUS
def test_calls_of_other_nodes_that_differ(device):
    got = Packed(device, *inputs(1), T, T)
    sent = torch.cat([slab for node, slab in enumerate(got.slabs) if node != RANK // G]).to(device)
    differing = got.memory.views["rail.noticed"]
    # The same tag, and one that differs in each of its parts.
    for place in (None, 0, 1, 2, 3):
        wrong = [value + (i == place) for i, value in enumerate(got.tag)]
        ops.rail_tags(sent.flatten(), T, got.memory.descriptor, *wrong, differing)
        torch.cuda.synchronize()
        assert differing.item() == (place is not None)
    # A tag of another node that differs.
    sent.view(N - 1, T, -1)[1, 0, got.slot.tag] += 1
    ops.rail_tags(sent.flatten(), T, got.memory.descriptor, *got.tag, differing)
    torch.cuda.synchronize()
    assert differing.item() == 2
