"""A tiny Qwen3-MoE with fp8 experts in a checkpoint as Qwen and DeepSeek have it, loaded by
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expert_inputs import quantized as by_blocks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from epmoe.cli.demo import generate as demo
from epmoe.local.stage import Stage

SHAPE = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2}
"""F and D in whole blocks."""
PLAIN = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
"""Modules that stay as they are: transformers' fp8 kernel for them is downloaded, and
needs a GPU.
"""


@contextmanager
def saved(**quantization: object) -> Iterator[Path]:
    """The folder of the checkpoint; keys replace those of its `quantization_config`. All ranks get
    the same folder.
    """
    keys = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    } | quantization
    # A model whose sizes are whole blocks; rank 0 quantizes it.
    with pytest.MonkeyPatch.context() as patch:
        for key, value in SHAPE.items():
            patch.setitem(demo.MODELS["qwen3_moe"], key, value)
        with demo.saved_model("qwen3_moe", dtype=torch.bfloat16) as folder:
            path = Path(folder)
            if not dist.is_initialized() or dist.get_rank() == 0:
                _quantize(path, keys | {"modules_to_not_convert": PLAIN})
            if dist.is_initialized():
                dist.barrier()
            yield path


def _quantize(path: Path, keys: dict[str, object]) -> None:
    """Turns every expert's weights into fp8, with a `weight_scale_inv` for each."""
    tensors = load_file(path / "model.safetensors")
    # Weights in blocks, with scales that may be powers of 2.
    for name in [name for name in tensors if ".experts." in name]:
        weights, scales = by_blocks(tensors[name][None].float())
        if keys.get("scale_fmt") == "ue8m0":
            scales = scales.log2().ceil().exp2()
            each = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
            weights = (tensors[name].float() / each).to(torch.float8_e4m3fn)
        tensors[name] = weights[0]
        tensors[f"{name}_scale_inv"] = scales[0]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": keys}))


def quantized(path: Path, **options: object) -> PreTrainedModel:
    """The model with fp8 experts, also on the CPU, where transformers would dequantize them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)


def dequantized(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model with the same weights in `dtype`, by transformers' own arithmetic."""
    keys = FineGrainedFP8Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=keys)


@contextmanager
def calls_of_experts() -> Iterator[list[tuple]]:
    """The calls of the experts stage inside: the weights, the rows, their scales and
    the segments.
    """
    calls: list[tuple] = []
    serve = Stage.serve

    def watched(self: Stage, *arguments: object) -> object:
        calls.append(arguments)
        return serve(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "serve", watched)
        yield calls
