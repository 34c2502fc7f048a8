"""What the configuration of a Hugging Face model says about its MoE layers: the one table of model
types.

A row says how routers and experts work, and which keys of the model hold the values of ours.
`tests/test_from_hf.py` compares every row with the whole MoE block of transformers, and finds model
types that are not here. This module needs no transformers, and nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from epmoe.config.config_file import ConfigError, read_config
from epmoe.config.strict import Strict

EXPERTS_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
)  # a model has one of them
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
_ACTIVATION = ("hidden_act", "activation_function")
_PARTS = ("text_config", "thinker_config")
"""Keys of a model of several parts, with the part that has experts."""
_ALPHAS = {"silu": 1.0, "swish": 1.0, "quick_gelu": 1.702}
"""The activations x · sigmoid(alpha · x), as transformers names them."""
_OF_EXPERTS = {
    **{"swiglu_limit": "limit", "swiglu_limits": "limit", "swiglu_alpha": "alpha"},
    **{"mlp_bias": "biases", "use_bias": "biases"},
}
"""Keys of models that may say what their experts compute, with the key of our section `experts`."""
_BY_HAND = (
    "set E, K, D and F by hand, EPConfig(model={'num_experts': …, 'num_experts_per_tok': …, "
    "'hidden_size': …, "
    "'intermediate_size': …}, …)"
)


@dataclass(frozen=True)
class _Row:
    """Model types whose routers and experts work alike."""

    model_types: tuple[str, ...]
    width: str
    """The key of F."""
    routing: Mapping[str, Any]
    """Keys of our section `routing`, with their values."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of our section `routing`, with the keys of the model that have their values."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the model with the values for which the row holds; a model without such a key, or
    with null, has them.
    """
    experts: Mapping[str, Any] = field(default_factory=dict)
    """Keys of our section `experts`, with their values where the model has no key for them."""
    experts_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of our section `experts`, with the keys of the model that may have their values."""
    jitters: bool = False
    """Whether `router_jitter_noise` is that of the MoE blocks."""


_SOFTMAX = {"scoring": "softmax"}
_SIGMOID = {"scoring": "sigmoid"}
_ALWAYS = {"renormalize": True}
_NEVER = {"renormalize": False}
_BIASED = {"selection_bias": True}
_GUARDED = {"renormalize_epsilon": 1e-20}  # of DeepSeek's code
_DEEPSEEK = _SIGMOID | _BIASED | _GUARDED
_AS_CONFIGURED = {"renormalize": "norm_topk_prob"}
_SCALED = {"routed_scaling_factor": "routed_scaling_factor"}
_GROUPED = {"num_expert_groups": "n_group", "top_groups": "topk_group"}
_PLAIN = {
    "scoring_func": "softmax",
    "norm_topk_prob": False,
}  # with True, DeepSeek's code and transformers differ
_OF_KIMI = {
    "renormalize": "moe_renormalize",
    "num_expert_groups": "num_expert_group",
    "top_groups": "topk_group",
}
_WIDTH = "intermediate_size"
_MOE_WIDTH = "moe_intermediate_size"
_CLAMPED = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
_CLAMPED_KEYS = {"limit": "swiglu_limit", "alpha": "swiglu_alpha"}
_SILU = {"alpha": 1.0}  # whatever `hidden_act` is

