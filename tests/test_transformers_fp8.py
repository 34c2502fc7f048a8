"""transformers' fp8 experts through epmoe's experts stage, in one process.

Over several ranks: tests/distributed/test_transformers.py.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import fp8_models
from helpers import randn
from transformers import Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

import epmoe.integrations.transformers as integration
from epmoe.integrations.transformers import fp8
from epmoe.local.gemm.torch_grouped import TorchGrouped

pytestmark = pytest.mark.usefixtures("default_settings")
# Relative to the largest value: weights, rows between the GEMMs and outputs are rounded.
BF16_ERROR = 1.6e-2
E = 6
K = 2
D = 256
F = 128


def tokens_for(
    num_experts: int, num_tokens: int = 33, top_k: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(1)).argsort(
        1
    )[:, :top_k]
    return (
        randn(num_tokens, D, dtype=torch.bfloat16),
        ids,
        randn(num_tokens, top_k, seed=2).softmax(1),
    )


def assert_near(got: Tensor, want: Tensor, error: float = BF16_ERROR) -> None:
    assert got.dtype == torch.bfloat16
    assert (got - want).abs().max() <= error * want.abs().max()


def module(
    gated: bool = True,
    block: object = (128, 128),
    config: dict[str, object] | None = None,
    **keys: object,
):
    """transformers' module with random weights and scales."""
    cfg = Qwen3MoeConfig(
        **{"hidden_size": D, "moe_intermediate_size": F, "num_experts": E} | (config or {})
    )
    cfg._experts_implementation = "epmoe"
    plain = type("Experts", (FP8Experts,), {})  # the decorator writes into the class
    decorated = use_experts_implementation(
        plain, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS, has_gate=gated
    )
    made = decorated(config=cfg, block_size=block, has_gate=gated, **keys).requires_grad_(False)
    for seed, (name, parameter) in enumerate(made.named_parameters()):
        values = randn(*parameter.shape, seed=seed)
        parameter.data = (values.abs() / 16 if name.endswith("scale_inv") else values).to(
            parameter.dtype
        )
    return made


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_a_checkpoint_computes_what_its_dequantized_weights_do(scale_fmt):
    with fp8_models.saved(scale_fmt=scale_fmt) as path:
        ours = (
            fp8_models.quantized(path, experts_implementation="epmoe").model.layers[-1].mlp.experts
        )
        theirs = fp8_models.dequantized(path, torch.float32).model.layers[-1].mlp.experts
    x, ids, weights = tokens_for(ours.num_experts)
    with torch.no_grad():
        want = theirs(x.float(), ids, weights)
    with torch.inference_mode():
        got = ours(x, ids, weights)
        assert_near(got, want)
        assert ours(x[:0], ids[:0], weights[:0]).shape == (0, D)
    # Also where the first call was in inference mode.
    with torch.no_grad(), fp8_models.calls_of_experts() as calls:
        assert torch.equal(ours(x, ids, weights), got)
    ((used, *_),) = calls
    parameters = [getattr(ours, name) for name in fp8.PARAMETERS]
    assert [a.data_ptr() == b.data_ptr() for a, b in zip(used[:4], parameters, strict=True)] == [
        True,
        True,
        scale_fmt == "float",
        scale_fmt == "float",
    ]


@torch.no_grad()
def test_weights_and_scales_that_change_or_move_are_those_of_the_next_call():
    for keys in ({}, {"scale_fmt": "ue8m0"}):
        experts = module(**keys)
        inputs = tokens_for(E)
        before = experts(*inputs)
        experts.down_proj_scale_inv.copy_(experts.down_proj_scale_inv.float() * 2)
        assert_near(experts(*inputs), 2 * before.float(), 4e-3)
        experts.down_proj = torch.nn.Parameter(
            torch.zeros_like(experts.down_proj), requires_grad=False
        )
        assert experts(*inputs).eq(0).all()


@pytest.mark.parametrize(
    "config", [{}, {"swiglu_limit": 1.0}, {"swiglu_limit": 1.0, "swiglu_alpha": 1.7}]
)
def test_gates_of_transformers(config):
    assert_computes_its_weights(module(config=config))


