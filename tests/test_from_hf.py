"""`EPConfig.from_hf`: every row of its table equals transformers; sources, overrides, errors."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT, assert_close, randn
from torch import Tensor, nn

import epmoe
from epmoe import ConfigError, EPConfig
from epmoe.config.from_hf import MODEL_TYPES, OTHER_ROUTERS

pytest.importorskip("transformers")
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("serving")

T, E, K, D, F = 200, 16, 4, 64, 48
SHAPE = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k"), K),
    **{"hidden_size": D, "dtype": "float32"},
    **{"n_group": 4, "num_expert_group": 4, "topk_group": 2},
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor"), 2.5),
}
VARIANTS: dict[str, list[dict[str, Any]]] = {"deepseek_v2": [{"topk_method": "group_limited_greedy"}, {}]}
QWEN3 = {
    **{"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048},
    **{"intermediate_size": 6144, "moe_intermediate_size": 768, "norm_topk_prob": True, "torch_dtype": "bfloat16"},
}
"""What Qwen3-30B-A3B has in its config.json."""
MAVERICK = {
    **{"model_type": "llama4_text", "num_local_experts": 128, "num_experts_per_tok": 1, "hidden_size": 5120},
    **{"intermediate_size": 8192, "torch_dtype": "bfloat16", "hidden_act": "silu"},
}
"""The `text_config` of Llama-4-Maverick-17B-128E."""


def tiny(model_type: str, **keys: Any) -> Any:
    """A configuration of transformers, in which the width of the experts is F and other widths are not."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    made = CONFIG_MAPPING[model_type]
    default = made()
    moe = hasattr(default, "moe_intermediate_size")
    wanted = (
        SHAPE | {"intermediate_size": 2 * F, "moe_intermediate_size": F} if moe else SHAPE | {"intermediate_size": F}
    )
    return made(**{key: value for key, value in wanted.items() if hasattr(default, key)} | keys)


def variants(model_type: str) -> Iterator[Any]:
    """`tiny`, renormalised and not where the model type has both."""
    for keys in VARIANTS.get(model_type, [{}]):
        norm = next((key for key in ("moe_renormalize", "norm_topk_prob") if hasattr(tiny(model_type), key)), None)
        if norm is None or model_type == "deepseek_v2":  # of which one alone is known
            yield tiny(model_type, **keys)
        else:
            yield from (tiny(model_type, **keys, **{norm: value}) for value in (True, False))


def part(config: Any, ends: str) -> nn.Module:
    """The router or the experts of a layer of transformers, with random parameters and buffers."""
    folder = type(config).__module__.split(".")[-2]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    (found,) = (made for name, made in vars(module).items() if re.search(ends, name) and inspect.isclass(made))
    made: nn.Module = found(config)
    for seed, tensor in enumerate([*made.parameters(), *made.buffers()]):
        tensor.data = randn(*tensor.shape, seed=seed) / (8 if tensor.dim() > 1 else 3)
    return made


