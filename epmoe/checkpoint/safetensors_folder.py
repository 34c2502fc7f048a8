"""A checkpoint as Hugging Face has it, a folder of safetensors, of which each rank reads its own experts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.native.formats import SCALE_BLOCK
from epmoe.native.package import sentence

_INDEX = "model.safetensors.index.json"
_ROUTERS = ("gate", "gate.wg", "router", "router.layer", "router.gate")
_CHOICE_BIASES = (
    "gate.e_score_correction_bias",
    "gate.expert_bias",
    "experts.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "expert_bias",
)


def _of_each(gate: str, up: str, down: str) -> dict[str, list[str]]:
    """Describe the format in which every expert has tensors of its own."""
    kinds = {"w_*": "weight", "*_scales": "weight_scale_inv", "*_bias": "bias"}
    parts = {"gate_up": (gate, up), "down": (down,)}
    return {
        kind.replace("*", part): [f"experts.*.{projection}.{suffix}" for projection in projections]
        for kind, suffix in kinds.items()
        for part, projections in parts.items()
    }


_FORMATS: tuple[dict[str, list[str]], ...] = (
    _of_each("gate_proj", "up_proj", "down_proj"),
    _of_each("w1", "w3", "w2"),
    {
        **{"w_gate_up": ["experts.gate_up_proj"], "w_down": ["experts.down_proj"]},
        **{"gate_up_bias": ["experts.gate_up_proj_bias"], "down_bias": ["experts.down_proj_bias"]},
    },
    {"w_gate_up": ["input_linear.weight"], "w_down": ["output_linear.weight"]},
    {"w_gate_up": ["experts.fc1.weight"], "w_down": ["experts.fc2.weight"]},
)
"""Arguments of `GroupedExperts` with the tensors that hold them, in which * is the number of an expert."""
_OF_EXPERTS = ("experts.", "input_linear.", "output_linear.")
_MOST_NAMES = 6  # of a message
_WEIGHTS, _FP8, _SCALES = ("F64", "F32", "F16", "BF16", "F8_E4M3"), "F8_E4M3", ("F32", "F16", "BF16")


class _Header(NamedTuple):
    """What a file says about a tensor."""

    name: str
    dtype: str
    shape: list[int]

    def __str__(self) -> str:
        return f"`{self.name}` is {self.dtype} {self.shape}"


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors in a folder, by name. Each is read when it is asked for, and nothing is downloaded.

    A MoE block is named as in the model, like "model.layers.3.mlp"; the `block_sparse_moe` of Mixtral's checkpoints is
    found by that name, too. Its experts are

    - tensors of each expert, `BLOCK.experts.7.gate_proj.weight`, `up_proj` and `down_proj`, or Mixtral's w1, w3 and w2,
      each with a `bias` if there are any. fp8 weights (e4m3) have a `weight_scale_inv` each, in fp32, fp16 or
      bf16, for blocks of 128 × 128;
    - one tensor of all experts, `BLOCK.experts.gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F], or both transposed
      as in gpt-oss, with `gate_up_proj_bias` and `down_proj_bias` if there are any; or Granite's `input_linear` and
      `output_linear`, or Aria's `experts.fc1` and `experts.fc2`.

    All experts of a block have the same tensors, dtypes and shapes, one expert for each row of the router. Anything
    else below `BLOCK.experts` or the router is refused, since a model without it is another function.

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
            ValueError: there is no such block, or its router has tensors of another format.
        """
        block, router = self._find(block)
        weight, of_logits = f"{block}.{router}.weight", f"{block}.{router}.bias"
        choice = {f"{block}.{bias}" for bias in _CHOICE_BIASES} & self._file_of.keys()
        bias = min(choice, default=None)
        if unread := (choice | self._under(f"{block}.{router.partition('.')[0]}.")) - {weight, of_logits, bias}:
            raise ValueError(
                f"{self._path(min(unread))}: the router of `{block}` must have a `{router}.weight`, and may have "
                f"`{router}.bias` and one bias of the choice, got also {_some(unread)}"
            )
        return {
            "router_weight": self[weight] if bias is None else self[weight].float(),
            "bias": None if bias is None else self[bias].float().flatten(),
            "logit_bias": self.get(of_logits),
        }

    def experts(self, block: str, logical: Sequence[int], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Some experts of a MoE block. Of other experts only headers are read, of the files that are there.

        Args:
            block: its name.
            logical: the experts, in the order of the result: `Placement.logical_experts` of a rank for instance.
            device: of the result.

        Returns:
            Arguments of `GroupedExperts`: `w_gate_up`, `w_down`, and scales or biases where the checkpoint has them.
            Scales are fp32; everything else has the checkpoint's dtype.

        Raises:
            ValueError: there is no such block, or its experts have another format: the message names the file, the
                tensors and their dtypes and shapes.
            LookupError: the checkpoint has no expert of this number.
        """
        block, router = self._find(block)
        E = self._slice(f"{block}.{router}.weight").get_shape()[0]
        if outside := sorted({x for x in logical if not 0 <= x < E}):
            raise LookupError(f"{self.path}: `{block}` has the experts 0 to {E - 1}, got {outside}")
        tensors = self._format(block, E)
        transposed = self._check(tensors, E)

        def read(argument: str, x: int) -> Tensor:
            names = tensors[argument]
            if "*" not in names[0]:
                part: Tensor = self._slice(names[0])[x]
                return part.t() if transposed else part
            joined = torch.cat([self[_of(x, name)] for name in names])
            return joined.float() if argument.endswith("_scales") else joined

        return {argument: _stack(partial(read, argument), logical, device) for argument in tensors}

    def _find(self, block: str) -> tuple[str, str]:
        """A block's name in the checkpoint, and its router's."""
        for name in (block, f"{block.rpartition('.')[0]}.block_sparse_moe"):
            for router in _ROUTERS:
                if f"{name}.{router}.weight" in self:
                    return name, router
        raise ValueError(f"{self.path}: has no MoE block `{block}`: it has no tensor `{block}.gate.weight`")

    def _format(self, block: str, E: int) -> dict[str, list[str]]:
        """The one of `_FORMATS` that the experts have, without arguments that they lack, and with full names.

        Raises ValueError unless each of E experts has its tensors, and the experts have no others.
        """
        held = self._under(*(f"{block}.{place}" for place in _OF_EXPERTS))
        held -= {f"{block}.{bias}" for bias in _CHOICE_BIASES}
        for known in _FORMATS:
            names = {
                argument: {_of(x, f"{block}.{pattern}") for pattern in patterns for x in range(E)}
                for argument, patterns in known.items()
            }
            present = [argument for argument in known if names[argument] & held]
            if {"w_gate_up", "w_down"} <= set(present):
                break
        else:
            where = self._path(min(held)) if held else self.path
            raise ValueError(
                f"{where}: the experts of `{block}` must be `gate_proj`, `up_proj` and `down_proj`, "
                f"or `w1`, `w3` and `w2`, of each expert, or `gate_up_proj` and `down_proj` of all, got "
                f"{_some(self._under(f'{block}.'))}"
            )
        wanted = set[str]().union(*(names[argument] for argument in present))
        if wanted != held:
            odd = f"got also {_some(held - wanted)}" if held - wanted else f"lack {_some(wanted - held)}"
            raise ValueError(
                f"{self._path(min(held - wanted or held))}: the experts of `{block}`, 0 to {E - 1} as its router has "
                f"{E} rows, have {_some({pattern for argument in present for pattern in known[argument]})}, but {odd}"
            )
        return {argument: [f"{block}.{pattern}" for pattern in known[argument]] for argument in present}

    def _check(self, tensors: Mapping[str, list[str]], E: int) -> bool:
        """Whether the weights are transposed. Only headers are read, and not those of files that other ranks have.

        Raises ValueError unless all experts have one format, and it is a known one.
        """
        headers: dict[str, _Header] = {}
        files = {self._file_of[_of(x, name)] for names in tensors.values() for name in names for x in range(E)}
        here = {file for file in files if (self.path / file).is_file()}
        for argument, names in tensors.items():
            for name in dict.fromkeys(_of(x, name) for name in names for x in range(E)):
                if self._file_of[name] in here:
                    part = self._slice(name)
                    header = _Header(name, part.get_dtype(), part.get_shape())
                    first = headers.setdefault(argument, header)
                    if header[1:] != first[1:]:
                        raise self._refusal(header, f"but {first}: all experts must have one format")
        if headers.keys() != tensors.keys():
            return False  # to read what is not there is an error
        gate_up, down = headers["w_gate_up"], headers["w_down"]
        if gate_up.dtype != down.dtype or down.dtype not in _WEIGHTS:
            raise self._refusal(gate_up, f"and {down}: both must have one dtype of {', '.join(_WEIGHTS)}")
        for part, weight in (("gate_up", gate_up), ("down", down)):
            self._check_scales(weight, headers.get(f"{part}_scales"))
        fused = "*" not in tensors["w_down"][0]
        for header in headers.values():
            if fused and header.shape[:1] != [E]:
                raise self._refusal(header, f"but must have {E} rows, as the router has")
        up, (*_, D, F) = gate_up.shape, (0, 0, *down.shape)  # whatever its dimensions are
        if down.dtype == _FP8 and F % SCALE_BLOCK:  # a block of scales would hold rows of gate and of up
            raise self._refusal(down, f"but fp8 experts need an F that is a multiple of {SCALE_BLOCK}, got {F}")
        if up == ([E, 2 * F, D] if fused else [F, D]):
            return False
        if up == [E, F, 2 * D] and fused:
            return True
        raise self._refusal(gate_up, f"and {down}, which do not fit each other")

    def _check_scales(self, weight: _Header, scales: _Header | None) -> None:
        """Raises ValueError unless fp8 weights have scales of blocks, and other weights have none."""
        if weight.dtype != _FP8:
            if scales is not None:
                raise self._refusal(scales, f"but {weight}, which needs no scales")
            return
        if scales is None:
            raise self._refusal(weight, "without a `weight_scale_inv`")
        blocks = [-(-n // SCALE_BLOCK) for n in weight.shape]
        if scales.dtype not in _SCALES or scales.shape != blocks:
            of_block = f"{blocks} for {weight.shape}, one for each block of {SCALE_BLOCK} × {SCALE_BLOCK}"
            raise self._refusal(scales, f"but scales must be {' or '.join(_SCALES)} {of_block}")

    def _refusal(self, header: _Header, why: str) -> ValueError:
        return ValueError(f"{self._path(header.name)}: {header}, {why}")

    def _under(self, *prefixes: str) -> set[str]:
        return {name for name in self if name.startswith(prefixes)}

    def _path(self, name: str) -> Path:
        return self.path / self._file_of[name]

    def _slice(self, name: str) -> Any:
        return self._open(self._file_of[name]).get_slice(name)

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


def _of(expert: int, pattern: str) -> str:
    """The name of an expert's tensor, or of that of all experts."""
    return pattern.replace("*", str(expert))


def _some(names: Set[str]) -> str:
    """The first names, for a message."""
    return ", ".join(sorted(names)[:_MOST_NAMES]) + ("…" if len(names) > _MOST_NAMES else "")


def _stack(read: Callable[[int], Tensor], logical: Sequence[int], device: torch.device | str) -> Tensor:
    """[e, …] on `device`, written expert by expert. Without any expert, expert 0 says the shape."""
    first = read(logical[0] if logical else 0)
    out = torch.empty(len(logical), *first.shape, dtype=first.dtype, device=device)
    for row, x in zip(out, logical, strict=True):
        row.copy_(first if x == logical[0] else read(x))
    return out
