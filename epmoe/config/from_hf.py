"""Reads our configuration of MoE layers from the configuration of a Hugging Face model.

The table `_ROWS` has a row for each kind of model. A row says how the routers and experts of these
models work, and under which keys the model has the values of our keys. `tests/test_from_hf.py`
compares every row with the whole MoE block of transformers, and finds model types that the table
lacks. This module needs no transformers, and downloads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from epmoe.config.config_file import ConfigError, read_config
from epmoe.config.strict import Strict

EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NAMES = {
    "num_experts": EXPERTS_KEYS,
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_k",
        "moe_topk",
        "moe_top_k",
    ),
    "hidden_size": ("hidden_size",),
    "renormalize": ("norm_topk_prob", "moe_renormalize", "route_norm", "norm_expert_weight"),
    "selection_bias": (
        "use_expert_bias",
        "use_routing_bias",
        "use_moe_router_bias",
        "moe_router_enable_expert_bias",
        "moe_use_aux_free",
    ),
    "num_expert_groups": ("n_group", "num_expert_group"),
    "top_groups": ("topk_group",),
    "routed_scaling_factor": (
        "routed_scaling_factor",
        "router_scaling_factor",
        "route_scale",
        "moe_routed_scaling_factor",
        "moe_router_scaling_factor",
    ),
}
"""For each of our keys, the names that models use for it. A name may occur in a model of any type:
the same model may be shipped with one name, and be saved by transformers with another. If a model
has several of the names, their values must agree.
"""
_ACTIVATION = ("hidden_act", "activation_function")
PART_KEYS = ("text_config", "thinker_config", "llm_config", "language_config")
"""The keys under which a model of several parts, such as one for text and images, has the part with
experts.
"""
_PART_TYPES = {
    "kimi_k25": "deepseek_v3",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "step3p7": "step3p5",
}
"""For some types of models, the type of their part with experts. All others call it `TYPE_text`."""
_ALPHAS = {"silu": 1.0, "swish": 1.0, "quick_gelu": 1.702}
"""The activations x · sigmoid(alpha · x), as transformers names them."""
_OF_EXPERTS = {
    "swiglu_limit": "limit",
    "swiglu_limits": "limit",
    "swiglu_alpha": "alpha",
    "mlp_bias": "biases",
    "use_bias": "biases",
}
"""Keys of models that may say what their experts compute, each with the key of our section
`experts` that has this meaning.
"""
_BY_HAND = (
    "set E, K, D and F by hand, EPConfig(model={'num_experts': …, 'num_experts_per_tok': …, "
    "'hidden_size': …, 'intermediate_size': …}, …)"
)

_SCORINGS = {"softmax": "softmax", "sigmoid": "sigmoid", "noaux_tc": "sigmoid"}
_YES_OR_NO = {True: True, False: False}
_ONE_GROUP_OR_FALSE = {1: 1, False: 1}  # Hunyuan writes false for none
_ONE_OR_FALSE = {1.0: 1.0, False: 1.0}
_SAYS: Mapping[str, tuple[str, Mapping[Any, Any]]] = {
    **dict.fromkeys(
        (
            "scoring_func",
            "score_func",
            "score_function",
            "expert_selection_fn",
            "moe_router_activation",
            "moe_router_activation_func",
            "moe_router_score_function",
        ),
        ("scoring", _SCORINGS),
    ),
    "moe_router_use_sigmoid": ("scoring", {True: "sigmoid", False: "softmax"}),
    "topk_method": (
        "selection_bias",
        {"noaux_tc": True, "greedy": False, "group_limited_greedy": False},
    ),
    **dict.fromkeys(_NAMES["selection_bias"], ("selection_bias", _YES_OR_NO)),
    **dict.fromkeys(_NAMES["renormalize"], ("renormalize", _YES_OR_NO)),
    **dict.fromkeys(_NAMES["num_expert_groups"], ("num_expert_groups", _ONE_GROUP_OR_FALSE)),
    **dict.fromkeys(_NAMES["routed_scaling_factor"], ("routed_scaling_factor", _ONE_OR_FALSE)),
}
"""Other keys by which models describe their routers. Each has the key of our section `routing` with
the same meaning, and our value for each value of the model. If a row of the table sets our key, the
model must say the same.
"""
_USUAL = {
    "renormalize": False,
    "selection_bias": False,
    "num_expert_groups": 1,
    "routed_scaling_factor": 1.0,
}
"""The values of our keys in `_SAYS` for a row that does not set them."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Types of models whose routers and experts work alike."""

    types: str
    """Model types, with spaces between them."""
    width: str
    """The key of the model for F, the width of an expert."""
    routing: Mapping[str, Any]
    """Keys of our section `routing`, with their values."""
    reads: tuple[str, ...] = ()
    """Keys of our section `routing` whose values come from the model, under the names in `_NAMES`.
    """
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys in `reads` for a model that lacks them. They are the defaults of the model's
    class in transformers. A row for several types whose classes have different defaults has none.
    """
    ignores: tuple[str, ...] = ()
    """Keys of our section `routing` that the model may have, although its code does not read
    them.
    """
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the model, with the values that they must have for this row to apply. The row also
    applies to a model in which such a key is missing or null.
    """
    experts: Mapping[str, Any] = field(default_factory=dict)
    """Keys of our section `experts`, with their values for a model that has no key for them."""
    experts_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of our section `experts`, with the keys of the model that may have their values."""
    jitters: bool = False
    """Whether the MoE blocks of the model use its key `router_jitter_noise`."""

    @property
    def model_types(self) -> tuple[str, ...]:
        return tuple(self.types.split())


_SOFTMAX = {"scoring": "softmax"}
_SIGMOID = {"scoring": "sigmoid"}
_ALWAYS = {"renormalize": True}
_NEVER = {"renormalize": False}
_BIASED = {"selection_bias": True}
_GUARDED = {"renormalize_epsilon": 1e-20}  # of DeepSeek's code
_DEEPSEEK = _SIGMOID | _BIASED | _GUARDED
_PAIRS = {"scores_per_group": 2}

_NORM = ("renormalize",)
_FACTOR = ("routed_scaling_factor",)
_GROUPS = ("num_expert_groups", "top_groups")
_ONE_GROUP = {"num_expert_groups": 1, "top_groups": 1}

_WIDTH = "intermediate_size"
_MOE_WIDTH = "moe_intermediate_size"
_CLAMPED = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
_CLAMPED_KEYS = {"limit": "swiglu_limit", "alpha": "swiglu_alpha"}
_SILU = {"alpha": 1.0}  # whatever `hidden_act` is


def _cohere2(sharing: Mapping[str, Any]) -> tuple[_Row, _Row]:
    """Make the rows of Cohere's two routers, with shared experts as `sharing` says."""
    return (
        _Row(
            types="cohere2_moe",
            width=_WIDTH,
            routing=_SOFTMAX | _ALWAYS,
            ignores=_NORM,
            only={"expert_selection_fn": "softmax", **sharing},
        ),
        _Row(
            types="cohere2_moe",
            width=_WIDTH,
            routing=_SIGMOID,
            reads=_NORM,
            defaults=_ALWAYS,
            only={"expert_selection_fn": "sigmoid", **sharing},
        ),
    )


