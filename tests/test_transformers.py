"""The integration in transformers, in one process: the experts function on a group of one rank."""

from __future__ import annotations

import copy
import functools
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import adapter_models
from fp8_models import calls_of_experts
from helpers import assert_close, randn
from launched import run_python
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.integrations.moe import ExpertsInterface

import epmoe.integrations.transformers as integration
from epmoe import EPTimeoutError
from epmoe.cli.demo import generate as demo
from epmoe.config.config import ConfigError
from epmoe.integrations.batches import Arrived
from epmoe.integrations.transformers import experts as stage
from epmoe.local.gemm.gemm import Segments

pytestmark = pytest.mark.usefixtures("default_settings")


def loaded(name: str, dtype: torch.dtype = torch.float32, **kwargs):
    with demo.saved_model(name, dtype=dtype) as path:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **kwargs)


def prompt_ids(length: int = 21) -> Tensor:
    return torch.randint(1, 240, (2, length), generator=torch.Generator().manual_seed(0))


def experts_of(model):
    return model.model.layers[-1].mlp.experts


def tokens_for(experts, num_tokens: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden = getattr(experts, "hidden_dim", None) or experts.hidden_size
    dtype = experts.down_proj.dtype
    ids = torch.rand(
        num_tokens, experts.num_experts, generator=torch.Generator().manual_seed(1)
    ).argsort(1)[:, :top_k]
    return randn(num_tokens, hidden, dtype=dtype), ids, randn(num_tokens, top_k, seed=2).softmax(1)


def test_import_registers_both_entry_points():
    assert ExpertsInterface()["epmoe"] is integration.experts_forward
    expert_parallel = pytest.importorskip(
        "transformers.distributed.expert_parallel", reason="since transformers 5.23"
    )
    assert expert_parallel.EPImplementationInterface()["epmoe"] is integration.EpmoeEP


@pytest.mark.parametrize(
    ("model_type", "warns"),
    [("llama4_text", True), ("jetmoe", True), ("qwen3_moe", False), ("llama", False)],
)
def test_models_with_experts_that_never_ask_for_an_implementation_warn(model_type, warns, recwarn):
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
    }
    config = CONFIG_MAPPING[model_type](vocab_size=32, **sizes)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config, experts_implementation="epmoe")
    said = " ".join(str(warning.message) for warning in recwarn)
    assert (
        f'`experts_implementation="epmoe"` does nothing for {model_type}: its code' in said
    ) == warns


@torch.no_grad()
def test_layers_of_one_shape_share_one_expert_parallel():
    model = loaded("qwen3_moe", experts_implementation="epmoe")
    with torch.inference_mode():  # windows that are made here work outside as well
        model(prompt_ids())
    model(prompt_ids(3))
    (layers,) = integration.shared()
    assert sum(layers.ep.health().rows_sent) == 3 * 2 * (21 + 3)
    loaded("mixtral", experts_implementation="epmoe")(prompt_ids())
    assert len(integration.shared()) == 2


@torch.no_grad()
def test_metrics_of_a_model():
    prometheus_client = pytest.importorskip("prometheus_client")
    from epmoe.integrations.prometheus import HealthCollector

    model = loaded("qwen3_moe", experts_implementation="epmoe")
    scraped = prometheus_client.CollectorRegistry()
    model(prompt_ids())
    scraped.register(HealthCollector(integration.shared()[0].ep))
    model(prompt_ids(3))
    labels = {"exchange": "default", "rank": "0", "to": "0"}
    assert scraped.get_sample_value("epmoe_rows_sent_total", labels) == 3 * 2 * (21 + 3)


def test_configure_names_a_wrong_key_and_keeps_earlier_settings():
    integration.configure(max_num_tokens_per_rank=7, timeout_s=3.0)
    # A wrong value, an unknown key and a wrong type.
    with pytest.raises(ConfigError, match="`exchange.timeout_s`"):
        integration.configure(timeout_s=-1.0)
    with pytest.raises(ConfigError, match="did you mean `max_num_tokens_per_rank`"):
        integration.configure(max_num_tokens=8)
    with pytest.raises(ConfigError, match="`static` must be True or False, got 'yes'"):
        integration.configure(static="yes")
    # Settings of both right calls hold.
    integration.configure(timeout_s=4.0)
    experts = experts_of(loaded("gpt_oss", experts_implementation="epmoe"))
    with torch.no_grad():
        experts(*tokens_for(experts, 8, 4))
    (layers,) = integration.shared()
    config = layers.ep.config
    assert (config.capacity.max_num_tokens_per_rank, config.exchange.timeout_s) == (7, 4.0)
    # Another call begins anew.
    integration.configure()
    with pytest.raises(RuntimeError, match="closed"):
        layers.ep.health()