_ROWS = (
    _Row(
        (
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_omni_moe_text",
            "qwen3_omni_moe_talker_text",
            "qwen4_exp_text",
            "lara_mini",
            "mellum",
        ),
        _MOE_WIDTH,
        _SOFTMAX,
        _AS_CONFIGURED,
    ),
    _Row(("qwen3_vl_moe_text", "qwen3_5_moe_text"), _MOE_WIDTH, _SOFTMAX | _ALWAYS),
    _Row(("olmoe", "flex_olmo"), _WIDTH, _SOFTMAX, _AS_CONFIGURED),
    # A softmax over the K chosen logits, which some of these take, equals the renormalised softmax
    # over all.
    _Row(("mixtral", "minimax"), _WIDTH, _SOFTMAX | _ALWAYS, jitters=True),
    _Row(
        (
            "granitemoe",
            "granitemoeshared",
            "granitemoehybrid",
            "granitemoe_swa",
            "hunyuan_v1_moe",
            "jetmoe",
        ),
        _WIDTH,
        _SOFTMAX | _ALWAYS,
    ),
    _Row(("aria_text",), _WIDTH, _SOFTMAX | _ALWAYS, experts=_SILU),
    _Row(
        ("gpt_oss",),
        _WIDTH,
        _SOFTMAX | _ALWAYS | {"logit_bias": True},
        experts=_CLAMPED | {"interleaved": True, "biases": True},
        experts_keys=_CLAMPED_KEYS,
    ),
    _Row(  # divides weights by K and multiplies outputs by K
        ("openai_privacy_filter",),
        _WIDTH,
        _SOFTMAX | _ALWAYS | {"logit_bias": True},
        experts=_CLAMPED | {"biases": True},
        experts_keys=_CLAMPED_KEYS,
    ),
    _Row(("jamba",), _WIDTH, _SOFTMAX | _NEVER),
    _Row(  # divides by max(sum, 1e-12), which differs where the sum is not far above
        ("ernie4_5_moe",),
        _MOE_WIDTH,
        _SOFTMAX | _ALWAYS | _BIASED | {"renormalize_epsilon": 1e-12},
        only={"moe_norm_min": 1e-12},
    ),
    *(
        _Row(("cohere2_moe",), _WIDTH, routing, keys, chosen | sharing)
        for routing, keys, chosen in (
            (_SOFTMAX | _ALWAYS, {}, {"expert_selection_fn": "softmax"}),
            (_SIGMOID, _AS_CONFIGURED, {"expert_selection_fn": "sigmoid"}),
        )
        for sharing in ({"num_shared_experts": 0}, {"shared_expert_combination_strategy": "sum"})
    ),
    *(
        _Row(
            ("deepseek_v2", "deepseek_ocr2_text", "unlimited_ocr_text"),
            _MOE_WIDTH,
            _SOFTMAX | _NEVER,
            keys | _SCALED,
            _PLAIN | {"topk_method": method},
        )
        for method, keys in (("greedy", {}), ("group_limited_greedy", _GROUPED))
    ),
    _Row(
        ("deepseek_v3", "deepseek_v32", "kimi_k2", "sarvam_mla"),
        _MOE_WIDTH,
        _DEEPSEEK,
        _AS_CONFIGURED | _GROUPED | _SCALED,
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    _Row(
        (
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe_text",
            "glm_moe_dsa",
            "dots1",
            "dots3_note_text",
            "exaone_moe",
            "mimo_v2_flash",
            "solar_open",
            "axk1",
            "beam",
            "sarvam_moe",
        ),
        _MOE_WIDTH,
        _DEEPSEEK,
        _AS_CONFIGURED | _GROUPED | _SCALED,
    ),
    # With groups, experts of all groups stay in the choice, with a score of 0 in place of −Inf.
    _Row(("axk2",), _MOE_WIDTH, _DEEPSEEK, _AS_CONFIGURED | _SCALED, {"n_group": 1}),
    _Row(
        ("hy_v4", "hy_v4_vl_text", "glm5_next_text"),
        _MOE_WIDTH,
        _DEEPSEEK,
        _AS_CONFIGURED | _GROUPED | _SCALED,
        experts=_SILU | {"limit": 10.0},
        experts_keys={"limit": "swiglu_limit"},
    ),
    _Row(
        ("mistral4",),
        _MOE_WIDTH,
        _SOFTMAX | _GUARDED | {"scores_per_group": 2},
        _AS_CONFIGURED | _GROUPED | _SCALED,
    ),
    _Row(
        ("mistral_large4_text",),
        _MOE_WIDTH,
        _SOFTMAX | _ALWAYS | _GUARDED | {"scores_per_group": 2},
        _GROUPED | _SCALED,
    ),
    _Row(("kimi_linear", "bailing_hybrid"), _MOE_WIDTH, _DEEPSEEK, _OF_KIMI | _SCALED),
    _Row(("afmoe",), _MOE_WIDTH, _DEEPSEEK | _ALWAYS, {"routed_scaling_factor": "route_scale"}),
    _Row(
        ("hy_v3",),
        _MOE_WIDTH,
        _DEEPSEEK | _ALWAYS,
        {"routed_scaling_factor": "router_scaling_factor"},
    ),
    _Row(("minimax_m2",), _WIDTH, _SIGMOID | _ALWAYS | _BIASED),
    _Row(
        ("minimax_m3_vl_text",),
        _WIDTH,
        _SIGMOID | _ALWAYS | _BIASED,
        _SCALED,
        experts=_CLAMPED,
        experts_keys=_CLAMPED_KEYS,
    ),
    _Row(
        ("laguna",),
        _MOE_WIDTH,
        _SIGMOID | _ALWAYS | _BIASED,
        {"routed_scaling_factor": "moe_routed_scaling_factor"},
        {"moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False},
    ),
    _Row(
        ("step3p5",),
        _MOE_WIDTH,
        _SIGMOID | _ALWAYS | _BIASED,
        {"routed_scaling_factor": "moe_router_scaling_factor"},
        {"swiglu_limits": None},
    ),
    _Row(("flint",), _MOE_WIDTH, _SIGMOID, _AS_CONFIGURED),
    _Row(
        ("lfm2_moe",),
        _MOE_WIDTH,
        _SIGMOID | {"renormalize_epsilon": 1e-6},
        _AS_CONFIGURED | _SCALED | {"selection_bias": "use_expert_bias"},
    ),
    _Row(("llama4_text",), _WIDTH, _SIGMOID | _NEVER, experts={"weights_on_input": True}),
)

MODEL_TYPES = tuple(dict.fromkeys(name for row in _ROWS for name in row.model_types))
"""The values of `model_type` that are known. A model of several parts has one of them in its
`text_config`.
"""

REFUSED = {
    "dbrx": "its keys lie in `ffn_config`, under names of their own",
    "deepseek_v4": "its scores are neither softmax nor sigmoid, and some layers choose by token id",
    "diffusion_gemma_text": (
        "its router normalises its input and multiplies each weight by a scale of the expert"
    ),
    "doge": "its experts are rows of an embedding, chosen by two keys each",
    "dots3_note_vision_encoder": "its layers have different numbers of experts",
    "ernie4_5_vl_moe_text": "text and images have experts of their own",
    "gemma4_text": (
        "its router normalises its input and multiplies each weight by a scale of the expert"
    ),
    "inkling2_loop_text": "its experts cap gate and up softly",
    "inkling2_text": "its experts cap gate and up softly",
    "inkling_text": "its shared experts have a part in the renormalised weights",
    "kolibri1": "its bias steers the choice by logits, not by scores",
    "longcat_flash": "some of its experts are the identity",
    "muse_spark_text": "each of its experts ends with a norm",
    "nemotron_h": "its experts have no gate",
    "nllb-moe": "its experts have no gate, and drop tokens beyond a capacity",
    "phimoe": "sparsemixer takes a softmax of its own for each expert that it chooses",
    "switch_transformers": "its experts have no gate, and drop tokens beyond a capacity",
    "vitpose_backbone": "the data set of an image chooses the expert",
    "zaya": "its router is an MLP that hands a state from layer to layer",
}
"""Model types with experts that `epmoe.route` and `GroupedExperts` cannot be, with the reason."""


def sections_of(source: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The sections `model`, `routing` and `experts` of a Hugging Face model, and the beginning of
    messages about it.

    Takes and raises as `EPConfig.from_hf`, but checks no values. Keys of the sections `given`
    replace those of the model.
    """
    whole, where = _read(source)
    config = whole
    while config.get("model_type") not in MODEL_TYPES:
        parts = [config[key] for key in _PARTS if isinstance(config.get(key), Mapping)]
        if not parts:
            break
        config = parts[0]
    row = _row_of(config, where)
    keys: dict[str, dict[str, tuple[str, ...]]] = {
        "model": {
            "num_experts": EXPERTS_KEYS,
            "num_experts_per_tok": _TOP_K,
            "hidden_size": ("hidden_size",),
            "intermediate_size": (row.width,),
        },
        "routing": {ours: (theirs,) for ours, theirs in row.keys.items()},
    }
    sections: dict[str, dict[str, Any]] = {"model": {}, "routing": dict(row.routing)}
    missing = []
    for section, wanted in keys.items():
        for ours, names in wanted.items():
            values = [config[name] for name in names if name in config]
            for value in values:
                if isinstance(value, list) and value:  # one for each layer
                    if any(each != value[0] for each in value):
                        raise ConfigError(
                            f"{where}`{section}.{ours}` must be one number for all layers, got "
                            f"{value}"
                        )
                    value = value[0]
                if value is not None:  # null is our default: no groups, factor 1
                    sections[section][ours] = value
            if not values and ours not in _mapping(given.get(section)):
                missing.append(f"`{' or '.join(names)}` (our `{section}.{ours}`)")
    if missing:
        raise ConfigError(
            f"{where}a {config['model_type']} must have the keys {', '.join(missing)}"
        )
    if row.jitters and (noise := config.get("router_jitter_noise")):
        sections["routing"]["jitter_noise"] = noise
    sections["experts"] = _experts(row, config, where, _mapping(given.get("experts")))
    dtypes = (part.get(key) for part in (whole, config) for key in ("dtype", "torch_dtype"))
    dtype = next(filter(None, dtypes), None)
    if dtype:
        sections["model"]["dtype"] = dtype
    for section, values in given.items():
        if isinstance(values, Mapping | Strict):
            sections[section] = sections.get(section, {}) | _mapping(values)
        else:
            sections[section] = values  # EPConfig refuses it, by its name
    return sections, where


def _read(source: Any) -> tuple[dict[str, Any], str]:
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            what = "a folder without config.json" if path.is_dir() else "no file or folder"
            raise ConfigError(
                f"{path}: is {what}: give a local checkpoint, as nothing is downloaded"
            )
        return read_config(file, holds="the keys of a model, as config.json does"), f"{file}: "
    if isinstance(source, Mapping):
        return dict(source), ""
    config = getattr(source, "config", source)
    if not hasattr(config, "to_dict"):
        raise TypeError(
            "`source` must be a model or a configuration of transformers, a dict of its keys, or a "
            "path, got "
            f"{type(source).__name__}"
        )
    keys = dict(config.to_dict())
    if config is not source and isinstance(dtype := getattr(source, "dtype", None), torch.dtype):
        keys["dtype"] = str(dtype).removeprefix("torch.")  # which may have been cast
    return keys, f"{type(config).__name__}: "


def _experts(
    row: _Row, config: Mapping[str, Any], where: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Our section `experts`. Raises ConfigError where the model may have experts that the section
    does not describe.
    """
    found = dict(row.experts) | {
        ours: config[theirs] for ours, theirs in row.experts_keys.items() if theirs in config
    }
    for theirs, ours in _OF_EXPERTS.items():
        if config.get(theirs) and theirs not in row.experts_keys.values() and ours not in given:
            raise ConfigError(
                f"{where}`{theirs}` {config[theirs]!r} does not say whether it holds for the "
                "experts of a "
                f"{config['model_type']}: give what does, experts={{{ours!r}: …}}"
            )
    act = next(filter(None, map(config.get, _ACTIVATION)), "silu")
    if act in list(_ALPHAS):
        return {"alpha": _ALPHAS[act]} | found
    if "alpha" not in {**found, **given}:
        raise ConfigError(
            f"{where}`hidden_act` must be one of {', '.join(map(repr, _ALPHAS))}, since "
            "`GroupedExperts` compute "
            f"gate · sigmoid(alpha · gate), got {act!r}: else {_BY_HAND}, and give `MoELayer` "
            "experts of your own"
        )
    return found


def _row_of(config: Mapping[str, Any], where: str) -> _Row:
    model_type = config.get("model_type")
    rows = [row for row in _ROWS if model_type in row.model_types]
    for row in rows:
        if all(config.get(key) in (None, value) for key, value in row.only.items()):
            return row
    if rows:
        got = ", ".join(f"`{key}` {config[key]!r}" for key in rows[0].only if key in config)
        known = " or ".join(
            ", ".join(f"`{key}` {value!r}" for key, value in row.only.items()) for row in rows
        )
        raise ConfigError(
            f"{where}a {model_type} must have {known}, got {got}: else {_BY_HAND}, and give ids "
            "and weights"
        )
    if model_type in REFUSED:
        raise ConfigError(
            f"{where}a {model_type} is not read, since {REFUSED[model_type]}: {_BY_HAND}, and give "
            "ids and weights of "
            "the model's own router to `dispatch`, and `MoELayer` experts of your own"
        )
    raise ConfigError(
        f"{where}model_type {model_type!r} is not known: {_BY_HAND}, and of `routing` what its "
        "router does: 'scoring', "
        "'renormalize', 'selection_bias', 'num_expert_groups', 'top_groups' and "
        "'routed_scaling_factor'. Known are "
        f"{', '.join(MODEL_TYPES)}"
    )


def _mapping(section: Any) -> dict[str, Any]:
    if isinstance(section, Strict):
        return section.model_dump(exclude_unset=True)
    return dict(section) if isinstance(section, Mapping) else {}