@pytest.mark.parametrize(
    "keys",
    [
        {"block": None},
        {"block": None, "scale_fmt": "ue8m0"},
        {"config": {"moe_intermediate_size": 192}},
    ],
)
def test_scales_of_whole_weights_and_blocks_with_rows_of_gate_and_up(keys):
    """transformers counts blocks over the rows of gate and up together, and keeps a scale of each
    for whole weights.
    """
    experts = module(**keys)
    assert_computes_its_weights(experts)
    with torch.no_grad():
        experts.gate_up_proj_scale_inv.copy_(experts.gate_up_proj_scale_inv.float() * 2)
    assert_computes_its_weights(experts)


@torch.no_grad()
def assert_computes_its_weights(experts) -> None:
    """Outputs are near those of the dequantized weights."""
    x, ids, weights = tokens_for(E)
    want = torch.zeros(len(x), D)
    gate_up, down = (
        p.float()
        * s.float()
        .repeat_interleave(rows, 1)[:, : p.shape[1]]
        .repeat_interleave(columns, 2)[..., : p.shape[2]]
        for p, s in (
            (experts.gate_up_proj, experts.gate_up_proj_scale_inv),
            (experts.down_proj, experts.down_proj_scale_inv),
        )
        for rows, columns in [experts.block_size or (p.shape[1] // s.shape[1], p.shape[2])]
    )
    for token in range(len(x)):
        for i, weight in zip(ids[token], weights[token], strict=True):
            want[token] += weight * (
                experts._apply_gate(x[token].float() @ gate_up[i].T) @ down[i].T
            )
    assert_near(experts(x, ids, weights), want)


@torch.no_grad()
def test_fp8_rows_reach_the_experts_with_their_scales():
    experts = module()
    inputs = tokens_for(E)
    want = experts(*inputs)
    integration.configure(payload="fp8")
    error = (experts(*inputs) - want).abs().max() / want.abs().max()
    assert 0 < error < 0.06  # e4m3 has 3 bits of mantissa


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_scheme": "static"}, "these have activation scales of the kind 'static'"),
        ({"block": (64, 128)}, "these have blocks of 64 × 128"),
        (
            {"block": None, "config": {"moe_intermediate_size": 192}},
            "these have F=192 and one scale for each of gate and up, whose rows share a block",
        ),
        ({"gated": False}, "these have no gate"),
        ({"config": {"hidden_act": "gelu"}}, "these have the activation GELUActivation"),
        (
            {"config": {"mlp_gate_softcap": 2.0, "mlp_up_softcap": 2.0}},
            "these have a soft cap on the gate",
        ),
        ({"expert_dtype": "fp4"}, "these have weights in int8"),
    ],
)
@torch.no_grad()
def test_other_formats_are_refused_by_name(change, message):
    if (
        "expert_dtype" in change
        and "expert_dtype" not in inspect.signature(FP8Experts.__init__).parameters
    ):
        pytest.skip("this transformers takes it from the model's configuration")
    experts = module(**change)
    if "mlp_gate_softcap" in change.get("config", {}) and not hasattr(experts, "gate_softcap"):
        pytest.skip("this transformers has no soft caps")
    with pytest.raises(
        ValueError, match=rf"{message}: load the checkpoint with `FineGrainedFP8Config\(dequantize"
    ):
        experts(*tokens_for(E))


@pytest.mark.parametrize("trained", ["weights", "tokens"])
def test_gradients_are_an_error(trained):
    experts = module().requires_grad_(trained == "weights")
    x, *routing = tokens_for(E)
    with pytest.raises(
        RuntimeError,
        match=r"quantized experts have no gradients .*inference_mode.*\(dequantize=True\)",
    ):
        experts(x.requires_grad_(trained == "tokens"), *routing)


@torch.no_grad()
def test_segments_are_aligned_where_the_gemm_wants_it(monkeypatch):
    """DeepGEMM wants it. Here torch's GEMM computes the same rows with gaps between
    the segments.
    """
    inputs = tokens_for(E)
    want = module()(*inputs)
    monkeypatch.setattr(TorchGrouped, "block", 64)
    with fp8_models.calls_of_experts() as calls:
        assert torch.equal(module()(*inputs), want)
    ((*_, segments),) = calls
    assert segments.alignment % 64 == 0 and not (segments.offsets % segments.alignment).any()


@torch.no_grad()
def test_static_mode_compiles_after_the_first_call():
    integration.configure(static=True, max_num_tokens_per_rank=64)
    experts = module()
    inputs = tokens_for(E)
    want = experts(*inputs)
    assert torch.equal(torch.compile(experts, backend="aot_eager", fullgraph=True)(*inputs), want)
