"""ExpertParallel in one process: where it may run, what it takes, its handles, and what it says of
itself.

The exchange between ranks: tests/distributed. Wrong calls: test_mistakes.py. Several threads:
test_threads.py.
"""

from __future__ import annotations

import copy
import errno
import io
import os
import pickle
import random
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from helpers import alone, distinct_ids, full_layer, randn
from torch._subclasses.fake_tensor import FakeTensorMode
from waits import LONG_S, SOON_S

import epmoe
from epmoe.exchange.gpu import Gpu
from epmoe.exchange.window_nvlink import _check_peer_access
from epmoe.group.peers import Peers
from epmoe.native.arguments import check_tensor

E = 12
D = 64
K = 3
M = 16
CONFIG = alone(E, K, D, max_tokens=M)


@pytest.fixture
def ep():
    with epmoe.ExpertParallel(CONFIG) as ep:
        yield ep


def test_one_process_is_a_group_of_one(ep):
    assert (ep.rank, ep.size, ep.num_local_experts, ep.device.type) == (0, 1, E, "cpu")
    x = torch.randn(3, 64)
    d = ep.dispatch(x, torch.tensor([[0, 1], [2, 2], [7, -1]]), torch.ones(3, 2))
    assert torch.equal(ep.combine(d.rows, d), x * torch.tensor([[2.0], [2.0], [1.0]]))
    ep.close()
    for call in (ep.health, ep.poll):
        with pytest.raises(RuntimeError, match="this ExpertParallel is closed"):
            call()


@pytest.mark.usefixtures("serving")
def test_models_may_be_built_under_a_default_device():
    x, *weights = (
        torch.randn(3, 64),
        torch.randn(8, 64),
        torch.randn(8, 80, 64),
        torch.randn(8, 64, 40),
    )

    def built() -> epmoe.MoELayer:
        return epmoe.MoELayer.from_full(
            epmoe.ExpertParallel(alone()), *weights, batch_invariant=True
        )

    # One is built and resumed under another default device, one is not: y is the same.
    with torch.device("meta"):
        layer = built()
        layer.ep.resume()
    with layer.ep, (usual := built()).ep:
        assert torch.equal(layer(x), usual(x))


def test_experts_hear_of_ranks_that_bring_more(ep):
    """Which GEMM is best follows from the rows of all ranks, of which a rank with one token knows
    nothing.
    """
    x = torch.randn(1, 64)
    ids = torch.zeros(1, 2, dtype=torch.int32)
    weights = torch.ones(1, 2)
    # The own pairs over all experts, or those of the batch that is told.
    own = 2 / E
    told = 16 * 2 / E
    after = 2 / E
    for within, rows in ((None, own), (16, told), (0, own), (None, after)):
        with ep.at_most(within):
            d = ep.dispatch(x, ids, weights)
        assert d.segments["rows_per_expert"] == rows
        ep.abort(d)
    for wrong in (-1, 1.5):
        with (
            pytest.raises(ValueError, match="`tokens` must be an int of at least 0"),
            ep.at_most(wrong),
        ):
            raise AssertionError


