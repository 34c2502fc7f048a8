"""Send and receive phases: two micro-batches at once, and the order of calls. Their bits:
test_exchange.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from exchanges import (
    Tokens,
    assert_y,
    given,
    make_tokens,
    run_experts,
    run_fused_experts,
    run_round,
)
from helpers import ON_GPUS, captured

import epmoe
from epmoe import Dispatched, ExpertParallel
from epmoe.exchange.round_state import CLOSED, DISPATCHED, PERMITTED, RETURNING, SENT

PLACEMENT = {"strategy": "round_robin", "num_redundant_experts": 3}


def outputs(ep: ExpertParallel, d: Dispatched) -> torch.Tensor:
    return run_fused_experts(ep, d) if d.layout == "rank" else run_experts(ep, d)


def test_sending_waits_for_no_rank(make_ep, rank, size):
    """All other ranks send and reach a barrier before rank 0 sends."""
    ep = make_ep(timeout_s=10)
    tokens = make_tokens(ep.config, rank, 7)
    for _ in range(3):
        # All but rank 0 send, and then rank 0.
        sent = ep.dispatch_send(*given(ep, tokens)) if rank else None
        dist.barrier()
        d = ep.dispatch_recv(sent or ep.dispatch_send(*given(ep, tokens)))
        rows = run_experts(ep, d)
        # The same on the way back.
        if rank:
            ep.combine_send(rows, d)
        dist.barrier()
        if not rank:
            ep.combine_send(rows, d)
        assert_y(ep.combine_recv(d), ep.config, tokens)


def overlapped(pair: list[tuple[ExpertParallel, list[torch.Tensor]]]) -> list[torch.Tensor]:
    """One round of each of two micro-batches: while rows of one are under way, those of the other
    are computed.
    """
    sent = [ep.dispatch_send(*inputs) for ep, inputs in pair]
    open_rounds = []
    for (ep, _), waiting in zip(pair, sent, strict=True):
        d = ep.dispatch_recv(waiting)
        ep.combine_send(d.rows, d)
        open_rounds.append(d)
    return [ep.combine_recv(d) for (ep, _), d in zip(pair, open_rounds, strict=True)]


def identity_y(config: epmoe.EPConfig, tokens: Tokens) -> torch.Tensor:
    """y of experts that return their input: each token times the sum of its live weights."""
    _, weights = tokens.live(config.model.num_experts)
    y = torch.zeros_like(tokens.x, dtype=torch.float64)
    y[: tokens.real] = tokens.x[: tokens.real].double() * weights.double().sum(1, keepdim=True)
    return y


def test_two_micro_batches_overlap(make_ep, rank, size):
    """Two models play round after round without a barrier, with any number of tokens. On one node
    ranks take the batches in different orders.
    """
    eps = [
        make_ep(top_k=6, hidden=256, max_tokens=24, placement=PLACEMENT),
        make_ep(top_k=2, hidden=64, max_tokens=24),
    ]
    for n in range(50):
        # Each rank has other numbers of tokens, of 0 to 24.
        batches = [
            make_tokens(ep.config, rank, (7 * n * (rank + 1) + i) % 25, seed=2 * n + i, kind="zipf")
            for i, ep in enumerate(eps)
        ]
        # Two nodes need one order on all ranks.
        turn = n if eps[0].config.topology.num_nodes > 1 else n + rank
        order = [0, 1] if turn % 2 else [1, 0]
        ys = overlapped([(eps[i], given(eps[i], batches[i])) for i in order])
        for i, y in zip(order, ys, strict=True):
            torch.testing.assert_close(
                y.double().cpu(), identity_y(eps[i].config, batches[i]), rtol=1e-5, atol=1e-5
            )


@ON_GPUS
@pytest.mark.parametrize("T", [4, 200, 300])
def test_two_micro_batches_overlap_in_a_graph(make_ep, rank, size, device, T):
    """The graph is captured once and replayed on other inputs."""
    eps = [make_ep(ll_max_tokens=256, top_k=6, hidden=256, max_tokens=300) for _ in range(2)]
    inputs = [given(ep, make_tokens(ep.config, rank, T)) for ep in eps]
    pair = list(zip(eps, inputs, strict=True))
    replay, ys = captured(lambda: overlapped(pair))
    # Other tokens in the same buffers.
    for n in range(20):
        batches = [make_tokens(ep.config, rank, T, seed=2 * n + i) for i, ep in enumerate(eps)]
        for ep, static, tokens in zip(eps, inputs, batches, strict=True):
            for buffer, values in zip(static, given(ep, tokens), strict=True):
                buffer.copy_(values)
        # The graph has their sums.
        replay()
        for ep, y, tokens in zip(eps, ys, batches, strict=True):
            torch.testing.assert_close(
                y.double().cpu(), identity_y(ep.config, tokens), rtol=1e-5, atol=1e-5
            )
    for ep in eps:
        ep.check()


@ON_GPUS
@pytest.mark.parametrize(
    ("larger", "smaller", "hidden"), [(600, 100, 256), (1400, 50, 256), (300, 20, 7168)]
)
def test_two_micro_batches_on_two_streams(make_ep, rank, size, device, larger, smaller, hidden):
    """Batches of different sizes: the kernel that one rank waits for must start while another
    kernel waits there.
    """
    eps = [make_ep(top_k=6, hidden=hidden, max_tokens=larger) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in eps]
    order = [0, 1] if rank % 2 else [1, 0]  # each rank starts its larger batch first
    for n in range(10):
        counts = {order[0]: larger, order[1]: smaller}
        batches = [make_tokens(ep.config, rank, counts[i], seed=n) for i, ep in enumerate(eps)]
        inputs = [given(ep, tokens) for ep, tokens in zip(eps, batches, strict=True)]
        torch.cuda.synchronize()
        ys = {}
        # At first in the same order: an allocation of torch may wait for all kernels.
        for i in order if n else [0, 1]:
            with torch.cuda.stream(streams[i]):
                ys[i] = overlapped([(eps[i], inputs[i])])[0]
        torch.cuda.synchronize()
        for i, ep in enumerate(eps):
            torch.testing.assert_close(
                ys[i].double().cpu(), identity_y(ep.config, batches[i]), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("state", [SENT, DISPATCHED, RETURNING, CLOSED])
def test_each_state_permits_its_calls_only(make_ep, rank, size, state):
    """Every other call is refused, nothing is sent, and the round goes on."""
    ep = make_ep()
    other = make_ep()
    tokens = make_tokens(ep.config, rank, 7)
    inputs = given(ep, tokens)
    rows = torch.zeros(1, 64, device=ep.device)
    # Bring the round into this state.
    sent = handle = ep.dispatch_send(*inputs)
    d = ep.dispatch_recv(sent) if state != SENT else None
    if d is not None:
        handle = d
        outputs = run_experts(ep, d)
    if state in (RETURNING, CLOSED):
        ep.combine_send(outputs, d)
    if state == CLOSED:
        assert_y(ep.combine_recv(d), ep.config, tokens)

    # All calls of the other states.
    arguments = {CLOSED: inputs, SENT: [handle], DISPATCHED: [rows, handle], RETURNING: [handle]}
    for at, call in (
        (at, call) for at, calls in enumerate(PERMITTED) for call in calls if at != state
    ):
        why = f"round 1 awaits {'.*'.join(PERMITTED[state])}, got {call}"
        if state == CLOSED:
            why = f"round 1 is closed: dispatch{'_send' * (call == 'dispatch_recv')} comes before"
        elif at == CLOSED:
            why = "round 1 is still open"
        with pytest.raises(epmoe.EPStateError, match=why) as caught:
            getattr(ep, call)(*arguments[at])
        assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, ValueError)

    # Behind a closed round: handles of that round, and of another exchange.
    if state != CLOSED:
        return ep.abort(handle)
    second = ep.dispatch_send(*inputs)
    elsewhere = other.dispatch_send(*inputs)
    with pytest.raises(
        ValueError, match="`sent` must be the handle of the open round 2, got another's, of round 1"
    ):
        ep.dispatch_recv(sent)
    with pytest.raises(ValueError, match="`sent` belongs to another ExpertParallel"):
        ep.dispatch_recv(elsewhere)
    ep.abort(second)
    other.abort(elsewhere)
    return None


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("phases", [False, True])
def test_y_is_the_tensor_that_the_caller_gives(make_ep, rank, layout, phases):
    ep = make_ep(hidden=64, dtype="bfloat16", max_tokens=16)
    mine = make_tokens(ep.config, rank, 16 - rank)
    want = run_round(ep, mine, layout)
    d = ep.dispatch(*given(ep, mine), layout=layout)
    rows = outputs(ep, d)
    combine = ep.combine if layout == "expert" else ep.combine_partial
    call = ep.combine_send if phases else combine
    y = torch.full_like(want, torch.nan)
    # Tensors that cannot be y.
    for wrong, error in (
        (y.float(), TypeError),
        (y[1:], ValueError),
        (y.T.contiguous().T, ValueError),
        (torch.empty(y.numel() + 1, dtype=y.dtype, device=y.device)[1:].view_as(y), ValueError),
    ):
        with pytest.raises(error, match="`out` must be"):
            call(rows, d, out=wrong)
    # The right one is written, and returned.
    call(rows, d, out=y)
    if phases:
        assert ep.combine_recv(d) is y
    assert torch.equal(y, want)
