"""`EPConfig.from_hf`: every row of its table equals a block of transformers; sources, overrides,
errors.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT, randn
from torch import Tensor

import epmoe
from epmoe import ConfigError, EPConfig
from epmoe.config.from_hf import _NAMES, _ROWS, MODEL_TYPES, PART_KEYS, REFUSED

pytest.importorskip("transformers")

import moe_blocks
import transformers
from huggingface_hub.errors import StrictDataclassError
from moe_blocks import (
    D,
    E,
    F,
    K,
    T,
    behind,
    beside,
    block_of,
    outputs,
    router_weight,
    save,
    tiny,
    variants,
)
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("serving")

QWEN3 = {
    **{
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "hidden_size": 2048,
    },
    **{
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "torch_dtype": "bfloat16",
    },
}
"""What Qwen3-30B-A3B has in its config.json."""
MAVERICK = {
    **{
        "model_type": "llama4_text",
        "num_local_experts": 128,
        "num_experts_per_tok": 1,
        "hidden_size": 5120,
    },
    **{"intermediate_size": 8192, "torch_dtype": "bfloat16", "hidden_act": "silu"},
}
"""The `text_config` of Llama-4-Maverick-17B-128E."""


FIRST = {row.model_types[0] for row in _ROWS}
TYPES = [
    pytest.param(name, marks=[] if name in FIRST else [pytest.mark.slow]) for name in MODEL_TYPES
]
"""The first type of each row in every run, the others of the row in longer ones."""


def assert_equals(got: Tensor, want: Tensor) -> None:
    """The relative error of all values together is at most 1e-6."""
    got = got.double()
    want = want.double()
    assert (got - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("model_type", TYPES)
def test_a_row_is_the_block_of_transformers(model_type, tmp_path):
    """From a checkpoint, with the model's own names: outputs, padding, gradients, and scores near
    1e-21.
    """
    for number, hf in enumerate(
        variants(model_type, "silu" if model_type == "qwen4_exp_text" else "quick_gelu")
    ):
        # The config has the sizes of the model.
        config = EPConfig.from_hf(hf, ep_size=1)
        model = config.model
        assert (model.num_experts, model.num_experts_per_tok, model.hidden_size) == (E, K, D)
        assert (model.intermediate_size, model.dtype) == (F, "float32")

        # A layer from a checkpoint of the block.
        block = block_of(hf)
        x = randn(T, D, seed=99)
        with epmoe.ExpertParallel(config, device="cpu") as ep:
            name = save(block, hf.model_type, tmp_path)
            folder = epmoe.SafetensorsFolder(tmp_path)
            layer = epmoe.MoELayer.from_safetensors(ep, folder, name, shared=beside(block)[1])
            assert (layer.bias is not None, layer.logit_bias is not None) == (
                config.routing.selection_bias,
                config.routing.logit_bias,
            )
            assert (layer.experts.gate_up_bias is not None) == config.experts.biases

            # It has the outputs of the block, and padding has none.
            whole = behind(block)[1]
            want = outputs(block, x)
            assert_equals(whole(layer(x)), want)
            padded = layer(x, T - 7)
            assert_equals(whole(padded[:-7]), want[:-7])
            assert not padded[-7:].any()

            # Gradients of x and of the router, once for a model.
            weights = router_weight(block), layer.router_weight
            if number == 0:
                grad = randn(T, D, seed=100)
                with torch.enable_grad():
                    x.requires_grad_()
                    theirs = torch.autograd.grad(outputs(block, x), (x, weights[0]), grad)
                    ours = torch.autograd.grad(whole(layer(x)), (x, weights[1]), grad)
                    x.requires_grad_(False)
                for got, of_block in zip(ours, theirs, strict=True):
                    assert_equals(got, of_block)

            # Scores near 1e-21: all logits are lower by 48.
            x[:, -1] = 1.0
            for weight in weights:
                weight[:, -1] -= 48
            assert_equals(whole(layer(x)), outputs(block, x))


@pytest.mark.parametrize("model_type", ["mixtral", "minimax", "minimax_m2"])
def test_jitter_in_training_is_that_of_transformers(model_type, tmp_path):
    """Also in the first pass of a reentrant checkpoint; none in `eval()`."""
    hf = tiny(model_type, router_jitter_noise=0.3)
    other = tiny("qwen3_moe", router_jitter_noise=0.3)  # whose code has no jitter
    assert EPConfig.from_hf(other, ep_size=1).routing.jitter_noise == 0
    # In `eval()` there is none.
    block = block_of(hf)
    x = randn(T, D, seed=99)
    with epmoe.ExpertParallel(EPConfig.from_hf(hf, ep_size=1), device="cpu") as ep:
        name = save(block, model_type, tmp_path)
        layer = epmoe.MoELayer.from_safetensors(ep, epmoe.SafetensorsFolder(tmp_path), name)
        assert_equals(layer.eval()(x), outputs(block, x))
        # In training three ways draw the same noise from one seed.
        block.train(), layer.train()
        with torch.inference_mode(False), torch.enable_grad():
            results = []
            for call in (
                lambda x: outputs(block, 1 * x),
                layer,
                lambda x: checkpoint(layer, x, use_reentrant=True),
            ):
                torch.manual_seed(0)
                leaf = x.clone().requires_grad_()
                y = call(leaf)
                y.square().sum().backward()
                results.append((y, leaf.grad))
    for got in results[1:]:
        for ours, theirs in zip(got, results[0], strict=True):
            assert_equals(ours, theirs)


def renamed(keys: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The same values under other names."""
    return {names.get(key, key): value for key, value in keys.items()}


