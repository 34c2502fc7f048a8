"""Experts and rows for the tests of GroupedExperts: bf16, fp8, MXFP4 and gpt-oss's, with gaps of
NaN between segments.
"""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, poison_, poisoned_memory, randn
from torch import Tensor

import epmoe
from epmoe.local.reference import swiglu_reference
from epmoe.local.weight_formats import dequantize_weights

E = 4
D = 256
F = 128
BLOCK = 128
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
MXFP4 = torch.float4_e2m1fn_x2
GPT_OSS = {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
# Segments at multiples of 128, of 3, 0, 130 and 128 rows; the last 128 rows belong to nobody.
OFFSETS = [0, 128, 128, 384, 512]
TOKENS = [3, 0, 130, 128]
N = 640


def quantized(weights: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 weights and a scale for each block of 128 × 128."""
    e, n, k = weights.shape
    blocks = weights.float().view(e, n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scales = blocks.abs().amax((2, 4)) / 448
    return (blocks / scales[:, :, None, :, None]).view(e, n, k).to(FP8), scales


def real_outputs(
    experts: epmoe.GroupedExperts,
    rows: Tensor,
    scales: Tensor | None,
    segments: tuple[Tensor, Tensor | None],
    real: Tensor,
    **options: object,
) -> Tensor:
    """The outputs of real rows, of a call where unwritten memory is NaN. Segments are offsets and
    counts.
    """
    offsets, tokens = segments
    with poisoned_memory():
        return experts(rows, offsets, scales, tokens_per_expert=tokens, **options)[real]


def random_mxfp4(
    e: int, n: int, k: int, *, seed: int, scales: tuple[int, int] = (-3, 2)
) -> tuple[Tensor, Tensor]:
    """Codes [e, n, k/2] and scales [e, n, k/32]: powers of two in a range, over about √k."""
    generator = torch.Generator().manual_seed(seed)
    one = 127 - round(torch.tensor(k).log2().item() / 2)
    codes = torch.randint(256, (e, n, k // 2), generator=generator, dtype=torch.uint8)
    powers = torch.randint(
        one + scales[0],
        one + scales[1] + 1,
        (e, n, k // 32),
        generator=generator,
        dtype=torch.uint8,
    )
    return codes.view(MXFP4), powers.view(torch.float8_e8m0fnu)


def random_nvfp4(
    e: int, n: int, k: int, *, seed: int, power: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [e, n, k/2], scales [e, n, k/16], and a tensor scale [], with which weights are about
    1 / √k · 2^`power`. It is a power of two, so that bf16 has all weights.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (e, n, k // 2), generator=generator, dtype=torch.uint8)
    # From 8 to 30.
    scales = torch.randint(80, 96, (e, n, k // 16), generator=generator, dtype=torch.uint8)
    exponent = power - 6 - round(torch.tensor(k).log2().item() / 2)
    return codes.view(MXFP4), scales.view(FP8), torch.tensor(2.0**exponent)


def weights(
    dtype: torch.dtype, device: torch.device, e: int = E, D: int = D, F: int = F
) -> dict[str, Tensor]:
    """The arguments of GroupedExperts."""
    gate_up = randn(e, 2 * F, D, seed=1) / D**0.5
    down = randn(e, D, F, seed=2) / F**0.5
    given = {"w_gate_up": gate_up.to(BF16), "w_down": down.to(BF16)}
    if dtype == FP8:
        given["w_gate_up"], given["gate_up_scales"] = quantized(gate_up)
        given["w_down"], given["down_scales"] = quantized(down)
    elif dtype == MXFP4:
        given["w_gate_up"], given["gate_up_scales"] = random_mxfp4(e, 2 * F, D, seed=1)
        given["w_down"], given["down_scales"] = random_mxfp4(e, D, F, seed=2)
    elif dtype != BF16:
        given = {"w_gate_up": gate_up.to(dtype), "w_down": down.to(dtype)}
    return {name: tensor.to(device) for name, tensor in given.items()}


def real_rows() -> Tensor:
    """Which rows are neither gaps nor past the end."""
    real = torch.zeros(N, dtype=torch.bool)
    for start, tokens in zip(OFFSETS, TOKENS, strict=False):
        real[start : start + tokens] = True
    return real


def inputs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows [N, D], of which all but the real ones are NaN, and expert_offsets."""
    rows = poison_(torch.empty(N, D, dtype=dtype))
    real = real_rows()
    rows[real] = randn(int(real.sum()), D, dtype=dtype, seed=3)
    return rows.to(device), torch.tensor(OFFSETS, dtype=torch.int32, device=device)


def want(experts: epmoe.GroupedExperts, rows: Tensor) -> Tensor:
    """The real rows of the output in fp64."""
    gate_up = experts.w_gate_up.data
    down = experts.w_down.data
    if experts.is_quantized:
        gate_up = dequantize_weights(gate_up, experts.gate_up_scales, torch.float64)
        down = dequantize_weights(down, experts.down_scales, torch.float64)
    expert = swiglu_reference(gate_up.cpu(), down.cpu())
    starts = zip(OFFSETS, TOKENS, strict=False)
    return torch.cat(
        [expert(rows[start : start + n].cpu(), i) for i, (start, n) in enumerate(starts)]
    )


def assert_right(
    experts: epmoe.GroupedExperts, slack: float = 4, **call: Tensor | int | None
) -> None:
    rows, offsets = inputs(experts.dtype, experts.w_down.device)
    out = experts(rows, offsets, **call)
    assert out.shape == (N, D) and out.dtype == experts.dtype
    real = real_rows().to(out.device)
    assert_close(out[real], want(experts, rows), slack=slack)


def gpt_oss(
    dtype: torch.dtype, device: torch.device
) -> tuple[torch.nn.Module, epmoe.GroupedExperts]:
    """transformers' experts, and ours with the same weights."""
    transformers = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = transformers.GptOssConfig(num_local_experts=E, hidden_size=D, intermediate_size=F)
    config._experts_implementation = "eager"
    theirs = transformers.GptOssExperts(config)
    for seed, parameter in enumerate(theirs.parameters()):
        parameter.data = randn(*parameter.shape, seed=seed).mul_(
            2 / D**0.5 if parameter.dim() == 3 else 4
        )
    theirs = theirs.to(device, dtype)
    ours = epmoe.GroupedExperts(
        theirs.gate_up_proj.transpose(1, 2),
        theirs.down_proj.transpose(1, 2),
        gate_up_bias=theirs.gate_up_proj_bias,
        down_bias=theirs.down_proj_bias,
        **GPT_OSS,
    )
    return theirs, ours
