"""Checkpoints of gpt-oss in MXFP4, as transformers loads them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def quantize(path: Path) -> None:
    """Turn the experts into random MXFP4 of their size, and say so in the configuration."""
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, k, n = tensors.pop(name).shape  # transposed
        tensors[f"{name}_blocks"] = torch.randint(
            256, (experts, n, k // 32, 16), generator=generator
        ).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(
            120, 125, (experts, n, k // 32), generator=generator
        ).to(torch.uint8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    keep = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": keep}
    (path / "config.json").write_text(json.dumps(config))