def read_from(folder: Path, keys: dict[str, Any]) -> EPConfig:
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    return EPConfig.from_hf(folder, ep_size=2)


def taken_by(made: type, keys: dict[str, Any]) -> Any:
    """What transformers makes of these keys, None where its class refuses them."""
    try:
        return made(**keys)
    except StrictDataclassError:
        return None


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_names_of_keys_are_those_of_the_class(model_type, tmp_path):
    """config.json with any name that the class in transformers takes, and as `to_dict` gives it."""
    for hf in variants(model_type):
        made = type(hf)
        keys = hf.to_dict()
        want = EPConfig.from_hf(hf, ep_size=2)
        assert read_from(tmp_path, keys) == want
        aliases = {ours: alias for alias, ours in made.attribute_map.items() if ours in keys}
        for names in (aliases, *({ours: alias} for ours, alias in aliases.items())):
            assert read_from(tmp_path, renamed(keys, names)) == want
            assert EPConfig.from_hf(made(**renamed(keys, names)), ep_size=2) == want
        # Names beyond its attribute_map that the class takes, as by an argument of its constructor.
        for group in _NAMES.values():
            for own in keys.keys() & set(group):
                for other in set(group) - keys.keys():
                    shipped = renamed(keys, {own: other})
                    taken = taken_by(made, shipped)
                    if keys[own] is not None and getattr(taken, own, None) == keys[own]:
                        assert read_from(tmp_path, shipped) == want
        # Keys that config.json lacks: what the class has, or an error that names the key.
        for group in _NAMES.values():
            for own in keys.keys() & set(group):
                lacks = {own}
                if group == _NAMES["num_expert_groups"]:
                    lacks.add("topk_group")  # which would not fit another number of groups
                shipped = {key: value for key, value in keys.items() if key not in lacks}
                taken = taken_by(made, shipped)
                if taken is None:
                    continue
                try:
                    got = read_from(tmp_path, shipped)
                except ConfigError as error:
                    assert f"a {keys['model_type']} must have the keys `{group[0]}`" in str(error)
                else:
                    assert got == EPConfig.from_hf(taken, ep_size=2)


