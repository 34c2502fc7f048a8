"""Exceptions in the middle of a round: the rank keeps its error, and no rank waits long.

Deadlines are 300 s here, so that a test which passes has not run into one. See also test_aborts.py and test_signals.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from exchanges import Tokens, assert_y, first_round, given, make_tokens, run_experts, run_round
from helpers import ON_GPUS, full_layer
from test_layers import D, E, K

from epmoe import EPTimeoutError, ExpertParallel
from epmoe.native import ops

pytestmark = pytest.mark.usefixtures("serving")

LONG_S = 300.0
AT_ONCE_S = 5.0  # a fraction of a second, where this machine has a core for each rank


def without_rank(ep: ExpertParallel, tokens: Tokens, rank: int, sent: bool = False) -> Tokens:
    """`tokens` without their pairs on the experts of `rank`, or of its node, if that is the way there and back.

    With `sent`, it gave the round up only after it had sent its sums to the ranks of its own node.
    """
    owner, G = torch.tensor(ep.placement.owners)[tokens.ids.long()], ep.config.topology.ranks_here
    by_it = rank % G == ep.rank % G and rank != ep.rank
    gone = owner // G == rank // G if by_it else (owner == rank) & (not sent)
    return Tokens(tokens.x, tokens.ids, tokens.weights.masked_fill(gone, 0.0), tokens.real)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


class Fragile(torch.nn.Module):
    """Experts that raise `error` when it is set."""

    def __init__(self, experts: Callable) -> None:
        super().__init__()
        self.inner, self.error = experts, None

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self.inner(*inputs)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, torch.cuda.OutOfMemoryError])
@pytest.mark.parametrize("everywhere", [False, True])
def test_experts_that_raise(make_ep, rank, size, kind, everywhere):
    """The caller gets the experts' error unchanged. The other ranks finish the round, and the next rounds are whole."""
    error = kind("no luck")  # of this test: its traceback holds the windows
    ep = make_ep(experts=E, top_k=K, hidden=D, timeout_s=LONG_S)
    layer, _ = full_layer(ep)
    layer.experts = fragile = Fragile(layer.experts)
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(rank)).to(ep.device)
    whole = layer(x)
    for _ in range(3):
        fragile.error = error if everywhere or rank == 0 else None
        with within(20.0):
            if fragile.error:
                with pytest.raises(kind) as caught:
                    layer(x)
                assert caught.value is error
            else:
                assert layer(x).isfinite().all()
            fragile.error = None
            assert torch.equal(layer(x), whole)
    ep.check()


@pytest.mark.parametrize("in_a_round", [False, True])
def test_leaving_by_an_exception_releases_the_others(ep, rank, size, in_a_round):
    """Their waits, of up to 300 s, end at once and name rank 0. More of it: tests/test_failure.py."""
    tokens = first_round(ep, 9)
    if rank == 0:
        with within(AT_ONCE_S), pytest.raises(LookupError), ep:
            if in_a_round:
                ep.dispatch(*given(ep, tokens))
            raise LookupError
    else:
        with within(AT_ONCE_S), pytest.raises(EPTimeoutError, match="left the group") as caught:
            d = ep.dispatch(*given(ep, tokens))
            ep.combine(run_experts(ep, d), d)
            ep.check()
        assert caught.value.missing_ranks == [0]
    dist.barrier()


@ON_GPUS
def test_leaving_ends_this_ranks_own_kernels(ep, rank, size, device):
    """They wait for ranks that do not come, for up to 300 s, and freeing the window would wait for them."""
    tokens = first_round(ep, 9)
    if rank == 0:
        with within(AT_ONCE_S):
            with pytest.raises(LookupError), ep:
                ep.dispatch(*given(ep, tokens))
                raise LookupError
            torch.cuda.synchronize()
    dist.barrier()


def out_of_memory(*args: object, **options: object) -> None:
    raise torch.cuda.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("call", ["dispatch", "dispatch_send"])
def test_a_refused_call_may_be_repeated(ep, rank, size, call, monkeypatch):
    """One rank's call is refused for its arguments, then by the operator itself. No round is open, and none is lost."""
    tokens = make_tokens(ep.config, rank, 9)
    inputs = given(ep, tokens)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    if rank == size - 1:
        with pytest.raises(TypeError, match="`x` must be"):
            getattr(ep, call)(inputs[0].double(), *inputs[1:])
        with monkeypatch.context() as patch:
            patch.setattr(ops, call, out_of_memory)
            with pytest.raises(torch.cuda.OutOfMemoryError):
                getattr(ep, call)(*inputs)
        ep.abort()  # there is nothing to abort
    d = getattr(ep, call)(*inputs)
    assert d.epoch == 2
    d = d if call == "dispatch" else ep.dispatch_recv(d)
    assert_y(ep.combine(run_experts(ep, d), d), ep.config, tokens)
    ep.check()
