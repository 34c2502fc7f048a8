"""LoRA adapters of experts out of a folder of PEFT, with its `target_parameters` (`ParamWrapper` of PEFT 0.21).

    lora_A.weight [E·r, k]: r rows for each expert    lora_B.weight [n, r·E]: column j·E + i is the j-th of expert i

The wrappers of two weights of one module are nested, and only the shapes tell which is whose.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epmoe.checkpoint.safetensors_folder import SafetensorsFolder
from epmoe.local.adapters import LoRA
from epmoe.native.arguments import FLOATS, describe

_A, _B = "lora_A.weight", "lora_B.weight"
_REFUSED = ("use_dora", "lora_bias", "fan_in_fan_out", "alpha_pattern")  # each means that it is another function


def load_adapter(
    folder: str | os.PathLike[str], block: str, experts: Sequence[int], sizes: tuple[int, int, int, int]
) -> LoRA:
    """Read an adapter of one MoE block.

    Args:
        folder: with PEFT's `adapter_config.json` and `adapter_model.safetensors`.
        block: the name of the block in the model, such as "model.layers.3.mlp", as `MoELayer.from_safetensors` takes
            it. Its experts are `BLOCK.experts`.
        experts: the logical experts to read, in the order wanted, such as `ExpertParallel.logical_experts` says.
        sizes: E, D, rows of gate and up of an expert (2F), and F.

    Returns:
        The adapter, on the CPU, whose b have its scaling. What it leaves alone is None.

    Raises:
        ValueError: the folder is none of PEFT's; or the adapter has something for these experts that is no pair of
            `lora_A` and `lora_B` of one of their two weights, or none at all; or it is no plain LoRA.
        ImportError: safetensors is not installed.
    """
    path = Path(folder)
    try:
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / 'adapter_config.json'}: cannot be read: {error}") from None
    if odd := [name for name in _REFUSED if config.get(name)]:
        raise ValueError(f"{path / 'adapter_config.json'}: `{odd[0]}` is set, but adapters are plain LoRA")
    tensors = SafetensorsFolder(path)
    E, D, wide, F = sizes
    chosen = torch.tensor(experts, dtype=torch.int64)
    parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for name, ends in _of_experts(tensors, block).items():
        a, b = (tensors.get(name + end) for end in (_A, _B))
        of = () if a is None or b is None or ends != {_A, _B} else (b.shape[0], a.shape[-1])
        if a is None or b is None or of not in {(wide, D), (D, F)} - parts.keys() or not _fits(a, b, E):
            got = ", ".join(f"{end} {describe(tensors[name + end])}" for end in sorted(ends))
            raise ValueError(
                f"{path}: `{name}` must have {_A} [{E}·r, k] and {_B} [n, r·{E}], for n, k = {wide}, {D} or {D}, {F}, "
                f"once each, got {got}"
            )
        r = len(a) // E
        scaling = config["lora_alpha"] / (math.sqrt(r) if config.get("use_rslora") else r)
        of_each = a.view(E, r, -1)[chosen], b.view(-1, r, E).permute(2, 0, 1)[chosen].float() * scaling
        parts[b.shape[0], a.shape[1]] = of_each
    return LoRA(parts.get((wide, D)), parts.get((D, F)))


def _fits(a: Tensor, b: Tensor, E: int) -> bool:
    rows = a.shape[0]
    return a.dim() == b.dim() == 2 and a.dtype in FLOATS and b.dtype in FLOATS and rows == b.shape[1] and rows % E == 0


def _of_experts(tensors: Mapping[str, Any], block: str) -> dict[str, set[str]]:
    """What the file has for the experts of a block: the ends of names, by their beginnings. Raises ValueError for
    nothing."""
    inside = f".{block}.experts."
    found: dict[str, set[str]] = {}
    for name in tensors:
        if inside in f".{name}":
            end = next((end for end in (_A, _B) if name.endswith(f".{end}")), name.rpartition(".")[2])
            found.setdefault(name.removesuffix(end), set()).add(end)
    if not found:
        some = ", ".join(sorted(name for name in tensors if "experts" in name)[:4])
        raise ValueError(f"the adapter has nothing for `{block}.experts`; of experts it has: {some or 'nothing'}")
    return found
