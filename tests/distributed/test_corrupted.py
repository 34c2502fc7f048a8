"""A peer gone mad: it writes any bits into the window of this rank. Errors and wrong rows may
follow, but no crash.
"""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_round, assert_y, first_round, make_tokens, node_of, run_round
from helpers import ON_GPUS, ON_THE_CPU
from waits import LONG_S, SHORT_S

import epmoe

# Buffers of the window on GPUs.
PARTS = {
    "rows": ("recv.x", "rows", "combine.rows"),
    "counts": ("recv.counts",),
    "pairs": ("recv.ids", "recv.ordinals", "recv.weights", "ll.pairs"),
    "flags": ("recv.flags", "combine.flags", "signal.combine"),
    "lines": ("ll.rows", "ll.sums"),
    "errors": ("signal.error", "signal.dead"),
}
DEADLINE_S = 0.5
SIGNALS = ("signal.dispatch", "signal.combine", "signal.error", "signal.dead")


@ON_THE_CPU
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("payload_only", [True, False])
def test_a_window_of_random_bits(make_ep, rank, size, device, payload_only, seed):
    """Every index, count and epoch of the last rank's window is random. The process lives, and a
    new group works.
    """
    ep = make_ep(timeout_s=LONG_S if payload_only else 0.3, max_tokens=40)
    tokens = make_tokens(ep.config, rank, 40, seed=seed)
    assert_round(ep, tokens)
    dist.barrier()
    # The last rank writes random bits over its buffers.
    if rank == size - 1:
        bits = torch.Generator().manual_seed(seed)
        for name, buffer in ep.exchange.views.items():
            region = next(b.region for b in ep.memory_plan().buffers if b.name == name)
            if region == "window" and name != "doorbell" and not (payload_only and name in SIGNALS):
                words = buffer.flatten().view(torch.uint8)
                words.copy_(torch.randint(0, 256, words.shape, generator=bits, dtype=torch.uint8))
    dist.barrier()
    # Rounds are right where each writes anew what it reads, or fail.
    for layout in ("expert", "rank"):
        if payload_only:  # every round writes anew what it reads
            assert_round(ep, tokens, layout)
        else:
            with suppress(epmoe.EPError, RuntimeError):
                run_round(ep, tokens, layout=layout)
    # A new group works.
    ep.close()
    dist.barrier()
    again = make_ep(max_tokens=40)
    assert_round(again, tokens)


@ON_THE_CPU
def test_an_error_word_that_names_no_rank(make_ep, rank, size, device):
    """Bits past the last rank mean nothing: the wait goes on to its deadline, and names the rank
    that is missing.
    """
    ep = make_ep(timeout_s=SHORT_S)
    tokens = first_round(ep, 6)
    dist.barrier()
    waited_s = torch.zeros(1, dtype=torch.float64)
    if rank != 0:
        ep.exchange.views["signal.error"][0] = -(2**63) + 2**40
        begin = time.monotonic()
        with pytest.raises(epmoe.EPTimeoutError, match=r"rank\(s\) \[0\]"):
            run_round(ep, tokens)
        waited_s[0] = time.monotonic() - begin
    dist.all_reduce(waited_s, dist.ReduceOp.MAX)
    assert size == 1 or waited_s >= SHORT_S  # the first to wait; the others hear of it


@ON_THE_CPU
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("count", [-(2**31), 17, 2**31 - 1])
def test_a_count_that_no_slab_has(make_ep, rank, size, device, count, layout):
    """The last rank finds it in the headers of all others, and takes no more slots
    than a slab has.
    """
    ep = make_ep(max_tokens=16)
    tokens = first_round(ep, 16)
    dist.barrier()
    if rank == size - 1:
        others = ep.exchange.views["signal.dispatch"].view(torch.int32)[: size - 1]
        others[:, 0], others[:, 5] = 2, count  # `epoch` and `counts` of RoundHeader in csrc/plan.h
        d = ep.dispatch(tokens.x, tokens.ids, tokens.weights, layout=layout)
        assert d.recv.counts[: size - 1].eq(16 if count > 0 else 0).all()
    dist.barrier()


def scribble(ep: epmoe.ExpertParallel, victim: int, names: tuple[str, ...], seed: int) -> None:
    """Random bits into these buffers of the victim's window, from this rank."""
    bits = torch.Generator().manual_seed(seed)
    for buffer in (ep.memory_plan()[name] for name in names):
        scrawl = torch.randint(
            0, 256, (buffer.nbytes,), generator=bits, dtype=torch.uint8
        ).pin_memory()
        node_of(ep).window.put(victim, buffer.offset, scrawl)


@ON_GPUS
@pytest.mark.parametrize("ll_max_tokens", [256, 4])
@pytest.mark.parametrize("within_rounds", [False, True])
@pytest.mark.parametrize("part", [*PARTS, "all"])
def test_a_window_of_random_bits_on_a_gpu(
    make_ep, rank, size, device, part, within_rounds, ll_max_tokens
):
    """Rank 0 writes into the window of the last rank: no bit becomes an address, and every wait
    ends.

    What every round writes anew does no harm between two rounds. Everything else ends at the latest
    with new windows.
    """
    names = PARTS[part] if part in PARTS else sum(PARTS.values(), ())
    # Rounds that are right.
    ep = make_ep(ll_max_tokens, max_tokens=40, experts=5 * size, timeout_s=DEADLINE_S)
    tokens = make_tokens(ep.config, rank, 40)
    for layout in ("expert", "rank"):
        assert_round(ep, tokens, layout)
    ep.check()
    dist.barrier()

    # Bits between two rounds, or on another stream within them.
    if rank == 0 and not within_rounds:
        scribble(ep, size - 1, names, seed=99)
        torch.cuda.synchronize()
    dist.barrier()
    # Six rounds: each is right, or raises, and none waits for longer than its deadline.
    stream = torch.cuda.Stream()
    for n in range(6):
        begin = time.monotonic()
        if rank == 0 and within_rounds:
            with torch.cuda.stream(stream):
                scribble(ep, size - 1, names, seed=n)
        try:
            y = run_round(ep, tokens, layout=("expert", "rank")[n % 2])
            ep.check()
            if part == "rows" and not within_rounds:
                assert_y(y, ep.config, tokens)
        except (epmoe.EPError, IndexError):  # the experts of these tests look ids up on the host
            assert part != "rows"
            with suppress(epmoe.EPError):
                ep.abort()
        assert time.monotonic() - begin < DEADLINE_S + 2

    # The GPU still computes, and new windows are good.
    torch.cuda.synchronize()
    eye = torch.eye(64, device=device)
    assert torch.equal(eye @ eye, eye)
    dist.barrier()
    ep.close()
    dist.barrier()
    again = make_ep(ll_max_tokens, max_tokens=40, experts=5 * size)
    assert_round(again, tokens)
