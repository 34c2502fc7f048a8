"""Another kernel holds most multiprocessors of the GPU, or all of them, for longer than the
deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from busy import Crowd, Holder
from exchanges import (
    assert_round,
    assert_y,
    first_round,
    given,
    make_tokens,
    run_experts,
    run_fused_experts,
    run_round,
)
from helpers import ON_GPUS, RANKS_SHARE_GPUS, poison_
from torch import Tensor

import epmoe
from epmoe import ExpertParallel
from epmoe.training import TrainingExchange

pytestmark = [ON_GPUS, pytest.mark.skipif(RANKS_SHARE_GPUS, reason="needs a GPU for each rank")]

DEADLINE_S = 1.0
SHORT_S = 0.5
"""A deadline of rounds while a `Crowd` runs."""
TOLD_S = SHORT_S + 2.0


@pytest.fixture
def hold() -> Holder:
    return Holder()


@pytest.fixture
def crowd(request) -> Iterator[Callable[[int], torch.cuda.Event]]:
    """crowd(blocks) of 32 registers a thread, or of the parameter's: on a GPU of 132
    multiprocessors, otherwise as many for each. It ends with the test.
    """
    crowd = Crowd(getattr(request, "param", 32))
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    yield lambda blocks, **options: crowd(blocks * multiprocessors // 132, 20.0, **options)
    crowd.stop()


def player(ep: ExpertParallel, T: int, rank: int, layout: str) -> Callable[[], None]:
    """Plays a round in which the host waits for nothing."""
    tokens = make_tokens(ep.config, rank, T)
    x, ids, weights = given(ep, tokens)

    def play() -> None:
        d = ep.dispatch(x, ids, weights, layout=layout)
        if layout == "expert":
            ep.combine(d.rows, d)
        else:
            ep.combine_partial(d.recv.x, d)

    return play


def told(ep: ExpertParallel, play: Callable[[], object]) -> str:
    """Plays on and polls. The error, which must come in time."""
    begin = time.monotonic()
    with pytest.raises(epmoe.EPTimeoutError) as caught:
        while time.monotonic() - begin < TOLD_S:
            play()
            ep.poll()
            time.sleep(0.02)
    assert time.monotonic() - begin < TOLD_S
    return str(caught.value)


@pytest.mark.parametrize("replay", [False, True], ids=["calls", "replays"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("T", [1, 64, 256, 1024, 4096])
@pytest.mark.parametrize("blocks", [66, 132, 200, 262, 264])
def test_told_beside_a_kernel_that_leaves_parts_of_multiprocessors(
    make_ep, rank, size, crowd, blocks, T, layout, replay
):
    """The other ranks stay away. This one hears of it in time, whether its kernel finds a place or
    not.
    """
    if size == 1 and blocks < 264:
        pytest.skip("no other rank stays away, and the kernel finds a place")
    ep = make_ep(max_tokens=T, hidden=2048, dtype="bfloat16", timeout_s=SHORT_S)
    play = player(ep, T, rank, layout)
    play()
    ep.check()
    # A graph of the round.
    if replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            play()
        play = graph.replay
        for _ in range(2):
            play()
            ep.check()
            time.sleep(0.06)  # a look behind the capture
    dist.barrier()
    # Rank 0 plays alone beside the other kernel.
    if rank == 0:
        ended = crowd(blocks)
        time.sleep(0.06)  # its blocks are resident now
        error = told(ep, play)
        assert "own kernel was not scheduled" in error or "timed out waiting for rank(s)" in error
        assert blocks < 264 or "this rank's own kernel was not scheduled" in error
        assert not ended.query()
    dist.barrier()


@pytest.mark.parametrize("crowd", [16], indirect=True)
@pytest.mark.parametrize("T", [1, 64, 256])
def test_dispatch_fits_beside_half_a_multiprocessor(make_ep, rank, size, crowd, T):
    """With 16 registers a thread the other kernel leaves 48 K registers of it: the kernel itself
    tells.
    """
    if size == 1:
        pytest.skip("no other rank stays away")
    ep = make_ep(max_tokens=T, hidden=2048, dtype="bfloat16", timeout_s=SHORT_S)
    play = player(ep, T, rank, "expert")
    play()
    ep.check()
    dist.barrier()
    if rank == 0:
        ended = crowd(262)
        time.sleep(0.06)
        assert "timed out waiting for rank(s)" in told(ep, play)
        assert not ended.query()
    dist.barrier()


def test_told_of_a_kernel_that_comes_between_rounds(make_ep, rank, crowd):
    """The hosts launch rounds without a pause. The other ranks wait, and what they report reaches
    the rank's host.
    """
    ep = make_ep(max_tokens=256, hidden=2048, dtype="bfloat16", timeout_s=SHORT_S)
    play = player(ep, 256, rank, "expert")
    # Rounds run, and more of them are queued,
    for _ in range(40):
        for _ in range(50):
            play()
        ep.check()
    for _ in range(50):
        play()
    # when the other kernel comes on rank 0.
    if rank == 0:
        ended = crowd(264)
    told(ep, play)
    assert rank or not ended.query()
    dist.barrier()


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_own_work_in_front_of_a_round_may_take_longer_than_the_deadline(make_ep, rank, layout):
    ep = make_ep(max_tokens=256, hidden=2048, dtype="bfloat16", timeout_s=SHORT_S)
    tokens = first_round(ep, 256, layout)
    work = Crowd(32)
    play = player(ep, 256, rank, layout)
    for _ in range(3):  # whether a look falls on the first launch or not
        dist.barrier()
        work(264, 3 * SHORT_S, torch.cuda.current_stream())
        begin = time.monotonic()
        while time.monotonic() - begin < 4 * SHORT_S:
            if time.monotonic() - begin < SHORT_S:
                play()
            ep.poll()
            time.sleep(0.02)
        ep.check()
    assert_round(ep, tokens, layout)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("T", [1, 8, 100])
@pytest.mark.parametrize("free", [32, 12, 1])
def test_a_busy_gpu_only_slows_the_round(make_ep, rank, hold, free, T, layout):
    """Rounds end while the other kernel still runs: no block waits for one that cannot start."""
    ep = make_ep(ll_max_tokens=64, max_tokens=128, hidden=1024, timeout_s=DEADLINE_S)
    tokens = first_round(ep, T, layout)
    ended = hold(torch.cuda.get_device_properties().multi_processor_count - free, 2.5)
    for _ in range(3):
        y = run_round(ep, tokens, layout=layout)
    assert not ended.query(), "the other kernel ended first"
    assert_y(y, ep.config, tokens)
    ep.check()
    torch.cuda.synchronize()


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize(
    ("T", "ll_max_tokens"), [(40, 64), (100, 64), (512, 1024), (2000, 64), (4096, 64)]
)
@pytest.mark.parametrize("num_sms", [None, 20, 24])
@pytest.mark.parametrize("free", [60, 12, 1])
def test_every_row_is_written(make_ep, rank, hold, free, num_sms, T, ll_max_tokens, layout):
    """Each variant of the launch policy does so: blocks that find others missing leave, and others
    take their items.
    """
    ep = make_ep(
        ll_max_tokens,
        max_tokens=4096,
        hidden=1024,
        dtype="bfloat16",
        timeout_s=20.0,
        exchange={"num_sms": num_sms},
    )
    tokens = make_tokens(ep.config, rank, T)
    x, ids, weights = given(ep, tokens)
    run = run_experts if layout == "expert" else run_fused_experts
    # What y is on a GPU that is free.
    whole = run_round(ep, tokens, layout=layout)
    assert_y(whole, ep.config, tokens)
    # Then another kernel holds most multiprocessors while combine starts.
    for _ in range(6):
        d = ep.dispatch(x, ids, weights, layout=layout)
        rows = run(ep, d)
        y = poison_(torch.empty_like(x))
        hold(torch.cuda.get_device_properties().multi_processor_count - free, 0.15)
        (ep.combine if layout == "expert" else ep.combine_partial)(rows, d, out=y)
        assert torch.equal(y, whole)
        ep.check()


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize(
    ("T", "ll_max_tokens"), [(8, 64), (100, 64), (512, 1024), (40, 0), (2000, 64), (4096, 64)]
)
def test_a_multiprocessor_has_99_kib(make_ep, rank, T, ll_max_tokens, layout):
    """As those of sm_86, sm_89 and sm_120 have, on which one block of Simple finds room at a time.
    Here another kernel has the rest, and the launch counts on two blocks all the same.
    """
    ep = make_ep(
        ll_max_tokens, max_tokens=4096, hidden=1024, dtype="bfloat16", timeout_s=DEADLINE_S
    )
    tokens = first_round(ep, T, layout)
    properties = torch.cuda.get_device_properties()
    # Three blocks a multiprocessor: one of their sum would have memory divided so that it fits
    # alone.
    others = properties.shared_memory_per_multiprocessor - (99 << 10)
    hold = Holder(others // 3 - (1 << 10))
    ended = hold(3 * properties.multi_processor_count, 1.5)
    for _ in range(3):
        y = run_round(ep, tokens, layout=layout)
    assert not ended.query(), "the other kernel ended first"
    assert_y(y, ep.config, tokens)
    ep.check()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("T", "ll_max_tokens"), [(1, 64), (8, 64), (40, 64), (100, 64), (512, 1024)]
)
@pytest.mark.parametrize(
    ("payload", "weights_on"), [("auto", "rows"), ("fp8", "rows"), ("auto", "combine")]
)
@pytest.mark.parametrize("free", [12, 1])
def test_every_gradient_is_written(
    make_ep, rank, hold, free, payload, weights_on, T, ll_max_tokens
):
    """Training has variants of the kernels. Free memory holds NaN."""
    ep = make_ep(ll_max_tokens, max_tokens=512, hidden=1024, dtype="bfloat16", timeout_s=20.0)
    exchange = TrainingExchange(ep, payload=payload)
    tokens = make_tokens(ep.config, rank, T)
    x, ids, weights = given(ep, tokens)
    N = ep.exchange.plan.sizes["max_rows"]

    def step(weights_on: str = weights_on) -> list[Tensor]:
        x_ = x.clone().requires_grad_()
        weights_ = weights.clone().requires_grad_()
        torch.full((64 << 20,), torch.nan, dtype=torch.bfloat16, device=x.device)
        routed = exchange.dispatch(x_, ids, weights_, weights_on=weights_on, num_rows=N)
        factors = 1 if weights_on == "combine" else routed.row_weights[:, None].to(x.dtype)
        y = exchange.combine(routed.rows * factors, routed)
        y.float().square().sum().backward()
        return [y.detach(), x_.grad, weights_.grad]

    # What a step gives on an idle GPU,
    whole = step()
    assert all(part.isfinite().all() for part in whole)
    for got, want in zip(whole, step("rows"), strict=True):
        assert (got - want).abs().max() <= (0.05 if payload == "auto" else 0) * want.abs().max()
    # and beside a kernel that leaves few multiprocessors.
    for _ in range(3):
        hold(torch.cuda.get_device_properties().multi_processor_count - free, 0.15)
        for got, want in zip(step(), whole, strict=True):
            assert torch.equal(got, want)
    ep.check()


def test_a_dead_peer_is_named_on_a_busy_gpu(make_ep, rank, size, hold):
    """The error comes at the deadline, although blocks of this rank's kernel cannot start."""
    ep = make_ep(max_tokens=128, hidden=1024, timeout_s=DEADLINE_S)
    tokens = first_round(ep, 128)
    if rank != 0:
        x, ids, weights = given(ep, tokens)
        ended = hold(torch.cuda.get_device_properties().multi_processor_count - 4, 4.0)
        begin = time.monotonic()
        ep.dispatch(x, ids, weights)
        with pytest.raises(epmoe.EPTimeoutError, match=r"rank\(s\) \[0\]"):
            ep.check()
        assert time.monotonic() - begin < DEADLINE_S + 1
        assert not ended.query()
        torch.cuda.synchronize()
    dist.barrier()


