"""MoE blocks of transformers with tiny random configurations, and the `MoELayer`s that must equal
them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers import ROOT, randn
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import epmoe
from epmoe.config.from_hf import MODEL_TYPES

T = 40
E = 16
K = 4
D = 64
F = 48
BLOCK = "model.layers.3."
SHAPE = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), K),
    **{"hidden_size": D, "dtype": "float32"},
    **{"n_group": 4, "num_expert_group": 4, "topk_group": 2},
    **dict.fromkeys(
        (
            "routed_scaling_factor",
            "router_scaling_factor",
            "route_scale",
            "moe_routed_scaling_factor",
            "moe_router_scaling_factor",
        ),
        2.5,
    ),
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
_GROUPED_OR_NOT = [{"topk_method": "group_limited_greedy"}, {"topk_method": "greedy"}]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_ocr2_text"), _GROUPED_OR_NOT),
    "unlimited_ocr_text": [keys | _HEADS for keys in _GROUPED_OR_NOT],
    "axk2": [{"n_group": None, "topk_group": None}],
    "cohere2_moe": [
        {
            "expert_selection_fn": "sigmoid",
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
        },
        {"expert_selection_fn": "softmax", "num_shared_experts": 0},
    ],
    "dots1": [{"n_shared_experts": 1}],
    "qwen3_omni_moe_talker_text": [{"shared_expert_intermediate_size": F}],
    "lfm2_moe": [{"use_expert_bias": True}, {"use_expert_bias": False}],
}
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types of checkpoints with code of their own, and the type by which
transformers reads them.
"""
_FOLDERS = {"sarvam_mla": "deepseek_v3", "sarvam_moe": "glm4_moe"}
"""Where transformers has the code of a type whose folder has none."""


_CONVERSIONS = {"step3p5": "step3p7"}
"""Where transformers has the names of a checkpoint's tensors under another type."""


def tiny(model_type: str, **keys: Any) -> Any:
    """A configuration of transformers, in which the width of the experts is F and other widths are
    not.
    """
    model_type = ALIASES.get(model_type, model_type)
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    made = CONFIG_MAPPING[model_type]
    default = made()
    widths = {"intermediate_size": F}
    if hasattr(default, "moe_intermediate_size"):
        widths = {"intermediate_size": 2 * F, "moe_intermediate_size": F}
    return made(
        **{key: value for key, value in (SHAPE | widths).items() if hasattr(default, key)} | keys
    )


def variants(model_type: str, act: str | None = None) -> Iterator[Any]:
    """`tiny`, renormalised and not where the model type has both."""
    default = tiny(model_type, **VARIANTS.get(model_type, [{}])[0])
    name = next(
        (key for key in ("hidden_act", "activation_function") if hasattr(default, key)), None
    )
    acts = {} if act is None or name is None else {name: act}
    for keys in VARIANTS.get(model_type, [{}]):
        norm = next(
            (key for key in ("moe_renormalize", "norm_topk_prob") if hasattr(default, key)), None
        )
        if norm is None or "topk_method" in keys:  # of which False alone is known
            yield tiny(model_type, **keys, **acts)
        else:
            yield from (
                tiny(model_type, **keys, **acts, **{norm: value}) for value in (True, False)
            )