@torch.no_grad()
def test_poll_hints_at_ranks_that_have_ended_generate(monkeypatch):
    """What the others get is in tests/distributed/test_more_rounds.py."""
    experts = experts_of(loaded("mixtral", experts_implementation="epmoe"))
    experts(*tokens_for(experts, 8, 2))
    (layers,) = integration.shared()
    late = EPTimeoutError("dispatch", 2, [1], [1], "timed out waiting for rank 1")
    monkeypatch.setattr(layers.ep, "poll", Mock(side_effect=late))
    with pytest.raises(EPTimeoutError, match="dispatch of round 2 timed out .* `synced_gpus=True`"):
        integration.poll()


@torch.no_grad()
def test_a_layer_in_static_mode_compiles_after_its_first_call():
    integration.configure(static=True, max_num_tokens_per_rank=32)
    experts = experts_of(loaded("gpt_oss", experts_implementation="epmoe"))
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="call the model once before compiling"):
        compiled(*tokens_for(experts, 8, 4))
    with calls_of_experts() as calls:
        want = experts(*tokens_for(experts, 8, 4))
    # By which GPUs choose the GEMM: no rank need bring the most that it may bring.
    [(*_, segments)] = calls
    assert segments.rows_per_expert == 8 * 4 / experts.num_experts
    assert torch.equal(compiled(*tokens_for(experts, 8, 4)), want)
    with (
        torch.enable_grad(),
        pytest.raises(ValueError, match="static mode serves and does not train: train with `con"),
    ):
        experts(*tokens_for(experts, 8, 4))
    with pytest.raises(ValueError, match="a rank brings 33 tokens"):
        compiled(*tokens_for(experts, 33, 4))
    twin = copy.deepcopy(experts)
    twin.down_proj.zero_()
    twin.down_proj_bias.zero_()
    assert twin(*tokens_for(experts, 8, 4)).eq(0).all()
    compiled_twin = torch.compile(twin, backend="aot_eager", fullgraph=True)
    assert compiled_twin(*tokens_for(experts, 8, 4)).eq(0).all()


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_weights_are_used_where_they_lie(name):
    experts = experts_of(loaded(name, experts_implementation="epmoe"))
    inputs = tokens_for(experts, 8, 2)
    # A gate that is unknown is called, and gives the same.
    with calls_of_experts() as calls:
        want = experts(*inputs)
        experts._apply_gate = functools.partial(type(experts)._apply_gate, experts)  # unknown
        assert_close(experts(*inputs), want, slack=4)
    # The experts have the memory of the module.
    ((used, *_),) = calls
    assert used.gate_up.data_ptr() == experts.gate_up_proj.data_ptr()
    assert used.down.data_ptr() == experts.down_proj.data_ptr()
    for parameter in experts.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert experts(*inputs).eq(0).all()


class Ungated(torch.nn.Module):
    has_gate = False
    has_bias = True
    is_transposed = True
    has_post_expert_norm = True
    act_fn = staticmethod(torch.relu)
    post_expert_norm = staticmethod(torch.neg)

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "up_proj": (16, 24),
            "down_proj": (24, 16),
            "up_proj_bias": (24,),
            "down_proj_bias": (16,),
        }
        for seed, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, torch.nn.Parameter(randn(3, *shape, seed=seed)))


@pytest.mark.parametrize("trains", [False, True])
def test_experts_without_a_gate(trains):
    """[n, D] through relu(x · up + b) · down + c, with transposed weights and the last two of three
    experts.
    """
    module = Ungated()
    x = randn(7, 16, seed=9)
    up, down, up_bias, down_bias = (parameter.double() for parameter in stage.parameters_of(module))
    segments = Segments(torch.tensor([0, 5, 7], dtype=torch.int32), None, 1)
    # Five rows of the second expert and two of the third.
    with torch.set_grad_enabled(trains):
        computation = stage.computation(module, stage.parameters_of(module), slice(1, 3), trains)
        got = computation.experts(Arrived(x, None, segments, torch.float32))
    assert got.requires_grad == trains
    # Each row by hand.
    for row, expert in enumerate([1] * 5 + [2] * 2):
        hidden = torch.relu(x[row].double() @ up[expert] + up_bias[expert])
        assert_close(got[row], -(hidden @ down[expert] + down_bias[expert]))