@pytest.mark.slow
def test_parts_are_those_of_transformers():
    """Of a model of several parts, the one with the experts is found."""
    found = set()
    for model_type, made in CONFIG_MAPPING.items():
        if model_type in MODEL_TYPES:
            continue
        try:
            keys = made().to_dict()
        except Exception:  # noqa: BLE001, S112  # needs arguments, or a file of timm
            continue
        # The config of the whole has what the part alone gives, whatever it calls itself.
        for name in keys.keys() & set(PART_KEYS):
            part = keys[name]
            if part.get("model_type") in MODEL_TYPES:
                found.add(model_type)
                given = {"dtype": "bfloat16", "num_experts_per_tok": 4}
                want = EPConfig.from_hf(part, ep_size=1, model=given)
                assert EPConfig.from_hf(keys, ep_size=1, model=given) == want
                for other in ({}, {"model_type": "of their authors' code"}):
                    shipped = keys | {name: part | {"model_type": None} | other}
                    assert EPConfig.from_hf(shipped, ep_size=1, model=given) == want
    assert {"qwen3_vl_moe", "llama4", "step3p7", "kimi_k25"} <= found


LING = {
    "model_type": "bailing_hybrid",
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "hidden_size": 2560,
    "moe_intermediate_size": 512,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
STEP = {
    "model_type": "step3p5",
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "hidden_size": 4096,
    "moe_intermediate_size": 1280,
    "moe_router_scaling_factor": 3.0,
    "moe_router_activation": "sigmoid",
    "use_moe_router_bias": True,
    "norm_expert_weight": True,
}
MINIMAX = {
    "model_type": "minimax_m2",
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
}
AFMOE = {
    "model_type": "afmoe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "score_func": "sigmoid",
    "route_norm": True,
    "route_scale": 2.826,
    "n_group": 1,
    "topk_group": 1,
}
DOTS = {
    "model_type": "dots1",
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "hidden_size": 4096,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "topk_method": "noaux_tc",
}
HUNYUAN = {
    "model_type": "hunyuan_v1_moe",
    "num_experts": 64,
    "moe_topk": [8] * 32,
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "norm_topk_prob": True,
    "n_group": False,
    "topk_group": False,
    "routed_scaling_factor": False,
}
"""What config.json of Ling 3.0, Step 3.5, MiniMax-M2, Trinity, dots.llm1 and Hunyuan-A13B has of
these keys.
"""


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        (LING, (512, 8, 512, "sigmoid", True, True, 8, 4, 2.5)),
        (STEP, (288, 8, 1280, "sigmoid", True, True, 1, 1, 3.0)),
        (STEP | {"swiglu_limits": [0.0] * 45}, (288, 8, 1280, "sigmoid", True, True, 1, 1, 3.0)),
        (MINIMAX, (256, 8, 1536, "sigmoid", True, True, 1, 1, 1.0)),
        (AFMOE, (128, 8, 1024, "sigmoid", True, True, 1, 1, 2.826)),
        (HUNYUAN, (64, 8, 3072, "softmax", True, False, 1, 1, 1.0)),
        (DOTS, (128, 6, 1408, "sigmoid", True, True, 1, 1, 2.5)),
        (QWEN3 | {"swiglu_limits": [0, None]}, (128, 8, 768, "softmax", True, False, 1, 1, 1.0)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_config_json_as_its_authors_ship_it(keys, want, tmp_path):
    """Also as a part of a model."""
    config = read_from(tmp_path, keys)
    model = config.model
    routing = config.routing
    got = (
        model.num_experts,
        model.num_experts_per_tok,
        model.intermediate_size,
        routing.scoring,
        routing.renormalize,
        routing.selection_bias,
        routing.num_expert_groups,
        routing.top_groups,
        routing.routed_scaling_factor,
    )
    assert got == want
    # As a part of a model of several.
    for key in PART_KEYS:
        assert read_from(tmp_path, {"model_type": "of several parts", key: keys}) == config
    if keys["model_type"] == "step3p5":
        part = {key: value for key, value in keys.items() if key != "model_type"}
        assert read_from(tmp_path, {"model_type": "step3p7", "text_config": part}) == config


def test_every_model_type_with_experts_is_known():
    """A type that a new release of transformers brings needs a row, or a refusal with
    its reason.
    """
    assert moe_blocks.types_with_experts().keys() <= {*MODEL_TYPES, *REFUSED}
    assert not REFUSED.keys() & set(MODEL_TYPES)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refusal_says_why(model_type):
    with pytest.raises(
        ConfigError, match=re.escape(f"a {model_type} is not read, since {REFUSED[model_type]}: ")
    ):
        EPConfig.from_hf(
            {"model_type": "vl", "thinker_config": {"model_type": model_type}}, ep_size=1
        )


def test_what_a_source_may_be(tmp_path):
    hf = tiny("qwen3_moe", norm_topk_prob=True, num_hidden_layers=1, vocab_size=32)
    want = EPConfig.from_hf(hf, ep_size=2)
    assert want.topology.ep_size == 2
    hf.save_pretrained(tmp_path)
    keys = hf.to_dict()
    # Keys, a folder, a file, and keys of a whole.
    for source in (
        keys,
        tmp_path,
        str(tmp_path / "config.json"),
        {"model_type": "vl", "text_config": keys},
    ):
        assert EPConfig.from_hf(source, ep_size=2) == want
    # For each layer, as Hunyuan-A13B's has them.
    keys = tiny("hunyuan_v1_moe").to_dict() | {"moe_topk": [3, 3]}
    assert EPConfig.from_hf(keys, ep_size=1).model.num_experts_per_tok == 3
    # A model, whose dtype counts.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    assert EPConfig.from_hf(model, ep_size=2) == want
    assert EPConfig.from_hf(model.bfloat16(), ep_size=2).model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("ready", "ep_size", "source"),
    [
        ("h200x2_qwen3_30b", 2, QWEN3),
        ("h200x8_deepseek_v3", 8, "deepseek_v3"),
        ("h200x8_mixtral", 8, "mixtral"),
        ("h200x4_gpt_oss_120b", 4, "gpt_oss"),
        ("h200x4_gpt_oss_120b_fp8", 4, "gpt_oss"),
        ("h200x8_llama4_maverick", 8, MAVERICK),
    ],
)
def test_the_ready_configurations_are_those_of_the_models(ready, ep_size, source):
    """Class defaults of transformers are those of these checkpoints, but for Qwen3's
    and Llama 4's.
    """
    want = EPConfig.load(ready)
    got = EPConfig.from_hf(
        CONFIG_MAPPING[source]() if isinstance(source, str) else source, ep_size=ep_size
    )
    assert (got.model, got.experts, got.routing) == (want.model, want.experts, want.routing)


def test_sections_replace_what_the_model_says(monkeypatch):
    keys = {key: value for key, value in QWEN3.items() if key != "norm_topk_prob"}
    lacks = r"^a qwen3_moe must have the keys `norm_topk_prob` \(our `routing.renormalize`\)"
    with pytest.raises(ConfigError, match=lacks):
        EPConfig.from_hf(keys, ep_size=8)
    # Sections go before keys, and the environment before both.
    monkeypatch.setenv("EPMOE_CAPACITY__ALIGNMENT", "4")
    sections = {
        "routing": {"renormalize": True},
        "model": {"dtype": "float32"},
        "topology": {"ranks_per_node": 4},
    }
    config = EPConfig.from_hf(keys, ep_size=8, capacity={"alignment": 2}, **sections)
    assert (config.routing.renormalize, config.model.dtype, config.model.num_experts) == (
        True,
        "float32",
        128,
    )
    # What both say alike is no contradiction.
    router = {"scoring": "sigmoid", "selection_bias": True}
    says = {"score_function": "sigmoid", "use_routing_bias": True}
    got = EPConfig.from_hf(QWEN3 | says, ep_size=8, routing=router).routing
    assert (got.scoring, got.selection_bias) == ("sigmoid", True)
    assert (config.topology.ep_size, config.topology.ranks_per_node, config.capacity.alignment) == (
        8,
        4,
        4,
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"model_type": "llama"},
            r"model_type 'llama' is not known: .*'num_experts_per_tok'.*Known are qwen2_moe, .*",
        ),
        ({"model_type": None}, "model_type None is not known"),
        ({"model_type": "phimoe"}, "a phimoe is not read, since sparsemixer .* `dispatch`"),
        (
            {"model_type": "deepseek_v3", "scoring_func": "softmax"},
            "`scoring_func` 'sigmoid', got .* 'softmax'",
        ),
        (
            {"model_type": "deepseek_v2", "norm_topk_prob": True},
            "`norm_topk_prob` False.*got `norm_topk_prob` True",
        ),
        (
            tiny("axk2", n_group=4, topk_group=2).to_dict(),
            "a axk2 must have `n_group` 1, got `n_group` 4",
        ),
        (
            {"num_experts_per_tok": [3, 2]},
            r"`model.num_experts_per_tok` must be one number for all layers, got \[3, 2",
        ),
        (
            {"hidden_act": "gelu"},
            "`hidden_act` must be one of 'silu', 'swish', 'quick_gelu', .*got 'gelu': else set E",
        ),
        ({"hidden_act": ["silu"]}, r"`hidden_act` must be one of .*got \['silu'\]"),
        ({"hidden_act": {}}, r"`hidden_act` must be one of .*got {}"),
        ({"hidden_act": ""}, "`hidden_act` must be one of .*got ''"),
        ({"activation_function": "gelu", "hidden_act": "silu"}, "`hidden_act` must be one func"),
        ({"model_type": ["qwen3_moe"]}, r"model_type \['qwen3_moe'\] is not known"),
        ({"model_type": {}}, "model_type {} is not known"),
        (
            {"num_local_experts": 64},
            "`model.num_experts` must be one number, got `num_experts` 128 and .*_experts` 64",
        ),
        ({"moe_topk": [4, 4]}, "`model.num_experts_per_tok` must be one number, got .* 8 and .* 4"),
        ({"route_norm": False}, "`routing.renormalize` must be one number, got .* True and"),
        (
            {"score_function": "sigmoid"},
            "must have `score_function` 'softmax', got `score_function` 'sigmoid': .*routing={'sco",
        ),
        ({"scoring_func": ["softmax"]}, r"must have `scoring_func` 'softmax', got .* \['softmax'"),
        ({"moe_router_use_sigmoid": True}, "must have `moe_router_use_sigmoid` False, got"),
        ({"use_routing_bias": True}, "must have `use_routing_bias` False, got"),
        ({"topk_method": "noaux_tc"}, "must have `topk_method` 'greedy', got"),
        ({"n_group": 8}, "must have `n_group` 1, got `n_group` 8"),
        ({"route_scale": 2.5}, "must have `route_scale` 1.0, got `route_scale` 2.5"),
        (MINIMAX | {"use_routing_bias": False}, "must have `use_routing_bias` True, got"),
        (AFMOE | {"route_norm": False}, "a afmoe must have `route_norm` True, got"),
        (LING | {"score_function": "softmax"}, "must have `score_function` 'sigmoid', got"),
        (STEP | {"swiglu_limits": [0.0, 16.0]}, "a step3p5 must have `swiglu_limits` None, got"),
        (
            {"swiglu_limit": 7.0},
            r"`swiglu_limit` 7.0 does not say .* experts of a qwen3_moe: .*experts={'limit': …}",
        ),
        ({"mlp_bias": True}, r"`mlp_bias` True does not say .*experts={'biases': …}"),
        (
            {"num_experts": 4},
            r"`model.num_experts_per_tok` must be at most `model.num_experts` = 4, got 8",
        ),
        ({"num_experts": None}, r"`model.num_experts` must be set"),
        ({"torch_dtype": "float8_e4m3fn"}, r"`model.dtype` must be .*bfloat16"),
    ],
)
def test_a_wrong_model_is_named(keys, message):
    with pytest.raises(ConfigError, match=message):
        EPConfig.from_hf(QWEN3 | keys, ep_size=1)