def routed(router: nn.Module) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits [T, E], the bias of the choice if there is one, and the weights of all experts [T, E]: 0 if not chosen."""
    bias = next((b.flatten() for name, b in router.state_dict().items() if "correction" in name), None)
    if {"e_score_correction_bias", "expert_bias"} & inspect.signature(router.forward).parameters.keys():
        bias = randn(E, seed=7) / 3
        logits, weights, ids = router(randn(T, D, seed=8), bias)
    else:
        logits, weights, ids = (*router(randn(T, D, seed=8)), None)[:3]
    if ids is None:  # llama4 gives the weights of all experts, and then the logits
        return weights, bias, logits
    return logits, bias, torch.zeros(T, E).scatter(1, ids, weights)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@torch.no_grad()
def test_a_row_routes_as_transformers_does(model_type: str) -> None:
    for hf in variants(model_type):
        config = EPConfig.from_hf(hf, ep_size=1)
        shape = config.model.num_experts, config.model.num_experts_per_tok, config.model.hidden_size
        assert (*shape, config.model.intermediate_size, config.model.dtype) == (E, K, D, F, "float32")
        assert sorted(part(hf, "Experts$").down_proj.shape) == sorted((E, D, F))
        router = part(hf, r"(Top[kK]|Llama4)Router$")
        logits, bias, want = routed(router)
        assert config.routing.logit_bias == ("bias" in dict(router.named_parameters()))
        assert config.routing.selection_bias == (bias is not None)
        with epmoe.ExpertParallel(config) as ep:
            ids, weights = ep.route(logits.float(), bias)
        got = torch.zeros(T, E).scatter(1, ids.long(), weights)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert torch.equal(got == 0, want == 0)


@pytest.mark.parametrize("act", ["silu", "swish", "quick_gelu"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@torch.no_grad()
def test_a_row_has_the_experts_of_transformers(model_type: str, act: str) -> None:
    hf = tiny(model_type, **{"hidden_act": act} if hasattr(tiny(model_type), "hidden_act") else {})
    hf._experts_implementation = "eager"
    config = EPConfig.from_hf(hf, ep_size=1).experts
    theirs = part(hf, "Experts$")
    weights = {name.replace("_proj", ""): tensor.data for name, tensor in theirs.named_parameters()}
    biases = {name: weights.pop(name) * 30 for name in sorted(weights) if name.endswith("_bias")}  # beyond the limit
    for name, tensor in biases.items():
        getattr(theirs, name.replace("_bias", "_proj_bias")).copy_(tensor)
    transposed = weights["down"].shape[1:] == (F, D)
    ours = {f"w_{name}": tensor.mT if transposed else tensor for name, tensor in weights.items()}
    assert config.biases == bool(biases)
    rows, weight = randn(2 * E, D, seed=9), torch.full((2 * E, 1), 0.5)
    if config.weights_on_input:
        want = theirs(rows * weight)
        rows = rows * weight
    else:
        want = 2 * theirs(rows, torch.arange(E).repeat_interleave(2)[:, None], weight)
    experts = epmoe.GroupedExperts(**ours, **biases, **config.options)
    assert_close(experts(rows, torch.arange(0, 2 * E + 1, 2, dtype=torch.int32)), want.double(), slack=4)


def test_what_a_source_may_be(tmp_path: Path) -> None:
    hf = tiny("qwen3_moe", norm_topk_prob=True, num_hidden_layers=1, vocab_size=32)
    want = EPConfig.from_hf(hf, ep_size=2)
    assert want.topology.ep_size == 2
    hf.save_pretrained(tmp_path)
    for source in (
        hf.to_dict(),
        tmp_path,
        str(tmp_path / "config.json"),
        {"model_type": "vl", "text_config": hf.to_dict()},
    ):
        assert EPConfig.from_hf(source, ep_size=2) == want
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
        ("h200x8_llama4_maverick", 8, MAVERICK),
    ],
)
def test_the_ready_configurations_are_those_of_the_models(ready: str, ep_size: int, source: Any) -> None:
    """Class defaults of transformers are those of these checkpoints, but for Qwen3's and Llama 4's."""
    want = EPConfig.load(ready)
    got = EPConfig.from_hf(CONFIG_MAPPING[source]() if isinstance(source, str) else source, ep_size=ep_size)
    assert (got.model, got.experts) == (want.model, want.experts)
    assert got.routing.model_copy(update={"selection_bias": False}) == want.routing


def test_sections_replace_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key: value for key, value in QWEN3.items() if key != "norm_topk_prob"}
    with pytest.raises(
        ConfigError, match=r"^a qwen3_moe must have the keys `norm_topk_prob` \(our `routing.renormalize`\)"
    ):
        EPConfig.from_hf(keys, ep_size=8)
    monkeypatch.setenv("EPMOE_CAPACITY__ALIGNMENT", "4")
    config = EPConfig.from_hf(
        keys,
        ep_size=8,
        routing={"renormalize": True},
        model={"dtype": "float32"},
        topology={"ranks_per_node": 4},
        capacity={"alignment": 2},
    )
    assert (config.routing.renormalize, config.model.dtype, config.model.num_experts) == (True, "float32", 128)
    assert (config.topology.ep_size, config.topology.ranks_per_node, config.capacity.alignment) == (8, 4, 4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "llama"}, r"model_type 'llama' is not known: .*'num_experts_per_tok'.*Known are qwen2_moe, .*"),
        ({"model_type": None}, "model_type None is not known"),
        ({"model_type": "phimoe"}, "cannot be the router of phimoe, since sparsemixer .* `dispatch`"),
        (
            {"model_type": "deepseek_v3", "scoring_func": "softmax"},
            r"`scoring_func` 'sigmoid', got `scoring_func` 'softmax'",
        ),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "`norm_topk_prob` False.*got `norm_topk_prob` True"),
        (
            {"hidden_act": "gelu"},
            r"`hidden_act` must be one of 'silu', 'swish', 'quick_gelu', .*got 'gelu': else set E.* of your own",
        ),
        ({"hidden_act": ["silu"]}, r"`hidden_act` must be one of .*got \['silu'\]"),
        ({"swiglu_limit": 7.0}, r"`swiglu_limit` 7.0 does not say .* experts of a qwen3_moe: .*experts={'limit': …}"),
        ({"mlp_bias": True}, r"`mlp_bias` True does not say .*experts={'biases': …}"),
        ({"num_experts": 4}, r"`model.num_experts_per_tok` must be at most `model.num_experts` = 4, got 8"),
        ({"num_experts": None}, r"`model.num_experts` must be set"),
        ({"torch_dtype": "float8_e4m3fn"}, r"`model.dtype` must be .*bfloat16"),
    ],
)
def test_a_wrong_model_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EPConfig.from_hf(QWEN3 | keys, ep_size=1)


GPT_OSS = {
    **{"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "hidden_size": 64},
    **{"intermediate_size": 64, "hidden_act": "silu"},
}


@pytest.mark.parametrize(
    ("keys", "sections", "want"),
    [
        (GPT_OSS, {}, {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}),
        (
            GPT_OSS
            | {"swiglu_limit": 5, "swiglu_alpha": 1.5, "hidden_act": "gelu"},  # an act that its code never reads
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
def test_what_experts_compute_is_read_or_given(
    keys: dict[str, Any], sections: dict[str, Any], want: dict[str, Any]
) -> None:
    config = EPConfig.from_hf(keys, ep_size=1, experts=sections)
    assert config.experts.options == want | {"batch_invariant": False}
    assert config.experts.biases == (keys["model_type"] == "gpt_oss") and not config.experts.weights_on_input
    assert EPConfig(**json.loads(config.model_dump_json())) == config


def test_a_wrong_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Qwen/Qwen3-30B-A3B: is no file or folder: give a local checkpoint"):
        EPConfig.from_hf("Qwen/Qwen3-30B-A3B", ep_size=1)
    with pytest.raises(ConfigError, match="is a folder without config.json"):
        EPConfig.from_hf(tmp_path, ep_size=1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="config.json: model_type 'llama'"):
        EPConfig.from_hf(tmp_path, ep_size=1)
    with pytest.raises(TypeError, match="`source` must be a model or a configuration of transformers, .* got int"):
        EPConfig.from_hf(3, ep_size=1)
    with pytest.raises(ConfigError, match="`capcity` is not a known key; did you mean `capacity`"):
        EPConfig.from_hf(QWEN3, ep_size=1, capcity={"alignment": 2})
    with pytest.raises(ConfigError, match="`topology` must be a mapping"):
        EPConfig.from_hf(QWEN3, ep_size=1, topology=8)


def test_a_model_with_a_selection_bias_is_not_routed_without_it() -> None:
    with epmoe.ExpertParallel(EPConfig.from_hf(tiny("deepseek_v3"), ep_size=1)) as ep:
        with pytest.raises(ValueError, match="`bias` must be given"):
            ep.route(torch.zeros(1, E))
        with pytest.raises(ValueError, match="`bias` must be given"):
            epmoe.MoELayer(ep, torch.zeros(E, D), lambda rows, offsets, scales: rows)
        assert epmoe.MoELayer(ep, torch.zeros(E, D), lambda rows, offsets, scales: rows, bias=torch.zeros(E)).ep is ep


def test_the_page_on_models_says_what_the_table_does() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+)`", page)) >= {*MODEL_TYPES, *OTHER_ROUTERS}
    cells = r"^\| `(\w+)` \|.*\| (softmax|sigmoid) \| (no|\*\*yes\*\*) \|.*\|.*\| (yes|–) \|$"
    rows = re.findall(cells, page, re.MULTILINE)
    assert len(rows) == page.count("\n| `")
    for model_type, scoring, renormalize, bias in rows:
        possible = [EPConfig.from_hf(hf, ep_size=1).routing for hf in variants(model_type)]
        assert (scoring, "yes" in renormalize, bias == "yes") in [
            (routing.scoring, routing.renormalize, routing.selection_bias) for routing in possible
        ]
