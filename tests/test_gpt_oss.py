"""gpt-oss's MoE block as a MoELayer: a bias of the logits, experts with biases and a limit. With
transformers' weights.

A folder of safetensors, and state dicts: tests/test_safetensors_folder.py and
tests/distributed/test_checkpoints.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from expert_inputs import GPT_OSS
from helpers import assert_close, randn
from torch import Tensor, nn

import epmoe

pytestmark = pytest.mark.usefixtures("serving")

gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
E = 12
K = 4
D = 64
F = 48
CONFIG = gpt_oss.GptOssConfig(
    num_local_experts=E, num_experts_per_tok=K, hidden_size=D, intermediate_size=F
)


@pytest.fixture(scope="module")
def block() -> nn.Module:
    """transformers' block in fp64, with biases that change choices, and with gates and ups beyond
    the limit.
    """
    config = copy.deepcopy(CONFIG)
    config._experts_implementation = "eager"
    made = gpt_oss.GptOssMLP(config)
    for seed, (name, parameter) in enumerate(made.named_parameters()):
        large = 3 if name == "experts.gate_up_proj_bias" else 1
        scale = (
            parameter.shape[1] ** -0.5
            if parameter.dim() == 3
            else D**-0.5
            if name == "router.weight"
            else large
        )
        parameter.data = randn(*parameter.shape, seed=seed) * scale
    return made.double().requires_grad_(False)


@pytest.fixture
def ep(device: torch.device) -> Iterator[epmoe.ExpertParallel]:
    config = epmoe.EPConfig.from_hf(CONFIG, ep_size=1, model={"dtype": "float32"})
    with epmoe.ExpertParallel(config, device=device) as ep:
        yield ep


def layer_of(ep: epmoe.ExpertParallel, block: nn.Module) -> epmoe.MoELayer:
    experts = {
        "w_gate_up": block.experts.gate_up_proj.mT,
        "w_down": block.experts.down_proj.mT,
        "gate_up_bias": block.experts.gate_up_proj_bias,
        "down_bias": block.experts.down_proj_bias,
    }
    tensors = {"router_weight": block.router.weight, "logit_bias": block.router.bias} | experts
    return epmoe.MoELayer.from_full(
        ep, **{name: tensor.float() for name, tensor in tensors.items()}, **GPT_OSS
    )


def want(block: nn.Module, x: Tensor) -> Tensor:
    return block(x.double().cpu())[0]


def test_a_layer_is_the_block_of_transformers(ep, block):
    layer = layer_of(ep, block)
    x = randn(2, 9, D, seed=30).to(ep.device)
    # The bias changes choices.
    assert (
        (x.flatten(0, 1).cpu().double() @ block.router.weight.T)
        .topk(K)
        .indices.ne(block.router(x.flatten(0, 1).cpu().double())[2])
        .any()
    )
    assert_close(layer(x), want(block, x), slack=4)
    assert layer(x[:0]).shape == (0, 9, D)
    layer.bfloat16()
    assert layer.router_weight.dtype == layer.logit_bias.dtype == torch.float32
    assert layer.experts.gate_up_bias.dtype == torch.bfloat16


def test_experts_that_compute_something_else_are_refused(ep, block):
    """The config says what they compute."""
    layer = layer_of(ep, block)
    weights = {name: value.detach() for name, value in layer.experts.named_parameters()}
    for wrong, says in (
        ({"limit": 6.0}, "`experts` must have limit=7.0, as `experts.limit` says, got limit=6.0"),
        (
            {"interleaved": False},
            "`experts` must have interleaved=True, as `experts.interleaved` says",
        ),
        (
            {"down_bias": None},
            "`experts` must have a `gate_up_bias` and a `down_bias`, as `experts.biases` says",
        ),
    ):
        experts = epmoe.GroupedExperts(**weights | GPT_OSS | wrong)
        with pytest.raises(ValueError, match=says):
            epmoe.MoELayer(ep, layer.router_weight, experts, logit_bias=layer.logit_bias)