def test_a_backward_pass_that_needs_rows_of_an_earlier_round_raises(ep):
    """`d.rows` is a window: saved for a backward pass, it would hold the rows of another layer by
    then.
    """
    w = torch.randn(64, requires_grad=True)
    for _ in range(2):
        d = ep.dispatch(torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
        loss = (d.rows * w).sum()
        ep.combine(d.rows, d)
    # Rows of the last round are still there.
    loss.backward()  # of the last round
    loss = (d.rows * w).sum()
    ep.combine(
        d.rows,
        ep.dispatch(torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)),
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


NO_IDS = torch.empty(2, 0, dtype=torch.int32).t()
NO_WEIGHTS = torch.empty(2, 0).t()
EMPTY = torch.empty(0, 128), torch.empty(0, 4, dtype=torch.int32), torch.empty(0, 4)


@pytest.mark.parametrize(
    ("x", "ids", "weights"),
    [
        (
            torch.randn(1 + 2 * 64)[1:].view(2, 64),
            torch.zeros(2, 1, dtype=torch.int32),
            torch.ones(2, 1),
        ),
        (
            torch.randn(2, 65)[:1, :64],
            torch.zeros(2, 3, dtype=torch.int32)[:1, :1],
            torch.ones(2, 5)[:1, :1],
        ),
        (torch.empty(64, 0).t(), NO_IDS, NO_WEIGHTS),
        # torch calls a tensor of 0 rows contiguous, whatever the stride within a row
        *(
            [t[:, :: 2 if i == apart else 1][:, : (64, 2, 2)[i]] for i, t in enumerate(EMPTY)]
            for apart in range(3)
        ),
    ],
)
def test_rows_may_start_anywhere(ep, x, ids, weights):
    """Not only at multiples of 16 bytes; a row alone and no row may have any stride. combine needs
    used rows only.
    """
    for _ in range(2):  # the second call finds its template
        d = ep.dispatch(x, ids, weights)
        # Outputs of experts may start anywhere, too.
        unaligned = torch.empty(d.rows.numel() + 1)[1:].view_as(d.rows).copy_(d.rows)
        assert torch.equal(ep.combine(unaligned[: d.expert_offsets[-1]], d), x)


def test_another_gpu_is_another_device():
    with FakeTensorMode():
        x = torch.empty(2, 64, device="cuda:1")
    with pytest.raises(ValueError, match="`x` must be on cuda:0, got cuda:1"):
        check_tensor("x", x, (torch.float32,), ("T", "D"), torch.device("cuda:0"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one():
    with torch.cuda.device(0), epmoe.ExpertParallel(alone(), device="cuda:1") as ep:
        x, ids, weights = (
            t.to("cuda:1") for t in (torch.randn(2, 64), torch.tensor([[0], [1]]), torch.ones(2, 1))
        )
        d = ep.dispatch(x, ids, weights)
        assert torch.equal(ep.combine(d.rows, d), x)
        with pytest.raises(ValueError, match="`ids` must be on cuda:1, got cuda:0"):
            ep.dispatch(x, ids.to("cuda:0"), weights)


class Interrupted(Exception):
    """What a signal handler raises."""


def test_a_signal_at_the_edge_of_a_turn_does_not_leave_it_held(ep):
    """Anywhere in a call that does nothing."""

    def handler(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    draw = random.Random(0)
    interrupted = 0
    for _ in range(10_000):
        try:
            try:
                # A timer as short as the call: it ends before, within or behind it.
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 3e-5))
                ep.life.alone(int)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            # Wherever it came, no thread holds the turn.
            interrupted += 1
            assert ep.exchange.thread == 0
    signal.signal(signal.SIGALRM, before)
    assert interrupted > 100


@pytest.mark.parametrize(
    "rounds_before, first_s, wait_s", [(0, 1.0, 1.0), (1, LONG_S, 0.2), (2, LONG_S, 0.2)]
)
@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_only_the_first_round_waits_for_ranks_that_still_load(
    stage, rounds_before, first_s, wait_s
):
    """Operators and host agree. The signal of a stage does not come."""
    with epmoe.ExpertParallel(
        alone(exchange={"timeout_s": 0.2, "warmup_timeout_s": first_s})
    ) as ep:
        tokens = torch.zeros(1, 64), torch.tensor([[0]]), torch.ones(1, 1)
        # Rounds before, and one whose signal goes.
        for _ in range(rounds_before):
            d = ep.dispatch(*tokens)
            ep.combine(d.rows, d)
        sent = ep.dispatch_send(*tokens)
        if stage == "combine":
            d = ep.dispatch_recv(sent)
            ep.combine_send(d.rows, d)
        ep.exchange.views[f"signal.{stage}"].zero_()
        # It waits for the first deadline or the usual one.
        assert ep.exchange.deadlines.wait_s() == wait_s
        began = time.monotonic()
        with pytest.raises(epmoe.EPTimeoutError):
            ep.dispatch_recv(sent) if stage == "dispatch" else ep.combine_recv(d)
        assert wait_s <= time.monotonic() - began < SOON_S


@pytest.mark.parametrize(
    "experts, kib, fits",
    [(256, 227, True), (3584, 163, True), (256, 99, True), (3584, 99, False), (8, 64, False)],
)
def test_a_block_needs_shared_memory(monkeypatch, experts, kib, fits):
    properties = SimpleNamespace(shared_memory_per_block_optin=kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    config = alone(experts, hidden=256, dtype="bfloat16", topology={"ep_size": 8})
    said = rf"a block at most {kib} KiB .* {experts} physical experts over 8 ranks"
    with nullcontext() if fits else pytest.raises(ValueError, match=said):
        Gpu(torch.device("cuda", 0)).check(config)


@dataclass(frozen=True)
class OnGpus(Peers):
    """Rank r is on GPU r."""

    def all_gather(self, value):
        return list(range(self.size))


def test_gpus_without_peer_access_are_named(monkeypatch):
    """GPU 0 reaches GPU 1, but not 2; GPU 3 is hidden from this process, so that only the driver
    knows.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 2)
    peers = OnGpus(None, 0, 4, [0, 1, 2, 3])
    with pytest.raises(
        RuntimeError, match=r"the GPU of rank 0 has no peer access to that of rank\(s\) \[2\]"
    ):
        _check_peer_access(peers, torch.device("cuda", 0))
    _check_peer_access(OnGpus(None, 0, 2, [0, 1]), torch.device("cuda", 0))


def test_fp8_travels_in_whole_blocks():
    with epmoe.ExpertParallel(alone(4, hidden=256, exchange={"combine_payload": "fp8"})) as ep:
        ids = torch.zeros(2, 1, dtype=torch.int32)
        weights = torch.ones(2, 1)
        with pytest.raises(
            ValueError, match=r"`x` must be .*whole blocks of 128, got float32 \[2, 192\]"
        ):
            ep.dispatch(torch.randn(2, 192), ids, weights)
        d = ep.dispatch(x := torch.randn(2, 128), ids, weights)
        assert torch.allclose(ep.combine(d.rows, d), x, rtol=0.1, atol=0.1)


def test_too_few_files(monkeypatch):
    def memfd_create(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    with pytest.raises(
        RuntimeError, match=r"may not open more files \(its limit is \d+\).*ulimit -n"
    ):
        epmoe.ExpertParallel(alone())


def inputs(T: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return randn(T, D), distinct_ids(T, E, K), torch.full((T, K), 1 / K)


def assert_works(ep: epmoe.ExpertParallel) -> None:
    """Nothing was sent: the next round is complete."""
    x, ids, weights = inputs()
    d = ep.dispatch(x, ids, weights)
    torch.testing.assert_close(ep.combine(d.rows, d), x)


@pytest.mark.parametrize("as_path", [False, True])
def test_a_path_for_a_config(tmp_path, as_path):
    path = tmp_path / "one.json"
    path.write_text(CONFIG.model_dump_json(exclude_none=True))
    with epmoe.ExpertParallel(path if as_path else str(path)) as ep:
        assert ep.config == CONFIG
        assert_works(ep)
    with pytest.raises(epmoe.ConfigError, match="missing.yaml: no such configuration file"):
        epmoe.ExpertParallel(
            tmp_path / "missing.yaml" if as_path else str(tmp_path / "missing.yaml")
        )


@pytest.mark.parametrize("launched", ["1", "2"])
def test_a_group_of_one_under_a_launcher_of_several(launched, monkeypatch, recwarn):
    """torchrun without init_process_group."""
    monkeypatch.setenv("WORLD_SIZE", launched)
    epmoe.ExpertParallel(CONFIG).close()
    assert ["no experts are spread" in str(each.message) for each in recwarn] == [True] * (
        launched == "2"
    )


def test_repr_of_results_says_shapes():
    """Values would have to be fetched from the device."""
    x, ids, weights = inputs()
    assert repr(epmoe.Routing(ids, weights)) == "Routing(ids int32 [5, 3], weights float32 [5, 3])"
    assert (
        repr(epmoe.quantize_fp8(x)) == "Quantized(q float8_e4m3fn [5, 64], scales float32 [5, 1])"
    )
    tables = (
        "expert_offsets int32 [13], tokens_per_expert int32 [12], row_of_pair int32 [5, 3], counts "
        "None"
    )
    permuted = epmoe.permute(x, ids, torch.arange(E, dtype=torch.int32), E)
    assert repr(permuted) == f"Permuted(rows float32 [15, 64], {tables})"


def test_repr_of_an_expert_parallel_and_its_handles(ep):
    """Each says the state of its round, and shapes: values would have to be fetched from the
    device.
    """
    of_ep = "rank 0 of 1, E=12 K=3 D=64 float32, M=16, cpu"
    of_round = "T=5, D=64 float32, layout='expert'"
    assert repr(ep) == f"ExpertParallel({of_ep}, round 0 closed)"
    # In each state of a round,
    sent = ep.dispatch_send(*inputs())
    assert repr(sent) == f"Sent(rank 0, round 1 awaits dispatch_recv, {of_round})"
    d = ep.dispatch_recv(sent)
    state = "round 1 awaits combine or combine_partial or combine_send"
    assert repr(ep) == f"ExpertParallel({of_ep}, {state})"
    rows = (
        "rows float32 [48, 64], scales None, expert_offsets int32 [13], tokens_per_expert int32 "
        "[12]"
    )
    assert repr(d) == f"Dispatched(rank 0, {state}, {of_round}, {rows})"
    assert repr(d.recv) == "Received(counts int32 [1])"
    ep.combine(d.rows, d)
    # of another layout,
    later = ep.dispatch(*inputs(), layout="rank")
    assert repr(d).startswith("Dispatched(rank 0, round 1 closed, T=5,")
    slabs = (
        "counts int32 [1], x float32 [1, 16, 64], scales None, ids int32 [1, 16, 3], weights "
        "float32 [1, 16, 3]"
    )
    assert repr(later).endswith(f"layout='rank', recv Received({slabs}))")
    # and behind `close`.
    ep.close()
    assert repr(ep) == f"ExpertParallel({of_ep}, closed)"
    assert repr(later).startswith("Dispatched(rank 0, round 2 released, T=5,")


def test_what_holds_windows_cannot_be_pickled_or_copied(ep):
    sent = ep.dispatch_send(*inputs())
    d = ep.dispatch_recv(sent)
    save = partial(torch.save, f=io.BytesIO())
    for value, copies in product(
        (ep, sent, d, d.recv), (pickle.dumps, copy.deepcopy, copy.copy, save)
    ):
        want = (
            f"{type(value).__name__} cannot be pickled or copied: it holds windows of this "
            "process; each process"
        )
        with pytest.raises(TypeError, match=want):
            copies(value)
    ep.combine(d.rows, d)
    assert_works(ep)


def test_a_refused_transform_of_torch_func_leaves_nothing_behind(ep):
    """Also before the first round, whose views later rounds take."""
    layer = full_layer(ep)[0]
    x = inputs()[0]

    def dispatch(x: torch.Tensor) -> torch.Tensor:
        return ep.dispatch(x, *inputs(1)[1:]).rows

    # In both grad modes each transform raises.
    refused = (
        lambda: torch.func.vmap(dispatch)(x[:, None]),
        lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        lambda: torch.func.vmap(layer)(x[:, None]),
        lambda: torch.func.jvp(layer, (x,), (x,)),
    )
    for call in refused:
        for grad_mode in (True, False):
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(grad_mode),
                pytest.raises(RuntimeError),
            ):
                call()
    # Rounds and layers are as before.
    assert_works(ep)
    with torch.inference_mode(False), torch.enable_grad():
        layer(x.clone()).sum().backward()