def block_of(config: Any) -> nn.Module:
    """The MoE block of a layer of transformers, with random parameters and buffers."""
    folder = _FOLDERS.get(config.model_type) or type(config).__module__.split(".")[-2]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    text = inspect.getsource(module)
    lines = text.splitlines()
    # Classes of the modelling file that have experts.
    found = {
        node.name: getattr(module, node.name)
        for node in ast.parse(
            text
        ).body  # `inspect.getsource` of each class would parse the module as often
        if isinstance(node, ast.ClassDef) and not re.search("MoA|Attention", node.name)
        if re.search(
            r"self\.experts = |self\.input_linear = JetMoe",
            "\n".join(lines[node.lineno : node.end_lineno]),
        )
    }
    # Of several, the one that the config names.
    if len(found) > 1:
        prefix = (
            type(config)
            .__name__.removesuffix("Config")
            .replace("OmniMoeText", "OmniMoeThinkerText")
        )
        found = {name: made for name, made in found.items() if name.startswith(prefix)}
    (made,) = found.values()
    # Random parameters and buffers.
    config._experts_implementation = "eager"
    layer = {"layer_idx": 0} if "layer_idx" in inspect.signature(made).parameters else {}
    block: nn.Module = made(config, **layer).float()
    for seed, tensor in enumerate([*block.parameters(), *block.buffers()]):
        tensor.data = randn(*tensor.shape, seed=seed) / (8 if tensor.dim() > 1 else 3)
    return block.eval()


def router_weight(block: nn.Module) -> nn.Parameter:
    """[E, D], the only one of this shape."""
    found, *_ = (
        weight for name, weight in block.named_parameters() if re.search("^(gate|router)", name)
    )
    return found


def beside(block: nn.Module) -> tuple[str, Callable[[Tensor], Tensor] | None]:
    """What a block adds to the routed experts of tokens [T, D]: what it is called, and the
    function.
    """
    name = next(
        (
            name
            for name in ("shared_experts", "shared_expert", "shared_mlp")
            if hasattr(block, name)
        ),
        None,
    )
    shared = None if name is None else getattr(block, name)
    if shared is None:
        return "", None
    gate = getattr(block, "shared_expert_gate", None)
    if gate is None:
        return f"`{name}`", shared
    return f"`{name}`, gated", lambda x: gate(x).sigmoid() * shared(x)


def behind(block: nn.Module) -> tuple[str, Callable[[Tensor], Tensor]]:
    """What a block does to the sum: what it is called, and the function."""
    norm = getattr(block, "post_mlp_layernorm", None)
    if norm:
        return "`post_mlp_layernorm`", norm
    bias = getattr(block, "bias", None)
    if isinstance(bias, Tensor):
        return "`bias`", lambda y: y + bias
    return "", lambda y: y


def outputs(block: nn.Module, x: Tensor) -> Tensor:
    """The block's outputs [T, D]."""
    y = block(x[None])
    return (y[0] if isinstance(y, tuple) else y).reshape(x.shape)


def as_saved(block: nn.Module, model_type: str) -> dict[str, Tensor]:
    """The block's tensors by the names that a checkpoint has, which transformers turns into those
    of its modules.
    """
    # How transformers renames, and below which name the block stands.
    rules = get_checkpoint_conversion_mapping(_CONVERSIONS.get(model_type, model_type)) or []
    targets = " ".join(rule.target_patterns[0] for rule in rules)
    place = next(
        (place for place in ("feed_forward.", "block_sparse_moe.") if place in targets), "mlp."
    )
    saved = {BLOCK + place + name: tensor for name, tensor in block.state_dict().items()}
    # Each rule backwards, on the tensors that it would make.
    for rule in reversed(rules):
        theirs = rule.source_patterns
        ours = rule.target_patterns[0]
        for name in list(saved):
            where = name.find(plain := ours.replace("\\", ""))
            if where < 0 or not re.fullmatch(r"[\w.*]+", "".join(theirs).replace("\\", "") + plain):
                continue
            if not plain.startswith(".") and where and name[where - 1] != ".":
                continue
            tensor = saved.pop(name)
            # One tensor under another name,
            if len(theirs) == 1 and "*" not in theirs[0]:
                saved[name.replace(plain, theirs[0].replace("\\", ""))] = tensor
                continue
            # parts of it, or a tensor for each expert.
            for source, part in zip(theirs, tensor.chunk(len(theirs), 1), strict=True):
                if "*" not in source:
                    saved[name.replace(plain, source.replace("\\", ""))] = part
                    continue
                for number, of_one in enumerate(part):
                    saved[
                        name.replace(plain, source.replace("\\", "").replace("*", str(number)))
                    ] = of_one
    return {name: tensor.contiguous().clone() for name, tensor in saved.items()}