GPT_OSS = {
    **{
        "model_type": "gpt_oss",
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "hidden_size": 64,
    },
    **{"intermediate_size": 64, "hidden_act": "silu"},
}


@pytest.mark.parametrize(
    ("keys", "sections", "want"),
    [
        (GPT_OSS, {}, {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}),
        (  # an act that its code never reads
            GPT_OSS | {"swiglu_limit": 5, "swiglu_alpha": 1.5, "hidden_act": "gelu"},
            {},
            {"interleaved": True, "limit": 5.0, "alpha": 1.5, "up_offset": 1.0},
        ),
        (
            GPT_OSS | {"swiglu_limit": None},
            {"up_offset": 0.5},
            {"interleaved": True, "limit": None, "alpha": 1.702, "up_offset": 0.5},
        ),
        (
            QWEN3 | {"hidden_act": "gelu", "swiglu_limit": 7.0, "mlp_bias": True},
            {"alpha": 1.702, "limit": None, "biases": False},
            {"interleaved": False, "limit": None, "alpha": 1.702, "up_offset": 0.0},
        ),
    ],
)
def test_what_experts_compute_is_read_or_given(keys, sections, want):
    config = EPConfig.from_hf(keys, ep_size=1, experts=sections)
    assert config.experts.options == want | {"batch_invariant": False}
    assert (
        config.experts.biases == (keys["model_type"] == "gpt_oss")
        and not config.experts.weights_on_input
    )
    assert EPConfig(**json.loads(config.model_dump_json())) == config


