"""Folders with experts in NVFP4, as modelopt and compressed-tensors write them: what is read, as it
is and dequantized, and what is refused.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from helpers import alone, randn
from test_nvfp4 import E4M3, Drawn, Rows, errors
from torch import Tensor

pytest.importorskip("safetensors")

from safetensors.torch import save_file

import epmoe
from epmoe.native.arguments import MXFP4

pytestmark = pytest.mark.usefixtures("serving")

BLOCK = "model.layers.1.mlp"
EXPERTS = f"{BLOCK}.experts"
BF16 = torch.bfloat16
E, D, F = 4, 192, 96
FP8 = torch.float8_e4m3fn
LOGICAL = [3, 1]


class Checkpoint:
    """The tensors of drawn experts, and what each should be read as."""

    def __init__(self, kind: str) -> None:
        self.drawn = Drawn((D, F), gpt_oss=kind == "all experts in one", e=E)
        self.tensor_scales = self.drawn.tensor_scales
        self.tensors = {f"{BLOCK}.gate.weight": randn(E, D, seed=9)}
        if kind == "all experts in one":
            self._add_all()
            return
        for x in range(E):
            for i, name in enumerate(("gate_proj", "up_proj", "down_proj")):
                self._add_matrix(kind, x, i, f"{EXPERTS}.{x}.{name}")

    def _add_all(self) -> None:
        """gpt-oss of modelopt: gate and up are one tensor with one scale, and biases stay."""
        drawn = self.drawn
        self.tensor_scales[:, 1] = self.tensor_scales[:, 0]
        for i, name in enumerate(("gate_up_proj", "down_proj")):
            self.tensors |= {
                f"{EXPERTS}.{name}": drawn.codes[i],
                f"{EXPERTS}.{name}_weight_scale": drawn.scales[i].view(E4M3),
                f"{EXPERTS}.{name}_weight_scale_2": self.tensor_scales[:, i + 1].clone(),
                f"{EXPERTS}.{name}_input_scale": torch.tensor(0.25),
                f"{EXPERTS}.{name}_bias": drawn.biases[i],
            }

    def _add_matrix(self, kind: str, x: int, i: int, name: str) -> None:
        """Gate (`i` = 0), up (1) or down (2) of an expert."""
        part = i // 2
        rows = slice(i * F, (i + 1) * F) if part == 0 else slice(None)
        codes = self.drawn.codes[part][x, rows].clone()
        scales = self.drawn.scales[part][x, rows].clone().view(E4M3)
        tensor_scale = self.tensor_scales[x, i].clone()
        if kind == "modelopt":
            self.tensors |= {
                f"{name}.weight": codes,
                f"{name}.weight_scale": scales,
                f"{name}.weight_scale_2": tensor_scale,
                f"{name}.input_scale": torch.tensor(0.25),
            }
            return
        # compressed-tensors divides by the scale of a tensor.
        divisor = 1 / tensor_scale
        self.tensor_scales[x, i] = 1 / divisor
        self.tensors |= {
            f"{name}.weight_packed": codes,
            f"{name}.weight_scale": scales,
            f"{name}.weight_global_scale": divisor[None],
        }
        if kind == "compressed-tensors":
            self.tensors[f"{name}.input_global_scale"] = torch.tensor([4.0])

    def saved(self, path: Path) -> epmoe.SafetensorsFolder:
        save_file(self.tensors, path / "model.safetensors")
        return epmoe.SafetensorsFolder(path)


KINDS = ["modelopt", "compressed-tensors", "compressed-tensors, rows in bf16", "all experts in one"]


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_dequantized_and_stay_as_they_are(tmp_path, caplog, monkeypatch, kind):
    checkpoint = Checkpoint(kind)
    drawn = checkpoint.drawn
    folder = checkpoint.saved(tmp_path)
    stored = folder.stored(BLOCK)
    assert (stored.native.name, stored.D, stored.F, stored.others) == ("NVFP4", D, F, set())

    # Each value is rounded once.
    for dtype in (torch.float32, BF16):
        plain = folder.experts(BLOCK, LOGICAL, dtype=dtype)
        for i, x in enumerate(LOGICAL):
            for part, want in zip(("w_gate_up", "w_down"), drawn.weights(x), strict=True):
                assert torch.equal(plain[part][i], want.to(dtype))
    # Elsewhere than on GPUs with kernels that is the default.
    with caplog.at_level(logging.WARNING, "epmoe"):
        default = folder.experts(BLOCK, LOGICAL)
    assert "experts are dequantized to bf16: " in caplog.text
    assert "GPUs of compute capability 9.0 have kernels for NVFP4" in caplog.text
    assert default.keys() == plain.keys()
    assert all(torch.equal(default[name], plain[name]) for name in default)

    # Asked for, and chosen where GPUs have kernels: the same bytes, and the scales of matrices.
    kept = folder.experts(BLOCK, LOGICAL, dtype=MXFP4)
    caplog.clear()
    monkeypatch.setattr("epmoe.checkpoint.safetensors_folder.on_hopper", lambda device: True)
    with caplog.at_level(logging.WARNING, "epmoe"):
        chosen = folder.experts(BLOCK, LOGICAL)
    assert not caplog.records and chosen.keys() == kept.keys()
    given = drawn.arguments(torch.device("cpu"))
    assert kept.keys() == given.keys()
    for name, tensor in given.items():
        assert kept[name].dtype == tensor.dtype
        for got in (kept[name], chosen[name]):
            assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)[LOGICAL])
    with pytest.raises(ValueError, match="must be fp8 with a scale for each block of 128 × 128"):
        folder.experts(BLOCK, LOGICAL, dtype=FP8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_a_folder(tmp_path, kind):
    """`from_safetensors` with the dtype of codes."""
    checkpoint = Checkpoint(kind)
    folder = checkpoint.saved(tmp_path)
    gpt_oss = {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
    options = gpt_oss if checkpoint.drawn.gpt_oss else {}
    with epmoe.ExpertParallel(alone(E, 2, D, "bfloat16", 16), device=torch.device("cpu")) as ep:
        layer = epmoe.MoELayer.from_safetensors(ep, folder, BLOCK, dtype=MXFP4, **options)
        assert layer.experts.weight_format.name == "NVFP4"
        rows = Rows(D, torch.device("cpu"), in_fp8=False, counts=[5, 0, 2, 9])
        got = rows.outputs(layer.experts, None)
        assert (errors(got, rows.wanted(checkpoint.drawn)) <= 0.02).all()
        assert layer(randn(4, D, dtype=BF16)).isfinite().all()


def test_names_of_a_dequantized_copy(tmp_path):
    """As `save_pretrained` writes it."""
    for kind in ("modelopt", "compressed-tensors"):
        path = tmp_path / kind
        path.mkdir()
        names = Checkpoint(kind).saved(path).stored(BLOCK).dequantized
        assert names == {
            "w_gate_up": [f"{EXPERTS}.*.gate_proj.weight", f"{EXPERTS}.*.up_proj.weight"],
            "w_down": [f"{EXPERTS}.*.down_proj.weight"],
        }


def changed(kind: str, ending: str, change) -> dict[str, Tensor]:
    """Tensors of a checkpoint, of which those with this ending are others, or absent."""
    tensors = dict(Checkpoint(kind).tensors)
    for name in [name for name in tensors if name.endswith(ending)]:
        other = change(tensors.pop(name))
        if other is not None:
            tensors[name] = other.contiguous()
    return tensors


REFUSED = {
    "no scale of a matrix": (
        lambda: changed("compressed-tensors", "weight_global_scale", lambda _: None),
        r"experts .* have .* but got also .*input_global_scale",
    ),
    "neither that nor one of rows": (
        lambda: changed("compressed-tensors, rows in bf16", "weight_global_scale", lambda _: None),
        r"weight_scale` is F8_E4M3 \[96, 12\], but scales must be U8 or F8_E8M0",
    ),
    "one expert lacks it": (
        lambda: changed("modelopt", "2.up_proj.weight_scale_2", lambda _: None),
        r"lack .*experts.2.up_proj.weight_scale_2",
    ),
    "a scale of a matrix in bf16": (
        lambda: changed("modelopt", "weight_scale_2", Tensor.bfloat16),
        r"weight_scale_2` is BF16 \[\], but must be F32, one number for each matrix",
    ),
    "several of a matrix": (
        lambda: changed("modelopt", "weight_scale_2", lambda scale: scale.repeat(2)),
        r"weight_scale_2` is F32 \[2\], but must be F32, one number for each matrix",
    ),
    "groups of 32": (
        lambda: changed("modelopt", "weight_scale", lambda scales: scales[:, ::2]),
        (
            r"weight_scale` is F8_E4M3 \[96, 6\], but scales must be F8_E4M3 \[96, 12\] for "
            r"\[96, 192\], one for each group of 16"
        ),
    ),
    "scales that are powers of two": (
        lambda: changed("modelopt", "weight_scale", lambda scales: scales.view(torch.uint8)),
        r"weight_scale` is U8 \[96, 12\], but scales must be F8_E4M3 ",
    ),
    "weights in fp8": (
        lambda: changed("modelopt", "_proj.weight", lambda codes: codes.repeat(1, 2).view(FP8)),
        r"weight` is F8_E4M3 \[96, 192\], with tensor scales, which only packed weights have",
    ),
    "transposed, as Llama 4 has them": (
        lambda: changed(
            "all experts in one",
            "_proj",
            lambda codes: torch.zeros(E, codes.shape[2], codes.shape[1], dtype=torch.uint8),
        ),
        "which do not fit each other",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path, case):
    tensors, message = REFUSED[case]
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        epmoe.SafetensorsFolder(tmp_path).experts(BLOCK, LOGICAL)


def test_scales_of_rows_beside_fp8_are_refused(tmp_path):
    """They belong to formats that are not read."""
    tensors = {f"{BLOCK}.gate.weight": randn(E, D)}
    for x in range(E):
        for name, (n, k) in {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}.items():
            tensors |= {
                f"{EXPERTS}.{x}.{name}.weight": randn(n, k).to(FP8),
                f"{EXPERTS}.{x}.{name}.weight_scale": torch.tensor(0.5),
                f"{EXPERTS}.{x}.{name}.input_scale": torch.tensor(0.5),
            }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="got also .*input_scale"):
        epmoe.SafetensorsFolder(tmp_path).experts(BLOCK, LOGICAL)
