"""A router's logits and the gradients of tokens, in one order of sums: the same bits in any batch,
with NaN beside.
"""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, poison_, randn

from epmoe.local.logits import router_logits

E, D = 70, 520  # no multiples of a tile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("E, D", [(E, D), (8, 2048), (128, 96)])
def test_a_token_has_the_same_bits_in_any_batch(device, dtype, E, D):
    """On GPUs T goes through tiles of 8 and of 64 rows, and through blocks that have a part of a
    sum or all of it.
    """
    most = 20_000 if device.type == "cuda" else 100
    x_TD = randn(most, D, seed=1, dtype=dtype).to(device)
    weight_ED = randn(E, D, seed=2, dtype=dtype).to(device) / D**0.5
    bias_E = randn(E, seed=3, dtype=dtype).to(device)
    grad_TE = randn(most, E, seed=4, dtype=dtype).to(device)

    def passed(first: int, T: int) -> tuple[torch.Tensor, torch.Tensor]:
        part_TD = x_TD[first : first + T].clone().requires_grad_()
        found_TE = router_logits(part_TD, weight_ED, bias_E, invariant=True)
        found_TE.backward(grad_TE[first : first + T])
        return found_TE.detach(), part_TD.grad

    # The whole batch agrees with fp64.
    logits_TE, grad_TD = passed(0, most)
    assert_close(logits_TE, x_TD.double() @ weight_ED.double().T + bias_E.double(), dtype, slack=8)
    assert_close(grad_TD, grad_TE.double() @ weight_ED.double(), dtype, slack=8)
    # A part of it has the bits of the whole.
    for first, T in (
        (0, 1),
        (3, 17),
        (7, 8),
        (1, 16),
        (20, 65),
        (most - 99, 99),
        (most // 2, most // 3),
    ):
        for got, want in zip(passed(first, T), (logits_TE, grad_TD), strict=True):
            assert torch.equal(got, want[first : first + T]), (first, T)
    # So have tokens behind others that are NaN, and there may be no tokens.
    beside = torch.cat([poison_(torch.empty_like(x_TD[:5])), x_TD[:30]])
    assert torch.equal(router_logits(beside, weight_ED, bias_E, invariant=True)[5:], logits_TE[:30])
    assert router_logits(x_TD[:0], weight_ED, bias_E, invariant=True).shape == (0, E)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [2048, 7168, 2050])
@pytest.mark.parametrize("E", [128, 256, 60])
def test_all_ways_have_the_same_bits(device, dtype, E, D):
    """On GPUs T chooses tiles and parts in memory or in a block, and only rows aligned to 16 bytes
    are loaded ahead.
    """
    tokens = (1, 16, 17, 64, 65, 700, 4096) if device.type == "cuda" else (1, 17, 40)
    x_TD = randn(max(tokens), D, seed=1, dtype=dtype).to(device)
    weight_ED = randn(E, D, seed=2, dtype=dtype).to(device) / D**0.5
    logits_TE = router_logits(x_TD, weight_ED, None, invariant=True)
    assert_close(logits_TE, x_TD.double() @ weight_ED.double().T, dtype, slack=8)
    beside = torch.tensor([3, 18, 35], device=device)
    finite = torch.ones(len(x_TD), dtype=torch.bool, device=device).index_fill(0, beside, False)
    x_TD[beside] = torch.tensor([[torch.inf], [torch.nan], [torch.inf]], dtype=dtype, device=device)
    for T in tokens:
        for shift in (0, 1):
            part_TD = (
                torch.empty(T * D + shift, dtype=dtype, device=device)[shift:]
                .view(T, D)
                .copy_(x_TD[:T])
            )
            # The output and its parts get this memory next.
            poison_(torch.empty(T, E, dtype=dtype, device=device))
            poison_(torch.empty(16, T, E, device=device))
            got = router_logits(part_TD, weight_ED, None, invariant=True)
            assert torch.equal(got[finite[:T]], logits_TE[:T][finite[:T]]), (T, shift)
            assert not got[~finite[:T]].isfinite().any(), (T, shift)