def save(block: nn.Module, model_type: str, folder: Path) -> str:
    """Writes a checkpoint with this block. Returns the block's name there."""
    saved = as_saved(block, model_type)
    save_file(saved, folder / "model.safetensors")
    routers = (re.match(r"(.*?)\.(gate|router)\.", name) for name in saved)
    return next(found.group(1) for found in routers if found)


def types_with_experts() -> dict[str, str]:
    """The model types of transformers whose configurations have keys with experts, with the classes
    of these.
    """
    found = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/configuration_*.py")):
        for made in ast.parse(file.read_text(encoding="utf-8")).body:
            body = made.body if isinstance(made, ast.ClassDef) else []
            fields = [node.target.id for node in body if isinstance(node, ast.AnnAssign)]
            names = [
                ast.literal_eval(node.value)
                for node in body
                if isinstance(node, ast.Assign) and node.targets[0].id == "model_type"
            ]
            if any("expert" in key for key in fields):
                found[next(iter(names), file.parent.name)] = made.name
    return found


def table() -> str:
    """The table of docs/models.md: what the rows of `from_hf` say, and what blocks of transformers
    have.
    """
    columns = (
        "model type",
        "router",
        "experts",
        "beside them",
        "tensors of a checkpoint",
        "serves",
        "trains",
    )

    # A row for each model type, in the order of names.
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for model_type in sorted(MODEL_TYPES):
        configs = [epmoe.EPConfig.from_hf(hf, ep_size=1) for hf in variants(model_type)]
        block = block_of(next(variants(model_type)))

        # One name of a weight of experts, as checkpoints have it.
        saved = " ".join(
            name
            for name in as_saved(block, ALIASES.get(model_type, model_type))
            if "shared" not in name
        )
        (tensor, *_) = re.findall(
            r"(?:experts\.(?:0\.)?)?(?:gate_up_proj|gate_proj|w1|fc1|input_linear)\b", saved
        )
        parts = [part for part in (beside(block)[0], behind(block)[0]) if part]
        cells = (
            _router([config.routing for config in configs]),
            _experts(configs[0].experts),
            " + ".join(parts) or "–",
            f"`{tensor.replace('.0.', '.*.')}`",
        )
        lines.append(f"| `{model_type}` | {' | '.join(cells)} | yes | yes |")
    return "\n".join(lines)


def _router(routings: list[epmoe.config.config.RoutingConfig]) -> str:
    """What routers of these variants do, in words."""
    words = [" or ".join(dict.fromkeys(routing.scoring for routing in routings))]
    flags = {
        "renormalised": [routing.renormalize for routing in routings],
        "groups": [routing.num_expert_groups > 1 for routing in routings],
        "bias": [routing.selection_bias for routing in routings],
        "bias of logits": [routing.logit_bias for routing in routings],
    }
    words += [
        name if all(given) else f"{name} if set" for name, given in flags.items() if any(given)
    ]
    epsilon = max(routing.renormalize_epsilon for routing in routings)
    return ", ".join([*words, *([f"ε {epsilon:.0e}"] if epsilon else [])])


def _experts(experts: epmoe.config.config.ExpertsConfig) -> str:
    """What experts of a row are besides SwiGLU."""
    flags = {
        "limit": experts.limit is not None,
        f"alpha {experts.alpha:g}": experts.alpha != 1,
        "up + 1": experts.up_offset == 1,
        "biases": experts.biases,
        "interleaved": experts.interleaved,
        "weights on input": experts.weights_on_input,
    }
    return ", ".join(name for name, given in flags.items() if given) or "SwiGLU"


if __name__ == "__main__":
    page = ROOT / "docs" / "models.md"
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition("| model type | router |")
    page.write_text(head + table() + "\n\n" + rest.partition("\n\n")[2], encoding="utf-8")