def test_a_wrong_source_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    # A source, sections of the config, and the error.
    for source, sections, kind, message in (
        (
            "Qwen/Qwen3-30B-A3B",
            {},
            ConfigError,
            "Qwen/Qwen3-30B-A3B: is no file or folder: give a local checkpoint",
        ),
        (tmp_path.parent, {}, ConfigError, "is a folder without config.json"),
        (tmp_path, {}, ConfigError, "config.json: model_type 'llama'"),
        (
            3,
            {},
            TypeError,
            "`source` must be a model or a configuration of transformers, .* got int",
        ),
        (
            QWEN3,
            {"capcity": {"alignment": 2}},
            ConfigError,
            "`capcity` is not a known key; did you mean `capacity`",
        ),
        (QWEN3, {"topology": 8}, ConfigError, "`topology` must be a mapping"),
    ):
        with pytest.raises(kind, match=message):
            EPConfig.from_hf(source, ep_size=1, **sections)


def test_a_model_with_a_selection_bias_is_not_routed_without_it():
    with epmoe.ExpertParallel(EPConfig.from_hf(tiny("deepseek_v3"), ep_size=1)) as ep:
        with pytest.raises(ValueError, match="`bias` must be given"):
            ep.route(torch.zeros(1, E))
        with pytest.raises(ValueError, match="`bias` must be given"):
            epmoe.MoELayer(ep, torch.zeros(E, D), lambda rows, offsets, scales: rows)
        assert (
            epmoe.MoELayer(
                ep, torch.zeros(E, D), lambda rows, offsets, scales: rows, bias=torch.zeros(E)
            ).ep
            is ep
        )


