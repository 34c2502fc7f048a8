"""SwiGLU experts: grouped_mm and the plain loop agree with fp64 and never read past the last
segment.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers import FLOATS, assert_close, poison_, randn

from epmoe.local.experts import GroupedExperts
from epmoe.local.reference import swiglu_reference

pytestmark = pytest.mark.usefixtures("serving")

# e, D, F, and whether grouped_mm takes the shape.
SHAPES = [(3, 64, 32, True), (5, 1000, 24, True), (2, 10, 6, False)]


def _experts(e: int, D: int, F: int, dtype: torch.dtype, device: torch.device) -> GroupedExperts:
    w_gate_up = (randn(e, 2 * F, D, seed=1) / D**0.5).to(dtype)
    return GroupedExperts(w_gate_up.to(device), (randn(e, D, F, seed=2) / F**0.5).to(device, dtype))


def _want(experts: GroupedExperts, rows: torch.Tensor, ends: list[int]) -> torch.Tensor:
    expert = swiglu_reference(experts.w_gate_up, experts.w_down)
    return torch.cat(
        [expert(rows[a:b], i) for i, (a, b) in enumerate(zip(ends, ends[1:], strict=False))]
    )


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize(("e", "D", "F", "grouped"), SHAPES)
def test_agrees_with_fp64(device, dtype, cast, e, D, F, grouped):
    """Whether grouped_mm takes the weights depends on their dtype: it is tried again
    after a cast.
    """
    experts = _experts(e, D, F, torch.float32 if cast else dtype, device).to(dtype)
    assert experts.w_gate_up.dtype == experts.w_down.dtype == experts.dtype == dtype
    if device.type == "cpu":
        assert (experts.gemm == "torch") is (grouped and dtype in FLOATS)
    # One expert is idle.
    ends = torch.tensor([0, 4, 4, 12, 16, 20], dtype=torch.int32, device=device)[: e + 1]
    rows = poison_(torch.empty(24, D, dtype=dtype, device=device))
    used = int(ends[-1])
    rows[:used] = randn(used, D, dtype=dtype).to(device)
    out = experts(rows, ends)
    assert out.shape == rows.shape and out.dtype == dtype
    want = _want(experts, rows[:used], ends.tolist())
    assert_close(out[:used], want, dtype if dtype in FLOATS else torch.float32, slack=4)


def test_no_rows_and_no_experts(device):
    experts = _experts(2, 16, 8, torch.float32, device)
    assert experts(
        torch.empty(0, 16, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    ).shape == (0, 16)
    idle = _experts(0, 16, 8, torch.float32, device)
    assert idle(
        torch.empty(4, 16, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    ).shape == (4, 16)


@pytest.mark.parametrize("gemm", ["torch", "loop"])
def test_fp8_rows_are_dequantized_by_block(device, gemm):
    experts = _experts(2, 256, 16, torch.float32, device)
    experts.gemms = (gemm,)
    rows = randn(6, 256).to(device, torch.float8_e4m3fn)
    scales = (randn(6, 2, seed=3).abs() + 0.1).to(device)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    plain = rows.float() * scales.repeat_interleave(128, dim=1)
    assert_close(experts(rows, ends, scales), _want(experts, plain, [0, 2, 6]), slack=4)


def test_weights_are_not_copied_and_frozen_ones_need_no_no_grad():
    w_gate_up = torch.nn.Parameter(randn(2, 16, 16))
    w_down = torch.nn.Parameter(randn(2, 16, 8))
    experts = GroupedExperts(w_gate_up, w_down)
    assert experts.w_down.data_ptr() == w_down.data_ptr()
    assert all(p.requires_grad for p in experts.parameters()) and w_down.requires_grad
    with torch.enable_grad():
        rows = randn(5, 16)
        offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
        assert (
            experts(rows, offsets).requires_grad
            and not experts.requires_grad_(False)(rows, offsets).requires_grad
        )


def test_weights_may_come_with_load_state_dict_assign():
    """A model made on the meta device takes the tensors of a checkpoint, here of another dtype."""
    experts = _experts(2, 64, 32, torch.float32, torch.device("cpu"))
    assert experts.gemm == "torch"
    meta = copy.deepcopy(experts).to("meta")
    meta.load_state_dict(experts.double().state_dict(), assign=True)
    assert meta.dtype == torch.float64 and meta.gemm == "loop"
    rows = randn(5, 64).double()
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    torch.testing.assert_close(meta(rows, ends), _want(experts, rows, [0, 2, 5]))


def test_deepcopy_and_pickle():
    experts = _experts(3, 64, 32, torch.float32, torch.device("cpu"))
    rows = randn(20, 64)
    ends = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert other.w_down.data_ptr() != experts.w_down.data_ptr()
        assert torch.equal(other(rows, ends), experts(rows, ends))


@pytest.mark.parametrize(
    ("turned", "message"),
    [
        (["w_gate_up"], r"^`w_gate_up` must be \[4, 64, 16\], got \[4, 16, 64\], which is transp"),
        (
            ["w_down"],
            r"^`w_down` must be \[4, 16, 32\], got \[4, 32, 16\], which is transposed: giv",
        ),
        (
            ["w_gate_up", "w_down"],
            r"^`w_gate_up` must be .* and `w_down` must be \[4, 16, 32\], got .* and \[4, 32, "
            r"16\], ",
        ),
    ],
)
def test_transposed_weights_are_named(turned, message):
    right = {"w_gate_up": torch.zeros(4, 64, 16), "w_down": torch.zeros(4, 16, 32)}
    GroupedExperts(**right)
    with pytest.raises(ValueError, match=message):
        GroupedExperts(**right | {name: right[name].mT for name in turned})
