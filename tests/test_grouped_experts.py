"""GroupedExperts with fp8 and MXFP4 weights and in gpt-oss's layout: right, compiled without a
break, captured.
"""

from __future__ import annotations

import pytest
import torch
from expert_inputs import (
    BF16,
    FP8,
    MXFP4,
    OFFSETS,
    E,
    N,
    assert_right,
    gpt_oss,
    inputs,
    real_rows,
    weights,
)
from helpers import ON_GPUS, assert_close, captured, slow

import epmoe
from epmoe.local.weight_formats import bits_of

pytestmark = pytest.mark.usefixtures("serving")


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32, FP8, MXFP4])
def test_gaps_and_rows_past_the_end_may_be_nan(device, dtype, loop):
    experts = epmoe.GroupedExperts(**weights(dtype, device), gemm="torch")
    if loop:
        experts.gemms = ("loop",)
    assert experts.alignment == 1
    assert_right(experts)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@torch.no_grad()
def test_gpt_oss_is_that_of_transformers(device, dtype, loop):
    """Biases reach far beyond the limit of 7, on both sides."""
    theirs, ours = gpt_oss(dtype, device)
    if loop:
        ours.gemms = ("loop",)
    rows, offsets = inputs(dtype, device)
    real = real_rows()
    ids = (
        torch.arange(E)
        .repeat_interleave(torch.tensor(OFFSETS).diff())[real[: OFFSETS[-1]]]
        .to(device)
    )
    out = ours(rows, offsets)[real.to(device)]
    expected = theirs(
        rows[real.to(device)], ids[:, None], torch.ones(len(ids), 1, dtype=dtype, device=device)
    )
    assert_close(out, expected, slack=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("format", "name"), [(FP8, "float8_e4m3fn"), (MXFP4, "MXFP4")])
def test_casts_leave_quantized_weights_as_they_are(dtype, format, name):
    experts = epmoe.GroupedExperts(**weights(format, torch.device("cpu")))
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    assert list(before) == ["w_gate_up", "w_down", "gate_up_scales", "down_scales"]
    # No bit changes.
    for key, tensor in experts.to(dtype).state_dict().items():
        assert tensor.dtype == before[key].dtype and torch.equal(
            bits_of(tensor), bits_of(before[key])
        )
    assert experts.dtype == BF16 and not any(p.requires_grad for p in experts.parameters())
    assert_right(experts)
    assert repr(experts) == f"GroupedExperts(e=4, D=256, F=128, {name}, gemm='torch')"
    # What they say of themselves.
    experts._stage = experts._stage._replace(
        gemms=("few_rows", "torch"), most_rows={"few_rows": 1 / 30}
    )
    assert repr(experts).endswith("gemm='torch', few_rows up to 0.0333 rows an expert)")
    with torch.enable_grad(), pytest.raises(RuntimeError, match="have no gradients"):
        rows, offsets = inputs(BF16, torch.device("cpu"))
        experts(rows.requires_grad_(), offsets)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("inductor", "bf16"),
        # gpt-oss is in bf16, too, with biases.
        slow("aot_eager", "bf16"),
        *(("aot_eager", case) for case in ("fp32", "fp8", "mxfp4", "gpt-oss")),
    ],
)
@torch.no_grad()
def test_compiles_without_a_graph_break(backend, case):
    """One graph for every number of rows, and the bits of the real rows."""
    cpu = torch.device("cpu")
    dtype = {"bf16": BF16, "fp32": torch.float32, "fp8": FP8, "mxfp4": MXFP4}.get(case, BF16)
    experts = (
        gpt_oss(BF16, cpu)[1] if case == "gpt-oss" else epmoe.GroupedExperts(**weights(dtype, cpu))
    )
    # Other numbers of rows through one graph.
    torch.compiler.reset()
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend=backend)
    rows, offsets = inputs(experts.dtype, cpu)
    real = real_rows()
    for n in (N, N - 64, N - 128):
        got = compiled(rows[:n], offsets)
        eager = experts(rows[:n], offsets)
        assert_close(got[real[:n]], eager[real[:n]], slack=2)
        # It fuses, and rounds less often.
        assert torch.equal(got[real[:n]], eager[real[:n]]) or backend == "inductor"


@ON_GPUS
@pytest.mark.parametrize("case", ["bf16", "fp8", "mxfp4", "gpt-oss"])
@torch.no_grad()
def test_a_captured_call(device, case):
    """The host is never asked, so a replay takes the segments of its time."""
    if case == "gpt-oss":
        experts = gpt_oss(BF16, device)[1]
    else:
        dtype = {"fp8": FP8, "mxfp4": MXFP4}.get(case, BF16)
        experts = epmoe.GroupedExperts(**weights(dtype, device), gemm="torch")
    rows, offsets = inputs(BF16, device)
    # The capture has no rows. The replay has.
    given = [torch.zeros_like(rows), torch.zeros_like(offsets)]
    replay, out = captured(lambda: experts(*given))
    given[0].copy_(rows)
    given[1].copy_(offsets)
    replay()
    real = real_rows().to(device)
    assert torch.equal(out[real], experts(rows, offsets)[real])