# A softmax over the K chosen logits, which some of these take, equals the renormalised softmax over
# all.
_ROWS = (
    _Row(
        types="qwen2_moe qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_omni_moe_talker_text "
        "qwen4_exp_text lara_mini mellum",
        width=_MOE_WIDTH,
        routing=_SOFTMAX,
        reads=_NORM,
    ),
    _Row(types="qwen3_vl_moe_text qwen3_5_moe_text", width=_MOE_WIDTH, routing=_SOFTMAX | _ALWAYS),
    _Row(types="olmoe flex_olmo", width=_WIDTH, routing=_SOFTMAX, reads=_NORM),
    _Row(types="mixtral minimax", width=_WIDTH, routing=_SOFTMAX | _ALWAYS, jitters=True),
    _Row(
        types="granitemoe granitemoeshared granitemoehybrid granitemoe_swa hunyuan_v1_moe jetmoe",
        width=_WIDTH,
        routing=_SOFTMAX | _ALWAYS,
    ),
    _Row(types="aria_text", width=_WIDTH, routing=_SOFTMAX | _ALWAYS, experts=_SILU),
    _Row(
        types="gpt_oss",
        width=_WIDTH,
        routing=_SOFTMAX | _ALWAYS | {"logit_bias": True},
        experts=_CLAMPED | {"interleaved": True, "biases": True},
        experts_keys=_CLAMPED_KEYS,
    ),
    # It divides weights by K and multiplies outputs by K.
    _Row(
        types="openai_privacy_filter",
        width=_WIDTH,
        routing=_SOFTMAX | _ALWAYS | {"logit_bias": True},
        experts=_CLAMPED | {"biases": True},
        experts_keys=_CLAMPED_KEYS,
    ),
    _Row(types="jamba", width=_WIDTH, routing=_SOFTMAX | _NEVER),
    # It divides by max(sum, 1e-12), which differs where the sum is not far above.
    _Row(
        types="ernie4_5_moe",
        width=_MOE_WIDTH,
        routing=_SOFTMAX | _ALWAYS | _BIASED | {"renormalize_epsilon": 1e-12},
        only={"moe_norm_min": 1e-12},
    ),
    *_cohere2({"num_shared_experts": 0}),
    *_cohere2({"shared_expert_combination_strategy": "sum"}),
    # With `norm_topk_prob`, DeepSeek's code and transformers differ.
    _Row(
        types="deepseek_v2 deepseek_ocr2_text unlimited_ocr_text",
        width=_MOE_WIDTH,
        routing=_SOFTMAX | _NEVER,
        reads=_FACTOR,
        ignores=_GROUPS,
        only={"topk_method": "greedy"},
    ),
    _Row(
        types="deepseek_v2 deepseek_ocr2_text unlimited_ocr_text",
        width=_MOE_WIDTH,
        routing=_SOFTMAX | _NEVER,
        reads=_GROUPS + _FACTOR,
        only={"topk_method": "group_limited_greedy"},
    ),
    _Row(
        types="deepseek_v3 deepseek_v32 kimi_k2 sarvam_mla",
        width=_MOE_WIDTH,
        routing=_DEEPSEEK,
        reads=_NORM + _GROUPS + _FACTOR,
    ),
    _Row(
        types="glm4_moe glm4_moe_lite glm4v_moe_text glm_moe_dsa dots1 dots3_note_text exaone_moe "
        "mimo_v2_flash solar_open axk1 beam sarvam_moe",
        width=_MOE_WIDTH,
        routing=_DEEPSEEK,
        reads=_NORM + _GROUPS + _FACTOR,
    ),
    # With groups, experts of all groups stay in the choice, with a score of 0 in place of −Inf.
    _Row(
        types="axk2",
        width=_MOE_WIDTH,
        routing=_DEEPSEEK,
        reads=_NORM + _FACTOR,
        defaults=_ALWAYS | {"routed_scaling_factor": 2.5},
    ),
    _Row(
        types="hy_v4 hy_v4_vl_text glm5_next_text",
        width=_MOE_WIDTH,
        routing=_DEEPSEEK,
        reads=_NORM + _GROUPS + _FACTOR,
        experts=_SILU | {"limit": 10.0},
        experts_keys={"limit": "swiglu_limit"},
    ),
    _Row(
        types="mistral4",
        width=_MOE_WIDTH,
        routing=_SOFTMAX | _GUARDED | _PAIRS,
        reads=_NORM + _GROUPS + _FACTOR,
        defaults=_ALWAYS | _ONE_GROUP | {"routed_scaling_factor": 1.0},
    ),
    _Row(
        types="mistral_large4_text",
        width=_MOE_WIDTH,
        routing=_SOFTMAX | _ALWAYS | _GUARDED | _PAIRS,
        reads=_GROUPS + _FACTOR,
        defaults=_ONE_GROUP | {"routed_scaling_factor": 1.0},
    ),
    _Row(
        types="kimi_linear",
        width=_MOE_WIDTH,
        routing=_DEEPSEEK,
        reads=_NORM + _GROUPS + _FACTOR,
        defaults=_ALWAYS | _ONE_GROUP | {"routed_scaling_factor": 2.446},
    ),
    _Row(
        types="bailing_hybrid",
        width=_MOE_WIDTH,
        routing=_DEEPSEEK,
        reads=_NORM + _GROUPS + _FACTOR,
        defaults=_ALWAYS | {"num_expert_groups": 8, "top_groups": 4, "routed_scaling_factor": 2.5},
    ),
    _Row(
        types="afmoe",
        width=_MOE_WIDTH,
        routing=_DEEPSEEK | _ALWAYS,
        reads=_FACTOR,
        defaults={"routed_scaling_factor": 1.0},
    ),
    _Row(
        types="hy_v3",
        width=_MOE_WIDTH,
        routing=_DEEPSEEK | _ALWAYS,
        reads=_FACTOR,
        defaults={"routed_scaling_factor": 2.826},
    ),
    _Row(types="minimax_m2", width=_WIDTH, routing=_SIGMOID | _ALWAYS | _BIASED, jitters=True),
    _Row(
        types="minimax_m3_vl_text",
        width=_WIDTH,
        routing=_SIGMOID | _ALWAYS | _BIASED,
        reads=_FACTOR,
        defaults={"routed_scaling_factor": 2.0},
        experts=_CLAMPED,
        experts_keys=_CLAMPED_KEYS,
    ),
    _Row(
        types="laguna",
        width=_MOE_WIDTH,
        routing=_SIGMOID | _ALWAYS | _BIASED,
        reads=_FACTOR,
        defaults={"routed_scaling_factor": 1.0},
        only={"moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False},
    ),
    _Row(
        types="step3p5",
        width=_MOE_WIDTH,
        routing=_SIGMOID | _ALWAYS | _BIASED,
        reads=_FACTOR,
        defaults={"routed_scaling_factor": 1.0},
        only={"swiglu_limits": None},
    ),
    _Row(types="flint", width=_MOE_WIDTH, routing=_SIGMOID, reads=_NORM, defaults=_ALWAYS),
    _Row(
        types="lfm2_moe",
        width=_MOE_WIDTH,
        routing=_SIGMOID | {"renormalize_epsilon": 1e-6},
        reads=_NORM + _FACTOR + ("selection_bias",),
        defaults=_ALWAYS | _BIASED | {"routed_scaling_factor": 1.0},
    ),
    _Row(
        types="llama4_text",
        width=_WIDTH,
        routing=_SIGMOID | _NEVER,
        experts={"weights_on_input": True},
    ),
)

MODEL_TYPES = tuple(dict.fromkeys(name for row in _ROWS for name in row.model_types))
"""The values of `model_type` that are known. A model of several parts has one of them in one of
`PART_KEYS`.
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


def sections_of(source: Any, overrides: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Make the sections `model`, `routing` and `experts` of our config for a Hugging Face model.
    Also returns the words with which messages about the model begin.

    `source` is that of `EPConfig.from_hf`, whose errors it raises, but `EPConfig` checks the values
    later. Keys of the sections `overrides` replace those of the model.
    """
    whole, where = _read(source)
    config = _part_with_experts(whole)
    row = _row_of(config, where)

    # Take the values of the row, and of the model where the row says so.
    _check_says(row, config, where, _mapping(overrides.get("routing")))
    sections = _values(row, config, where, overrides)
    if row.jitters and config.get("router_jitter_noise"):
        sections["routing"]["jitter_noise"] = config["router_jitter_noise"]
    sections["experts"] = _experts(row, config, where, _mapping(overrides.get("experts")))
    dtype = _dtype_of(whole, config)
    if dtype:
        sections["model"]["dtype"] = dtype

    # Keys of the caller replace all others.
    for section, values in overrides.items():
        if isinstance(values, Mapping | Strict):
            sections[section] = sections.get(section, {}) | _mapping(values)
        else:
            # This is no section. EPConfig refuses it later, with its name.
            sections[section] = values
    return sections, where


def _dtype_of(whole: Mapping[str, Any], part: Mapping[str, Any]) -> Any:
    """The dtype that a model names, or None. The dtype of the whole model counts before that of its
    part, and the key `dtype` before the older key `torch_dtype`.
    """
    for config in (whole, part):
        for key in ("dtype", "torch_dtype"):
            if config.get(key):
                return config[key]
    return None


def _part_with_experts(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the part of a model that has experts: the outermost one whose type is in the table. If
    there is none, return the innermost part.
    """
    # Go inwards, to the first part of a known type. `around` is the part that contains `config`.
    around = whole
    config = whole
    while not _is_type(config.get("model_type"), MODEL_TYPES):
        parts = [config[key] for key in PART_KEYS if isinstance(config.get(key), Mapping)]
        if not parts:
            break
        around = config
        config = parts[0]

    # A part may have no type, or a type that only the code of its authors knows. Its type then
    # follows from the type of the part around it.
    known = (*MODEL_TYPES, *REFUSED)
    if config is whole or _is_type(config.get("model_type"), known):
        return config
    outer_type = around.get("model_type")
    part_type = f"{outer_type}_text"
    if isinstance(outer_type, str):
        part_type = _PART_TYPES.get(outer_type, part_type)
    if part_type in known:
        return {**config, "model_type": part_type}
    return config


def _is_type(model_type: object, of: Iterable[str]) -> bool:
    return isinstance(model_type, str) and model_type in of


def _values(
    row: _Row, config: Mapping[str, Any], where: str, overrides: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Read the sections `model` and `routing`. Raises ConfigError if the model lacks a key that the
    caller does not give in `overrides` either.
    """
    sections: dict[str, dict[str, Any]] = {"model": {}, "routing": dict(row.routing)}
    of_model = ("num_experts", "num_experts_per_tok", "hidden_size", "intermediate_size")
    wanted = [("model", key) for key in of_model]
    wanted += [("routing", key) for key in row.reads]
    missing = []
    for section, ours in wanted:
        if ours in _mapping(overrides.get(section)):
            continue
        # Only the width of an expert is not in `_NAMES`: each row has its own name for it.
        names = _NAMES.get(ours, (row.width,))
        held = [name for name in names if name in config]
        if held:
            value = _agreed(config, held, where, f"{section}.{ours}")
            # If the model says null, our default holds, such as no groups or the factor 1.
            if value is not None:
                sections[section][ours] = value
        elif ours in row.defaults:
            sections[section][ours] = row.defaults[ours]
        else:
            missing.append(f"`{names[0]}` (our `{section}.{ours}`)")
    if missing:
        raise ConfigError(
            f"{where}a {config['model_type']} must have the keys {', '.join(missing)}"
        )
    return sections


def _agreed(config: Mapping[str, Any], names: Sequence[str], where: str, ours: str) -> Any:
    """The value that a model has under these names, or None if all of them are null. Raises
    ConfigError if the values of two names, or of two layers, differ.
    """
    values: dict[str, Any] = {}
    for name in names:
        value = config[name]
        # A list has one value for each layer.
        if isinstance(value, list) and value:
            if any(layer_value != value[0] for layer_value in value):
                raise ConfigError(f"{where}`{ours}` must be one number for all layers, got {value}")
            value = value[0]
        if value is not None:
            values[name] = value
    if not values:
        return None
    first, *others = values
    for other in others:
        if values[other] != values[first]:
            raise ConfigError(
                f"{where}`{ours}` must be one number, got `{first}` {values[first]!r} and "
                f"`{other}` {values[other]!r}"
            )
    return values[first]


def _check_says(
    row: _Row, config: Mapping[str, Any], where: str, overrides: Mapping[str, Any]
) -> None:
    """Raise ConfigError if the model says something else about its router than the row does, unless
    the caller gives our key in `overrides`.
    """
    for theirs, (ours, meanings) in _SAYS.items():
        value = config.get(theirs)
        is_read_or_given = ours in (*row.reads, *row.ignores, *overrides)
        if value is None or is_read_or_given:
            continue
        wanted = row.routing.get(ours, _USUAL.get(ours))
        meant = [our_value for word, our_value in meanings.items() if word == value]
        if meant != [wanted]:
            # Name the value with which the model would say what the row says.
            word = next(word for word, our_value in meanings.items() if our_value == wanted)
            raise ConfigError(
                f"{where}a {config['model_type']} must have `{theirs}` {word!r}, got `{theirs}` "
                f"{value!r}: give what holds, routing={{{ours!r}: …}}, or {_BY_HAND}, and give ids "
                "and weights"
            )


def _read(source: Any) -> tuple[dict[str, Any], str]:
    """Read the keys of a model. Also returns the words with which messages about the model begin.
    Raises the errors that `EPConfig.from_hf` names for `source`.
    """
    if isinstance(source, str | os.PathLike):
        file = _file_of(Path(source))
        return read_config(file, holds="the keys of a model, as config.json does"), f"{file}: "
    if isinstance(source, Mapping):
        return dict(source), ""
    config = getattr(source, "config", source)
    if not hasattr(config, "to_dict"):
        raise TypeError(
            "`source` must be a model or a configuration of transformers, a dict of its keys, or a "
            f"path, got {type(source).__name__}"
        )
    # It is a model of transformers, or its configuration.
    keys = dict(config.to_dict())
    # A model may have been cast since it was made.
    dtype = getattr(source, "dtype", None)
    if config is not source and isinstance(dtype, torch.dtype):
        keys["dtype"] = str(dtype).removeprefix("torch.")
    return keys, f"{type(config).__name__}: "


def _file_of(path: Path) -> Path:
    """The config.json of a folder, or the file itself. Raises ConfigError if it is not there."""
    # In a folder, the file is always called config.json.
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = "a folder without config.json" if path.is_dir() else "no file or folder"
        raise ConfigError(f"{path}: is {what}: give a local checkpoint, as nothing is downloaded")
    return file


def _experts(
    row: _Row, config: Mapping[str, Any], where: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Read the section `experts`. Raises ConfigError if the section might not describe what the
    model's experts compute.
    """
    found = dict(row.experts)
    for ours, theirs in row.experts_keys.items():
        if theirs in config:
            found[ours] = config[theirs]

    # The model may have more keys that could be about its experts, or only about its dense layers.
    # Refuse it, unless the caller says what holds.
    for theirs, ours in _OF_EXPERTS.items():
        value = config.get(theirs)
        says_nothing = not value or _is_unset(value) or theirs in row.experts_keys.values()
        if not says_nothing and ours not in overrides:
            raise ConfigError(
                f"{where}`{theirs}` {value!r} does not say whether it holds for the experts of a "
                f"{config['model_type']}: give what does, experts={{{ours!r}: …}}"
            )

    # The activation function determines alpha, unless the row or the caller does.
    acts = [config[name] for name in _ACTIVATION if config.get(name) is not None]
    act = acts[0] if acts else "silu"
    if any(other != act for other in acts):
        raise ConfigError(f"{where}`hidden_act` must be one function, got {acts}")
    if act in list(_ALPHAS):
        return {"alpha": _ALPHAS[act]} | found
    if "alpha" not in {**found, **overrides}:
        raise ConfigError(
            f"{where}`hidden_act` must be one of {', '.join(map(repr, _ALPHAS))}, since "
            f"`GroupedExperts` compute gate · sigmoid(alpha · gate), got {act!r}: else {_BY_HAND}, "
            f"and give `MoELayer` experts of your own"
        )
    return found


def _row_of(config: Mapping[str, Any], where: str) -> _Row:
    """Find the row of the table for a model. Raises ConfigError if there is none; the message says
    what to set by hand.
    """
    model_type = config.get("model_type")
    rows = [row for row in _ROWS if model_type in row.model_types]
    for row in rows:
        if _holds(row, config):
            return row

    # The type is in the table, but with other values of some keys than the model has.
    if rows:
        got = ", ".join(f"`{key}` {config[key]!r}" for key in rows[0].only if key in config)
        # Name all values for which the table has a row of this type.
        known = " or ".join(
            ", ".join(f"`{key}` {value!r}" for key, value in row.only.items()) for row in rows
        )
        raise ConfigError(
            f"{where}a {model_type} must have {known}, got {got}: else {_BY_HAND}, and give ids "
            "and weights"
        )
    if isinstance(model_type, str) and model_type in REFUSED:
        raise ConfigError(
            f"{where}a {model_type} is not read, since {REFUSED[model_type]}: {_BY_HAND}, and give "
            "ids and weights of the model's own router to `dispatch`, and `MoELayer` experts of "
            "your own"
        )
    raise ConfigError(
        f"{where}model_type {model_type!r} is not known: {_BY_HAND}, and of `routing` what its "
        "router does: 'scoring', 'renormalize', 'selection_bias', 'num_expert_groups', "
        f"'top_groups' and 'routed_scaling_factor'. Known are {', '.join(MODEL_TYPES)}"
    )


def _holds(row: _Row, config: Mapping[str, Any]) -> bool:
    """Whether a row applies to a model with these keys: see `_Row.only`."""
    for key, value in row.only.items():
        if not _is_unset(config.get(key)) and config[key] != value:
            return False
    return True


def _is_unset(value: Any) -> bool:
    """Whether a value of a model says nothing: null, or a list that has only nulls and zeros."""
    return value is None or (isinstance(value, list) and not any(value))


def _mapping(section: Any) -> dict[str, Any]:
    """The keys that a caller has set in a section, as a dict. It is empty if this is no section."""
    if isinstance(section, Strict):
        return section.model_dump(exclude_unset=True)
    return dict(section) if isinstance(section, Mapping) else {}