def test_a_kernel_that_never_starts(make_ep, rank, size, hold):
    """All multiprocessors of rank 0 are held: its own deadline on the host says so, and the others
    name it.
    """
    ep = make_ep(max_tokens=16, timeout_s=DEADLINE_S)
    tokens = first_round(ep, 16)
    if rank == 0:
        hold(torch.cuda.get_device_properties().multi_processor_count, 4.0)
    dist.barrier()
    x, ids, weights = given(ep, tokens)
    d = ep.dispatch(x, ids, weights)
    why = "own kernel was not scheduled" if rank == 0 else r"waiting for rank\(s\) \[0\]"
    begin = time.monotonic()
    with pytest.raises(epmoe.EPTimeoutError, match=why) as caught:
        ep.check(timeout_s=DEADLINE_S + 0.5)
    assert caught.value.missing_ranks == [0]
    assert time.monotonic() - begin < DEADLINE_S + 2
    torch.cuda.synchronize()
    if rank == 0:  # its kernel ran after all: the others have given up
        # where others have told first
        came_too_late = "this rank came too late, or its own kernel was not scheduled"
        with pytest.raises(
            epmoe.EPTimeoutError,
            match=rf"{came_too_late}|: this rank's own kernel was not scheduled",
        ):
            ep.combine(run_experts(ep, d), d)
            ep.check()
    dist.barrier()
