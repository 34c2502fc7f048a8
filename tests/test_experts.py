"""SwiGLU experts: grouped_mm and the plain loop agree with fp64 and never read past the last segment."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, assert_close, poison_, randn

from epmoe.reference import swiglu_reference
from epmoe.stages.experts import SwiGLUExperts

SHAPES = [(3, 64, 32, True), (5, 1000, 24, True), (2, 10, 6, False)]  # e, D, F, whether grouped_mm takes the shape


def _experts(e: int, D: int, F: int, dtype: torch.dtype, device: torch.device) -> SwiGLUExperts:
    w_gate_up = (randn(e, 2 * F, D, seed=1) / D**0.5).to(dtype)
    return SwiGLUExperts(w_gate_up.to(device), (randn(e, D, F, seed=2) / F**0.5).to(device, dtype))


def _want(experts: SwiGLUExperts, rows: torch.Tensor, ends: list[int]) -> torch.Tensor:
    expert = swiglu_reference(experts.w_gate_up, experts.w_down)
    return torch.cat([expert(rows[a:b], i) for i, (a, b) in enumerate(zip(ends, ends[1:], strict=False))])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("e", "D", "F", "grouped"), SHAPES)
def test_agrees_with_fp64(device, dtype, e, D, F, grouped):
    experts = _experts(e, D, F, dtype, device)
    if device.type == "cpu":
        assert experts.grouped is grouped
    ends = torch.tensor([0, 4, 4, 12, 16, 20], dtype=torch.int32, device=device)[: e + 1]  # one expert is idle
    rows = poison_(torch.empty(24, D, dtype=dtype, device=device))
    used = int(ends[-1])
    rows[:used] = randn(used, D, dtype=dtype).to(device)
    out = experts(rows, ends)
    assert out.shape == rows.shape and out.dtype == dtype
    assert_close(out[:used], _want(experts, rows[:used], ends.tolist()), slack=4)


def test_loop_equals_grouped_mm(device):
    experts = _experts(3, 64, 32, torch.float32, device)
    rows, ends = randn(20, 64).to(device), torch.tensor([0, 7, 7, 20], dtype=torch.int32, device=device)
    grouped = experts(rows, ends)
    experts.grouped = False
    torch.testing.assert_close(experts(rows, ends), grouped)


def test_fp64_uses_the_loop():
    experts = _experts(2, 16, 8, torch.float64, torch.device("cpu"))
    rows = randn(5, 16).double()
    assert not experts.grouped
    torch.testing.assert_close(
        experts(rows, torch.tensor([0, 2, 5], dtype=torch.int32)), _want(experts, rows, [0, 2, 5])
    )


def test_no_rows_and_no_experts(device):
    experts = _experts(2, 16, 8, torch.float32, device)
    assert experts(torch.empty(0, 16, device=device), torch.zeros(3, dtype=torch.int32, device=device)).shape == (0, 16)
    idle = _experts(0, 16, 8, torch.float32, device)
    assert idle(torch.empty(4, 16, device=device), torch.zeros(1, dtype=torch.int32, device=device)).shape == (4, 16)


@pytest.mark.parametrize("grouped", [True, False])
def test_fp8_rows_are_dequantised_by_block(device, grouped):
    experts = _experts(2, 256, 16, torch.float32, device)
    experts.grouped = grouped
    rows = randn(6, 256).to(device, torch.float8_e4m3fn)
    scales = (randn(6, 2, seed=3).abs() + 0.1).to(device)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    plain = rows.float() * scales.repeat_interleave(128, dim=1)
    assert_close(experts(rows, ends, scales), _want(experts, plain, [0, 2, 6]), slack=4)


W_GATE_UP, W_DOWN, ENDS = torch.zeros(2, 8, 4), torch.zeros(2, 4, 4), torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("weights", "call", "message"),
    [
        ((W_GATE_UP, W_DOWN[0]), (), r"`w_down` must be float32 \[e, D, F\], got float32 \[4, 4\]"),
        ((W_GATE_UP[:, 1:], W_DOWN), (), r"`w_gate_up` must be float32 \[2, 8, 4\], got float32 \[2, 7, 4\]"),
        ((W_GATE_UP.half(), W_DOWN), (), r"`w_gate_up` must be float32 \[2, 8, 4\], got float16 \[2, 8, 4\]"),
        ((W_GATE_UP, W_DOWN), (torch.zeros(3, 5), ENDS), r"`rows` must be float32 \[N, 4\], got float32 \[3, 5\]"),
        ((W_GATE_UP, W_DOWN), (torch.zeros(3, 4), ENDS[:2]), r"`expert_offsets` must be int32 \[3\], got int32 \[2\]"),
    ],
)
def test_error_messages(weights, call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SwiGLUExperts(*weights)(*call)