def test_the_page_on_models_has_every_type():
    """The slow test that follows makes the whole table."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|.* yes \| yes \|$", page, re.MULTILINE) == sorted(
        MODEL_TYPES
    )
    refused = page.partition("## Model types that are refused")[2]
    assert dict(re.findall(r"^- `([\w-]+)`: (.*)\.$", refused, re.MULTILINE)) == REFUSED
    tried = re.search(
        r"transformers==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8")
    )
    assert tried and f"transformers {tried[1]}," in page


@pytest.mark.slow
def test_the_page_on_models_has_the_table_that_the_blocks_make():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}," not in page:
        pytest.skip("the table is that of another version of transformers")
    assert moe_blocks.table() in page, "run python tests/moe_blocks.py"


def test_the_page_on_models_has_values_of_checkpoints():
    page = (
        (ROOT / "docs" / "models.md")
        .read_text(encoding="utf-8")
        .partition("## Every model type")[0]
    )
    cells = r"^\| `(\w+)` \|.*\| (softmax|sigmoid) \| (no|\*\*yes\*\*) \|.*\|.*\| (yes|–) \|$"
    rows = re.findall(cells, page, re.MULTILINE)
    assert len(rows) == page.count("\n| `")
    for model_type, scoring, renormalize, bias in rows:
        possible = [EPConfig.from_hf(hf, ep_size=1).routing for hf in variants(model_type)]
        assert (scoring, "yes" in renormalize, bias == "yes") in [
            (routing.scoring, routing.renormalize, routing.selection_bias) for routing in possible
        ]
