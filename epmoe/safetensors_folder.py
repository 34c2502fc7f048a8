"""A checkpoint as Hugging Face has it, a folder of safetensors, of which each rank reads its own experts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epmoe.extras import sentence
from epmoe.native.formats import SCALE_BLOCK

_INDEX = "model.safetensors.index.json"
_ROUTERS = ("gate", "router", "router.layer", "router.gate")
_CHOICE_BIASES = (
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "expert_bias",
)
_SEPARATE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_FUSED = {
    "w_gate_up": ("experts.gate_up_proj", "input_linear.weight"),
    "w_down": ("experts.down_proj", "output_linear.weight"),
    "gate_up_bias": ("experts.gate_up_proj_bias",),
    "down_bias": ("experts.down_proj_bias",),
}


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors in a folder, by name. Each is read when it is asked for, and nothing is downloaded.

    A MoE block is named as in the model, like "model.layers.3.mlp"; the `block_sparse_moe` of Mixtral's checkpoints is
    found by that name, too. Its experts are

    - tensors of each expert, `BLOCK.experts.7.gate_proj.weight`, `up_proj` and `down_proj`, or Mixtral's w1, w3 and w2.
      fp8 weights have a `weight_scale_inv` beside them, for blocks of 128 × 128;
    - one tensor of all experts, `BLOCK.experts.gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F], or both transposed
      as in gpt-oss, with `gate_up_proj_bias` and `down_proj_bias` if there are any; or Granite's `input_linear` and
      `output_linear`.

    Args:
        path: of the folder. Its `model.safetensors.index.json` says which file has a tensor. Without one, the headers
            of all files are read.

    Raises:
        ValueError: the folder has no weights, or a file cannot be read.
        ImportError: safetensors is not installed; with an index, when the first tensor is read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._opened: dict[str, Any] = {}
        if (index := self.path / _INDEX).is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            files = sorted(file.name for file in self.path.glob("*.safetensors"))
            self._file_of = {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118
        if not self._file_of:
            raise ValueError(f"{self.path}: has no weights (*.safetensors)")

    def __getitem__(self, name: str) -> Tensor:
        return self._open(self._file_of[name]).get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of  # Mapping's would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def router(self, block: str) -> dict[str, Tensor | None]:
        """The router of a MoE block.

        Args:
            block: its name.

        Returns:
            Arguments of `MoELayer`: `router_weight` [E, D], and `bias` and `logit_bias` [E] or None. With a `bias` both
            are fp32, because models that have one compute their scores in fp32; otherwise the weight has the
            checkpoint's dtype.

        Raises:
            ValueError: there is no such block.
        """
        block, router = self._find(block)
        weight, of_logits = self[f"{block}.{router}.weight"], f"{block}.{router}.bias"
        name = next((name for name in (f"{block}.{bias}" for bias in _CHOICE_BIASES) if name in self), None)
        return {
            "router_weight": weight if name is None else weight.float(),
            "bias": None if name is None else self[name].float().flatten(),
            "logit_bias": self.get(of_logits),
        }

    def experts(self, block: str, logical: Sequence[int], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Some experts of a MoE block. Other experts are not read.

        Args:
            block: its name.
            logical: the experts, in the order of the result: `Placement.logical_experts` of a rank for instance.
            device: of the result.

        Returns:
            Arguments of `GroupedExperts`: `w_gate_up`, `w_down`, and scales or biases where the checkpoint has them.

        Raises:
            ValueError: there is no such block, or its experts have another format.
            LookupError: the checkpoint has no expert of this number.
        """
        block, _ = self._find(block)
        experts = f"{block}.experts"
        for gate, up, down in _SEPARATE:
            if f"{experts}.0.{gate}.weight" in self:
                parts = {"w_gate_up": [f"{gate}.weight", f"{up}.weight"], "w_down": [f"{down}.weight"]}
                if f"{experts}.0.{gate}.weight_scale_inv" in self:
                    self._check_blocks(f"{experts}.0.{gate}.weight")
                    scales = [f"{projection}.weight_scale_inv" for projection in (gate, up, down)]
                    parts |= {"gate_up_scales": scales[:2], "down_scales": scales[2:]}
                return {
                    argument: _stack(lambda x: self._joined(f"{experts}.{x}.", names), logical, device)  # noqa: B023
                    for argument, names in parts.items()
                }
        fused = {
            argument: f"{block}.{name}"
            for argument, names in _FUSED.items()
            for name in names
            if f"{block}.{name}" in self
        }
        if not {"w_gate_up", "w_down"} <= fused.keys():
            held = sorted(name for name in self if name.startswith(f"{block}."))
            raise ValueError(
                f"{self.path}: the experts of `{block}` must be `gate_proj`, `up_proj` and `down_proj`, or `w1`, `w3` "
                f"and `w2`, of each expert, or `gate_up_proj` and `down_proj` of all, got {', '.join(held[:6])}…"
            )
        slices = {argument: self._open(self._file_of[name]).get_slice(name) for argument, name in fused.items()}
        (_, *up), (_, *down) = (slices[name].get_shape() for name in ("w_gate_up", "w_down"))
        transposed = up == [down[1], 2 * down[0]]  # [D, 2F] and [F, D]; otherwise up == [2 * down[1], down[0]]
        return {
            argument: _stack(lambda x: part[x].t() if transposed else part[x], logical, device)  # noqa: B023
            for argument, part in slices.items()
        }

    def _find(self, block: str) -> tuple[str, str]:
        """A block's name in the checkpoint, and its router's."""
        for name in (block, f"{block.rpartition('.')[0]}.block_sparse_moe"):
            for router in _ROUTERS:
                if f"{name}.{router}.weight" in self:
                    return name, router
        raise ValueError(f"{self.path}: has no MoE block `{block}`: it has no tensor `{block}.gate.weight`")

    def _joined(self, prefix: str, names: list[str]) -> Tensor:
        return torch.cat([self[prefix + name] for name in names])

    def _check_blocks(self, gate: str) -> None:
        """Raises ValueError if blocks of scales would hold rows of gate and of up."""
        if (F := self._open(self._file_of[gate]).get_slice(gate).get_shape()[0]) % SCALE_BLOCK:
            raise ValueError(f"{self.path}: fp8 experts need an F that is a multiple of {SCALE_BLOCK}, got {F}")

    def _open(self, file: str) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ImportError(sentence("reading a checkpoint", "safetensors")) from None
        if file not in self._opened:
            try:
                self._opened[file] = safe_open(self.path / file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{self.path / file}: {error}") from None
        return self._opened[file]


def _stack(read: Callable[[int], Tensor], logical: Sequence[int], device: torch.device | str) -> Tensor:
    """[e, …] on `device`, written expert by expert. Without any expert, expert 0 says the shape."""
    first = read(logical[0] if logical else 0)
    out = torch.empty(len(logical), *first.shape, dtype=first.dtype, device=device)
    for row, x in zip(out, logical, strict=True):
        row.copy_(first if x == logical[0] else read(x))
    return out
