"""The native operators in torch: schemas, fakes and opcheck; under torch.compile:
tests/test_compile.py.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from helpers import FLOATS, alone, distinct_ids, randn

import epmoe
from epmoe.native import ops

T = 9
E = 12
K = 4
D = 16


@pytest.mark.parametrize("all_options", [False, True])
def test_opcheck_route(device, all_options):
    # With all options, or with none of those that may be left out.
    bias = randn(E, seed=1).to(device) if all_options else None
    num_tokens = torch.tensor(5, dtype=torch.int32, device=device) if all_options else None
    counters = torch.zeros(8, dtype=torch.int64, device=device) if all_options else None
    logits = randn(T, E).to(device)
    args = (
        logits,
        K,
        bias,
        num_tokens,
        T,
        all_options,
        all_options,
        0.1,
        3,
        2,
        2,
        2.5,
        all_options,
        counters,
    )
    torch.library.opcheck(ops.route, args)


@pytest.mark.parametrize("counts", [None, [2, 3, 0]])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_opcheck_permute_and_finalize(device, id_dtype, dtype, counts):
    counts = None if counts is None else torch.tensor(counts, dtype=torch.int32, device=device)
    ids = distinct_ids(T, E, K).to(device, id_dtype)
    identity_map = torch.arange(E, dtype=torch.int32, device=device)
    x = randn(T, D, dtype=dtype).to(device)
    # opcheck compares all rows, and rows past the last segment are not written: allocate none.
    rows = T * K if counts is None else int(counts.sum()) * K
    args = (x, ids, identity_map, E, counts, 1, rows, None)
    torch.library.opcheck(ops.permute, args)
    rows, _, _, row_of_pair = ops.permute(*args)
    if counts is None:  # slots past the counts are not written either
        torch.library.opcheck(ops.finalize, (rows, row_of_pair, randn(T, K).to(device), None))


@pytest.mark.parametrize("real", [None, 5])
def test_opcheck_quantize_and_zero_padding(device, real):
    num_tokens = None if real is None else torch.tensor(real, dtype=torch.int32, device=device)
    x = randn(T, D).to(device)
    torch.library.opcheck(ops.zero_padding_rows_, (x, num_tokens, 6))
    for block in (128, 0):
        torch.library.opcheck(ops.quantize_fp8, (x, num_tokens, 6, block))


@pytest.mark.parametrize("phase", ["", "_send", "_recv"])
def test_opcheck_exchange(phase):
    """The round is open and its send phase is over, because opcheck runs an op twice, on copies of
    its arguments.
    """
    checks = ("test_schema", "test_autograd_registration")
    with epmoe.ExpertParallel(alone(E, K, D, max_tokens=T)) as ep:
        sent = ep.dispatch_send(x := randn(T, D), distinct_ids(T, E, K), torch.full((T, K), 0.25))
        memory = (*ep.exchange.memory, sent.descriptor)
        arguments = (*sent.operands, *memory)
        torch.library.opcheck(getattr(ops, f"dispatch{phase}"), arguments, test_utils=checks)
        d = ep.dispatch_recv(sent)
        ep.combine_send(d.rows, d)
        arguments = (torch.empty(T, D), d.rows, *memory)
        torch.library.opcheck(getattr(ops, f"combine{phase}"), arguments, test_utils=checks)
        assert torch.equal(ep.combine_recv(d), x)


def test_what_a_signal_handler_raises_in_the_first_load_leaves_it(monkeypatch):
    """torch turns it into an OSError."""

    def interrupted(*_: object) -> None:
        raise LookupError("what a handler raises")

    monkeypatch.setattr(ctypes, "CDLL", interrupted)
    with pytest.raises(LookupError):
        ops._load.__wrapped__()