@pytest.mark.parametrize("requires_grad", ["x", "weights", "experts"])
def test_a_part_of_the_gradients(requires_grad):
    experts = experts_of(loaded("gpt_oss", experts_implementation="epmoe"))
    experts.requires_grad_(requires_grad == "experts")
    x, ids, weights = tokens_for(experts, 8, 2)
    inputs = {"x": [x], "weights": [weights], "experts": list(experts.parameters())}[requires_grad]
    with torch.no_grad():
        want = experts(x, ids, weights)
    # One part alone has gradients.
    for tensor in inputs:
        tensor.requires_grad_()
    y = experts(x, ids, weights)
    assert torch.equal(y, want)
    assert all(gradient.any() for gradient in torch.autograd.grad(y.square().sum(), inputs))


def test_adapters_of_peft_train():
    """They are outside of the experts, whose own parameters are frozen; no input of the first layer
    has a gradient.
    """
    single = loaded("qwen3_moe")
    shared = loaded("qwen3_moe", experts_implementation="epmoe")
    gradients = []
    # In one process, and through epmoe.
    for model in (single, shared):
        model.requires_grad_(False)
        factors = [
            factor
            for layer in model.model.layers
            for factor in adapter_models.parametrize(layer.mlp.experts, "gate_up_proj", "down_proj")
        ]
        model(input_ids=prompt_ids(), labels=prompt_ids(), use_cache=False).loss.backward()
        gradients.append([factor.grad for factor in factors])
    for got, want in zip(*reversed(gradients), strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    "where",
    [
        "native.ops.dispatch",
        *(f"exchange.node.RoundState.{name}" for name in ("receive", "permit", "close")),
    ],
)
@torch.inference_mode()
def test_an_exception_anywhere_in_a_round_closes_it(where, monkeypatch):
    """A signal handler may raise before or behind what dispatch and combine send."""
    experts = experts_of(loaded("mixtral", experts_implementation="epmoe"))
    inputs = tokens_for(experts, 8, 2)
    want = experts(*inputs)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"epmoe.{where}", interrupt)
        experts(*inputs)
    assert torch.equal(experts(*inputs), want)


@torch.inference_mode()
def test_fp8_payload_reaches_the_experts_in_their_dtype(monkeypatch):
    monkeypatch.setitem(demo.MODELS["mixtral"], "hidden_size", 256)
    experts = experts_of(loaded("mixtral"))
    x, ids, weights = tokens_for(experts, 33, 2)
    want = experts(x, ids, weights)
    experts.config._experts_implementation = "epmoe"
    integration.configure(payload="fp8")
    error = (experts(x, ids, weights) - want).abs().max() / want.abs().max()
    assert 0 < error < 0.06  # e4m3 has 3 bits of mantissa


def test_the_experts_function_is_an_error_under_expert_parallelism():
    experts = experts_of(loaded("mixtral", experts_implementation="epmoe"))
    experts._is_expert_parallel = True
    with pytest.raises(ValueError, match='`ep_implementation="epmoe"` alone'):
        experts(*tokens_for(experts, 8, 2))


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("import sys; sys.modules['transformers'] = None", r"pip install 'epmoe\[hf\]'"),
        (
            "import transformers; transformers.__version__ = '5.16.2'",
            "needs transformers 5.17 or newer, got 5.16.2",
        ),
    ],
)
def test_transformers_absent_or_too_old(first, message):
    code = f"{first}\nimport epmoe.integrations.transformers"
    run = run_python("-c", code)
    with pytest.raises(ImportError, match=message):
        raise ImportError(run.stderr.strip().splitlines()[-1])


@pytest.mark.slow
def test_transformers_without_ep_implementations_has_the_experts_function():
    code = (
        "import sys, transformers.modeling_utils\n"  # which needs the module since 5.24
        "sys.modules['transformers.distributed.expert_parallel'] = None\n"
        "import epmoe.integrations.transformers as integration\n"
        "assert not hasattr(integration, 'EpmoeEP')\n"
        "assert 'epmoe' in integration.ExpertsInterface()"
    )
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr


def test_demo_tokenizer_decodes_its_encoded_prompts():
    tokenizer = demo.make_tokenizer()
    assert tokenizer.get_vocab_size() == demo.MODELS["mixtral"]["vocab_size"]
    assert [tokenizer.decode(tokenizer.encode(prompt).ids) for prompt in demo.PROMPTS] == list(
        demo.PROMPTS
    )
    assert tokenizer.decode(range(tokenizer.get_vocab_size())).isprintable()


def test_unknown_demo_model_is_an_error():
    with pytest.raises(
        ValueError,
        match="`name` must be one of qwen3_moe, mixtral, deepseek_v3, gpt_oss, got 'llama'",
    ):
        demo.run_model("llama")
