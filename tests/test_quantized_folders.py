"""Folders with scales: fp8 of blocks as it is, MXFP4 as it is for GPUs with kernels, all else in
bf16 and a warning.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from helpers import randn
from torch import Tensor

pytest.importorskip("safetensors")

from safetensors.torch import save_file

import epmoe
from epmoe.local.weight_formats import dequantize_weights
from epmoe.native.arguments import MXFP4

pytestmark = pytest.mark.usefixtures("serving")

E = 4
F = 128
D = 256
BLOCK = "model.layers.1.mlp"
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
PROJECTIONS = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}


def random_bytes(*shape: int, seed: int, low: int = 0, high: int = 255) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.uint8)


def saved(path: Path, tensors: dict[str, Tensor]) -> epmoe.SafetensorsFolder:
    save_file(tensors | {f"{BLOCK}.gate.weight": randn(E, D, seed=9)}, path / "model.safetensors")
    return epmoe.SafetensorsFolder(path)


def gpt_oss(F: int = F, D: int = D) -> dict[str, Tensor]:
    """[E, rows, groups, 16] and [E, rows, groups]; biases in bf16."""
    tensors = {}
    for seed, (name, (n, k)) in enumerate({"gate_up": (2 * F, D), "down": (D, F)}.items()):
        prefix = f"{BLOCK}.experts.{name}_proj"
        tensors[f"{prefix}_blocks"] = random_bytes(E, n, k // 32, 16, seed=seed)
        tensors[f"{prefix}_scales"] = random_bytes(E, n, k // 32, seed=seed, low=115, high=124)
        tensors[f"{prefix}_bias"] = randn(E, n, seed=seed).to(BF16)
    return tensors


def of_each(kind: str) -> dict[str, Tensor]:
    """Tensors of each expert in a format, or gates and ups in one and downs in another."""
    tensors = {}
    first, *_, last = kind.split(" and ") * 2
    for x in range(E):
        for i, (name, (n, k)) in enumerate(PROJECTIONS.items()):
            seed = 10 * x + i
            # Weights and scales of all formats,
            weight = randn(n, k, seed=seed).to(FP8)
            scale = 0.3 + 0.1 * seed
            packed = random_bytes(n, k // 2, seed=seed)
            groups = random_bytes(n, k // 32, seed=seed, low=115, high=124)
            blocks = -(-n // 128), -(-k // 128)
            suffixes = {
                "tensor": {"weight": weight, "weight_scale": torch.tensor(scale)},
                "tensor [1], bf16": {
                    "weight": weight,
                    "weight_scale_inv": torch.tensor([scale]).to(BF16),
                },
                "channel": {"weight": weight, "weight_scale": randn(n, 1, seed=seed).abs() + 0.1},
                "blocks": {"weight": weight, "weight_scale": randn(*blocks, seed=seed).abs()},
                "blocks, bf16": {
                    "weight": weight,
                    "weight_scale_inv": randn(*blocks, seed=seed).abs().to(BF16),
                },
                "UE8M0": {
                    "weight": weight,
                    "weight_scale_inv": random_bytes(*blocks, seed=seed, low=110, high=130).view(
                        torch.float8_e8m0fnu
                    ),
                },
                "MXFP8": {"weight": weight, "weight_scale": groups},
                "MXFP4": {"weight_packed": packed, "weight_scale": groups},
                "DeepSeek-V4": {
                    "weight": packed.view(torch.int8),
                    "scale": groups.view(torch.float8_e8m0fnu),
                },
            }
            # of which one is taken.
            made = suffixes[last if name == "down_proj" else first]
            tensors |= {f"{BLOCK}.experts.{x}.{name}.{suffix}": t for suffix, t in made.items()}
    return tensors


def truth(tensors: dict[str, Tensor], x: int) -> dict[str, Tensor]:
    """The fp32 weights of an expert."""
    parts = {}
    for name in PROJECTIONS:
        weight, scales = (t for key, t in tensors.items() if f".{x}.{name}." in key)
        weight = weight if weight.dtype == FP8 else weight.view(MXFP4)
        scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        parts[name] = dequantize_weights(weight, scales, torch.float32)
    return {
        "gate_up": torch.cat([parts["gate_proj"], parts["up_proj"]]),
        "down": parts["down_proj"],
    }


@pytest.mark.parametrize(
    "kind",
    [
        "tensor",
        "tensor [1], bf16",
        "channel",
        "blocks",
        "blocks, bf16",
        "UE8M0",
        "MXFP8",
        "MXFP4",
        "DeepSeek-V4",
        "blocks and channel",
        "channel and blocks",
    ],
)
def test_scales_of_each_format(tmp_path, caplog, kind):
    tensors = of_each(kind)
    folder = saved(tmp_path, tensors)
    with caplog.at_level(logging.WARNING, "epmoe"):
        got = folder.experts(BLOCK, [2, 0])
    epmoe.GroupedExperts(**got)

    # Values of the experts, in any dtype that is asked for.
    want = [truth(tensors, x) for x in (2, 0)]
    for dtype in (torch.float32, BF16):
        plain = folder.experts(BLOCK, [2, 0], dtype=dtype)
        assert plain.keys() == {"w_gate_up", "w_down"}
        for part in ("gate_up", "down"):
            assert torch.equal(
                plain[f"w_{part}"], torch.stack([of_one[part] for of_one in want]).to(dtype)
            )

    # Formats that kernels take stay as they are.
    if kind in ("blocks", "blocks, bf16", "UE8M0"):
        assert not caplog.records
        for part in ("gate_up", "down"):
            values = dequantize_weights(got[f"w_{part}"], got[f"{part}_scales"], torch.float32)
            assert torch.equal(values, torch.stack([of_one[part] for of_one in want]))
        return

    # The others are dequantized, with a warning that names what kernels take.
    (record,) = caplog.records
    said = record.getMessage()
    assert (
        "experts are dequantized to bf16: " in said
        and f"{BLOCK}.experts.*.down_proj.weight" in said
    )
    assert (
        "have kernels for MXFP4"
        if kind in ("MXFP4", "DeepSeek-V4")
        else "scales of blocks of 128 × 128"
    ) in said
    assert got.keys() == plain.keys() and all(torch.equal(got[name], plain[name]) for name in got)
    with pytest.raises(
        ValueError, match=f"of `{BLOCK}` must be fp8 with a scale for each block of 128 × 128 to be"
    ):
        folder.experts(BLOCK, [2, 0], dtype=FP8)


@pytest.mark.parametrize("shape", [(F, D), (96, 256), (128, 96)])
def test_gpt_oss_in_mxfp4_is_what_transformers_dequantizes(tmp_path, caplog, shape):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    width, hidden = shape
    tensors = gpt_oss(*shape)
    tensors[f"{BLOCK}.gate.weight"] = randn(E, hidden)
    save_file(tensors, tmp_path / "model.safetensors")
    folder = epmoe.SafetensorsFolder(tmp_path)
    # Here they become bf16, with a warning.
    with caplog.at_level(logging.WARNING, "epmoe"):
        got = folder.experts(BLOCK, [3, 1])
    assert (
        "experts.gate_up_proj_blocks: GPUs of compute capability 9.0 have kernels for MXFP4"
        in caplog.text
    )
    # In fp32 they are what transformers makes of them.
    wide = folder.experts(BLOCK, [3, 1], dtype=torch.float32)
    for part, n in {"gate_up": 2 * width, "down": hidden}.items():
        name = f"{BLOCK}.experts.{part}_proj"
        blocks = tensors[f"{name}_blocks"]
        scales = tensors[f"{name}_scales"]
        want = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[[3, 1]].mT
        assert torch.equal(wide[f"w_{part}"], want) and torch.equal(got[f"w_{part}"], want.to(BF16))
        assert got[f"{part}_bias"].dtype == BF16 and got[f"{part}_bias"].shape == (2, n)


@pytest.mark.parametrize("kind", ["MXFP4", "DeepSeek-V4", "gpt-oss", "gpt-oss, 96"])
def test_mxfp4_stays_as_it_is_where_gpus_have_kernels(tmp_path, caplog, monkeypatch, kind):
    tensors = gpt_oss(*((96, 160) if "96" in kind else ())) if "gpt-oss" in kind else of_each(kind)
    hidden = 160 if "96" in kind else D
    save_file(tensors | {f"{BLOCK}.gate.weight": randn(E, hidden)}, tmp_path / "model.safetensors")
    folder = epmoe.SafetensorsFolder(tmp_path)
    # Asked for, and chosen where GPUs take it: the same bytes, without a warning.
    got = folder.experts(BLOCK, [3, 1], dtype=MXFP4)
    monkeypatch.setattr("epmoe.checkpoint.safetensors_folder.on_hopper", lambda device: True)
    with caplog.at_level(logging.WARNING, "epmoe"):
        chosen = folder.experts(BLOCK, [3, 1])
    assert not caplog.records and chosen.keys() == got.keys()
    assert all(
        torch.equal(chosen[name].view(torch.uint8), got[name].view(torch.uint8)) for name in got
    )
    assert (got["w_down"].dtype, got["down_scales"].dtype) == (MXFP4, torch.float8_e8m0fnu)
    # Their values are those in fp32,
    wide = folder.experts(BLOCK, [3, 1], dtype=torch.float32)
    for part in ("gate_up", "down"):
        values = dequantize_weights(got[f"w_{part}"], got[f"{part}_scales"], torch.float32)
        assert torch.equal(values, wide[f"w_{part}"])
        assert f"{part}_bias" not in got or got[f"{part}_bias"].dtype == BF16
    # and experts of both have the same outputs.
    rows = randn(6, hidden).to(BF16)
    offsets = torch.tensor([0, 4, 6], dtype=torch.int32)
    packed, bf16 = (
        epmoe.GroupedExperts(**given) for given in (got, folder.experts(BLOCK, [3, 1], dtype=BF16))
    )
    assert torch.equal(packed(rows, offsets), bf16(rows, offsets))


def test_weights_without_scales_are_cast_but_not_quantized(tmp_path):
    tensors = {
        f"{BLOCK}.experts.gate_up_proj": randn(E, 2 * F, D),
        f"{BLOCK}.experts.down_proj": randn(E, D, F),
    }
    folder = saved(tmp_path, tensors)
    got = folder.experts(BLOCK, [1], dtype=BF16)
    assert torch.equal(got["w_down"][0], tensors[f"{BLOCK}.experts.down_proj"][1].to(BF16))
    # Quantized dtypes want weights that are quantized so, and other dtypes are refused.
    with pytest.raises(ValueError, match="must be fp8 with a scale for each block of 128 × 128"):
        folder.experts(BLOCK, [1], dtype=FP8)
    with pytest.raises(ValueError, match="must be MXFP4 or NVFP4 to be loaded in float4_e2m1fn_x2"):
        folder.experts(BLOCK, [1], dtype=MXFP4)
    with pytest.raises(
        TypeError,
        match=(
            "`dtype` must be None, float32, float16, bfloat16, float8_e4m3fn, float4_e2m1fn_x2, got"
        ),
    ):
        folder.experts(BLOCK, [1], dtype=torch.uint8)
