"""Tiny models with random weights for vLLM: `python vllm_models.py FOLDER NAME…` writes FOLDER/NAME
for some of MODELS. The name `versions` is what a trainer of qwen3 hands over: `vllm_weights.py`.

The sizes are the smallest that vLLM's kernels for CPUs take.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from mxfp4_models import quantize
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm_weights import train

from epmoe.local.weight_formats import dequantize_weights
from epmoe.native.arguments import MXFP4

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def qwen3() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        **COMMON, num_experts=10, num_key_value_heads=2, head_dim=32, norm_topk_prob=True
    )
    return Qwen3MoeForCausalLM(config)


def wide() -> PreTrainedModel:
    """Its experts have 6.3 MB, so that one moves in seven parts of 1 MB, over many steps."""
    small = COMMON | {"moe_intermediate_size": 4096, "num_hidden_layers": 2}
    config = Qwen3MoeConfig(
        **small, num_experts=10, num_key_value_heads=2, head_dim=32, norm_topk_prob=True
    )
    return Qwen3MoeForCausalLM(config)


def deepseek() -> PreTrainedModel:
    """It has groups of experts, a bias in the router, shared experts and one dense layer."""
    config = DeepseekV3Config(
        **COMMON,
        intermediate_size=128,
        n_routed_experts=12,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        topk_method="noaux_tc",  # how vLLM knows of the bias, and of sigmoid scores
        scoring_func="sigmoid",
    )
    model = DeepseekV3ForCausalLM(config)
    # A new model has a bias of zeros, which nobody would miss.
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    return model


def gpt_oss() -> PreTrainedModel:
    """It has biases everywhere, a SwiGLU with a limit, and sinks of attention."""
    small = {key: value for key, value in COMMON.items() if key != "moe_intermediate_size"}
    config = GptOssConfig(
        **small,
        intermediate_size=64,
        num_local_experts=8,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )
    model = GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.data.normal_(std=0.3)
    return model


MODELS = {
    "gpt_oss": gpt_oss,
    "gpt_oss_mxfp4": gpt_oss,
    "qwen3": qwen3,
    "qwen3_nvfp4": qwen3,
    "qwen3_other": qwen3,
    "deepseek": deepseek,
    "wide": wide,
}
SEEDS = {"qwen3_other": 8}


def in_mxfp4(path: Path) -> None:
    """Quantize the experts of gpt-oss. PATH.plain gets the same model in bf16, with the values of
    these experts.
    """
    quantize(path)
    plain = shutil.copytree(path, f"{path}.plain")
    tensors = load_file(path / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks = tensors.pop(f"{name}_blocks").flatten(2).view(MXFP4)
        scales = tensors.pop(f"{name}_scales")
        weights = dequantize_weights(blocks, scales.view(torch.float8_e8m0fnu), torch.bfloat16)
        tensors[name] = weights.transpose(1, 2).contiguous()
    save_file(tensors, Path(plain) / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (Path(plain) / "config.json").write_text(json.dumps(config))


def in_nvfp4(path: Path) -> None:
    """Put random experts in NVFP4 of modelopt into Qwen3-MoE. PATH.plain gets the same model in
    bf16, which has their values, as scales of matrices are powers of two.
    """
    plain = Path(shutil.copytree(path, f"{path}.plain"))
    tensors = load_file(path / "model.safetensors")
    values = dict(tensors)
    draw = torch.Generator().manual_seed(0)
    exponents = {"gate_proj": -9, "up_proj": -8, "down_proj": -8}
    for name in [name for name in tensors if ".experts." in name]:
        n, k = tensors.pop(name).shape
        codes = torch.randint(256, (n, k // 2), generator=draw, dtype=torch.uint8)
        scales = torch.randint(80, 90, (n, k // 16), generator=draw, dtype=torch.uint8)
        scale = torch.tensor(2.0 ** exponents[name.split(".")[-2]])
        codes_and_scales = codes.view(MXFP4), scales.view(torch.float8_e4m3fn)
        values[name] = dequantize_weights(*codes_and_scales, torch.bfloat16, scale)
        tensors |= {
            name: codes,
            f"{name}_scale": codes_and_scales[1],
            f"{name}_scale_2": scale,
            f"{name.removesuffix('weight')}input_scale": torch.tensor(1.0),
        }
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", "*self_attn*", "*mlp.gate"],
        "config_groups": {
            "group_0": {
                "input_activations": {"num_bits": 4, "group_size": 16, "type": "float"},
                "weights": {"num_bits": 4, "group_size": 16, "type": "float"},
                "targets": ["Linear"],
            }
        },
    }
    (path / "config.json").write_text(json.dumps(config))


def main(folder: Path, *names: str) -> None:
    for name in names:
        if name == "versions":
            train(str(folder / "qwen3"), str(folder / name))
            continue
        torch.manual_seed(SEEDS.get(name, 7))
        model = MODELS[name]()
        for parameter in model.parameters():
            if parameter.dim() > 1:  # wide enough that greedy tokens are not near a tie
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        dtype = torch.bfloat16 if name.endswith("fp4") else torch.float32
        model.to(dtype).save_pretrained(folder / name)
        if name.endswith("mxfp4"):
            in_mxfp4(folder / name)
        if name.endswith("nvfp4"):
            in_nvfp4(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
