"""Reads checkpoints of Hugging Face: folders of safetensors. Each rank reads its own experts only.

`SafetensorsFolder` first finds out from names and headers how a MoE block is stored (`Stored`), and
then reads experts one by one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from epmoe.local.gemm.gemm import on_hopper
from epmoe.local.weight_formats import (
    FP8_BLOCKS,
    MXFP4_GROUPS,
    NVFP4_GROUPS,
    PACKED,
    WeightFormat,
    bits_of,
    dequantize_weights,
    granularity,
)
from epmoe.native.arguments import FLOATS, FP8, MXFP4, dtype_name
from epmoe.native.package import sentence

_log = logging.getLogger("epmoe")

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
# What the router of a block may be called.
_ROUTERS = ("gate", "gate.wg", "router", "router.layer", "router.gate")
# What the bias that is added to the scores for the choice of experts may be called.
_CHOICE_BIASES = (
    "gate.e_score_correction_bias",
    "gate.expert_bias",
    "experts.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "expert_bias",
    "router_bias",
)
# How the name of a tensor of one expert begins. The * stands for the number of the expert.
_EXPERT = "experts.*."
# What the gate, up and down projections of one expert may be called.
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
_DIVISOR = ".weight_global_scale"
"""How the name of a tensor scale ends by which codes are divided, in compressed-tensors. All other
tensor scales are multiplied.
"""


class _Suffixes(NamedTuple):
    """How the names of an expert's tensors end in one format, where the format has them."""

    weight: str
    scales: str | None = None
    bias: str | None = None
    tensor_scale: str | None = None
    """the scale of a whole matrix, in NVFP4"""
    inputs: str | None = None
    """the scale of the rows that the matrix multiplies, which is not used"""


_SUFFIXES = (
    _Suffixes(".weight", ".weight_scale_inv", ".bias"),
    _Suffixes(".weight", ".weight_scale", ".bias"),
    _Suffixes(".weight", ".scale", ".bias"),
    _Suffixes(".weight_packed", ".weight_scale", ".bias"),
    _Suffixes(".weight", ".weight_scale", ".bias", ".weight_scale_2", ".input_scale"),
    _Suffixes(".weight_packed", ".weight_scale", ".bias", _DIVISOR, ".input_global_scale"),
)
"""The formats with tensors of each expert: that of DeepSeek, of compressed-tensors, of DeepSeek-V4,
of MX formats, and NVFP4 of modelopt and of compressed-tensors.
"""
_SUFFIXES_OF_ALL = (
    _Suffixes("", None, "_bias"),
    _Suffixes("_blocks", "_scales", "_bias"),
    _Suffixes("", "_weight_scale", "_bias", "_weight_scale_2", "_input_scale"),
)
"""The formats with one tensor for all experts: that of transformers, of gpt-oss in MXFP4, and of
modelopt in NVFP4.
"""
_INPUTS = "inputs"
"""The key in `Stored.tensors` of tensors that are not read."""


def _format(gate_up: Sequence[str], down: str, suffixes: _Suffixes) -> dict[str, list[str]]:
    """Describe one format of experts: map arguments of `GroupedExperts` to names of tensors.

    `gate_up` has the name of one tensor with gate and up, or the names of two tensors; `down` is
    the name of the other projection. In a name, * stands for the number of an expert.
    """
    by_part = {"w_*": suffixes.weight, "*_scales": suffixes.scales, "*_bias": suffixes.bias}
    tensors = {}
    for argument, suffix in by_part.items():
        if suffix is not None:
            tensors[argument.replace("*", "gate_up")] = [name + suffix for name in gate_up]
            tensors[argument.replace("*", "down")] = [down + suffix]
    # These are one argument for both matrices.
    of_both = {"tensor_scales": suffixes.tensor_scale, _INPUTS: suffixes.inputs}
    for argument, suffix in of_both.items():
        if suffix is not None:
            tensors[argument] = [name + suffix for name in (*gate_up, down)]
    return tensors


# The formats that can be read: first those with tensors of each expert, then those with one tensor
# of all experts (transformers, gpt-oss, Granite, Aria, Step).
_FORMATS: tuple[dict[str, list[str]], ...] = (
    *(
        _format((_EXPERT + gate, _EXPERT + up), _EXPERT + down, suffixes)
        for gate, up, down in _PROJECTIONS
        for suffixes in _SUFFIXES
    ),
    *(
        _format(["experts.gate_up_proj"], "experts.down_proj", suffixes)
        for suffixes in _SUFFIXES_OF_ALL
    ),
    _format(["input_linear"], "output_linear", _Suffixes(".weight")),
    _format(["experts.fc1"], "experts.fc2", _Suffixes(".weight")),
    _format(["gate_proj", "up_proj"], "down_proj", _Suffixes(".weight", ".weight_scale_inv")),
)
_OF_EXPERTS = (
    ("experts.", "input_linear.", "output_linear."),
    ("gate_proj.", "up_proj.", "down_proj."),
)
"""How the names of experts' tensors begin below a block. Names of the second row count only in a
block that has no name of the first row. In Step 3.5 they are routed experts; in other models they
may belong to a shared expert.
"""
GateBias = Literal["logits", "choice"] | None
"""What a tensor `gate.bias` is added to, which its name does not say. "logits": the logits, as in
gpt-oss. "choice": the scores for the choice of experts, as in DeepSeek's own files. None: the
caller does not know, and a checkpoint with such a tensor is refused.
"""
# A message has at most this many names.
_MOST_NAMES = 6
# The two weight matrices of an expert.
_MATRICES = ("gate_up", "down")
# Dtypes of weights that are not packed, as headers name them.
_WEIGHTS = ("F64", "F32", "F16", "BF16", "F8_E4M3")
# Dtypes of packed weights: each byte has two numbers of four bits.
_PACKED = ("U8", "I8")
_SCALES = {
    "F8_E4M3": ("F32", "F16", "BF16", "F8_E8M0", "U8"),
    "U8": ("U8", "F8_E8M0"),
    "I8": ("U8", "F8_E8M0"),
}
"""The dtypes that scales may have, by the dtype of their weights. U8 scales are the bytes of UE8M0.
"""
_SCALES_OF_NVFP4 = ("F8_E4M3",)
"""The dtype of scales beside tensor scales."""


class _Header(NamedTuple):
    """What the header of a file says of one tensor."""

    name: str
    dtype: str
    shape: list[int]

    def __str__(self) -> str:
        return f"`{self.name}` is {self.dtype} {self.shape}"

    def of_expert(self, fused: bool, packed: bool = False) -> list[int]:
        """The shape of one expert's part of the tensor, counted in numbers.

        `fused`: the tensor has all experts. `packed`: each byte has two numbers.
        """
        shape = self.shape[1:] if fused else self.shape
        if not packed or not shape:
            return shape
        # gpt-oss divides the bytes of a row into groups: [n, groups, bytes of a group].
        if len(shape) == 3:
            shape = [shape[0], shape[1] * shape[2]]
        return [*shape[:-1], 2 * shape[-1]]


class _Block(NamedTuple):
    """The names that a checkpoint has for a MoE block and its router."""

    block: str
    router: str
    """the name of the router below the block, such as `gate`"""


class Stored(NamedTuple):
    """How a checkpoint stores a MoE block."""

    router: dict[str, str]
    """the names of the router's tensors, by arguments of `MoELayer`"""
    tensors: dict[str, list[str]]
    """the names of the experts' tensors, by arguments of `GroupedExperts`; * stands for the number
    of an expert
    """
    others: set[str]
    """the names of all other tensors below the block, such as those of shared experts"""
    num: int
    """E, the number of experts"""
    transposed: bool
    """whether the weights are stored as [k, n] and not as [n, k]"""
    native: WeightFormat | None
    """The format in which `GroupedExperts` can take the quantized weights as they are. None: the
    weights have no scales, or they have scales that `GroupedExperts` do not take.
    """
    D: int
    """the hidden size; 0 if a file is absent whose header would be needed"""
    F: int
    """the width of an expert; 0 if a file is absent whose header would be needed"""

    @property
    def fused(self) -> bool:
        """Whether one tensor has all experts, and not one expert."""
        return "*" not in self.tensors["w_down"][0]

    @property
    def dequantized(self) -> dict[str, list[str]]:
        """The names of the experts' tensors in a dequantized copy of the checkpoint."""
        tensors = {}
        for argument, names in self.tensors.items():
            if argument.endswith("_scales") or argument == _INPUTS:
                continue
            # The names of packed weights end with a suffix that plain weights do not have.
            plain = [name.removesuffix("_packed").removesuffix("_blocks") for name in names]
            tensors[argument] = plain
        return tensors

    @property
    def dequantized_transposed(self) -> bool:
        """Whether weights are stored as [k, n] in a dequantized copy of the checkpoint.

        gpt-oss stores packed weights as [n, k], and transformers expects plain ones as [k, n].
        """
        return self.transposed or self.tensors["w_down"][0].endswith("_blocks")


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors in a folder of safetensors, by their names.

    It is a mapping: `folder["model.norm.weight"]` reads that tensor. A tensor is read when it is
    asked for, and nothing is downloaded.

    A MoE block has the name that it has in the model, such as "model.layers.3.mlp". Mixtral's
    checkpoints call the block `block_sparse_moe` and Step's call it `moe`; these blocks are found
    by the model's name, too. Either each expert has tensors of its own, such as
    `BLOCK.experts.7.gate_proj.weight`, or one tensor has all experts, such as
    `BLOCK.experts.gate_up_proj` [E, 2F, D] or its transpose. There may be scales and biases. The
    page on checkpoints lists the formats.

    All experts of a block must have the same tensors, dtypes and shapes, and there must be one
    expert for each row of the router. Any other tensor below `BLOCK.experts` or the router is
    refused, since a model that leaves it out would compute something else.

    Args:
        path: the folder. Its files are those that transformers would read. If there is a
            `model.safetensors`, it is the only file. Otherwise the files are those of
            `model.safetensors.index.json`, some of which may be absent. Without an index they are
            all `*.safetensors`. The header of a file says which tensors it has; for absent files
            the index says it.

    Raises:
        ValueError: the folder has no weights, or a file cannot be read, or two files have a tensor
            of the same name.
        ImportError: safetensors is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # The files that are open, by their names, and the name of the file of each tensor.
        self._opened: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        # The file that the index names for each tensor; {} without an index.
        indexed: dict[str, str] = {}
        if (self.path / WHOLE).is_file():
            files = [WHOLE]
        elif (self.path / INDEX).is_file():
            indexed = _weight_map(self.path / INDEX)
            files = sorted(file for file in set(indexed.values()) if (self.path / file).is_file())
        else:
            files = sorted(file.name for file in self.path.glob("*.safetensors"))
        # For files that are present, the headers count. The index may be wrong.
        for file in files:
            for name in self._open(file).keys():  # noqa: SIM118
                other = self._file_of.setdefault(name, file)
                if other != file:
                    raise ValueError(
                        f"{self.path}: only one file must have `{name}`, got {other} and {file}"
                    )
        # For absent files there is only the index.
        for name, file in indexed.items():
            if file not in files:
                self._file_of.setdefault(name, file)
        if not self._file_of:
            raise ValueError(f"{self.path}: has no weights (*.safetensors)")

    def __getitem__(self, name: str) -> Tensor:
        return self._open(self._file_of[name]).get_tensor(name)

    def __contains__(self, name: object) -> bool:
        # The method of `Mapping` would read the tensor.
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def router(self, block: str, gate_bias: GateBias = "logits") -> dict[str, Tensor | None]:
        """Read the router of a MoE block.

        Args:
            block: the name of the block.
            gate_bias: what a tensor `BLOCK.gate.bias` is, since its name does not say so. With
                "logits" it is the `logit_bias`, and with "choice" it is the `bias`. With None such
                a tensor is refused.

        Returns:
            Arguments of `MoELayer`: `router_weight` [E, D], and `bias` and `logit_bias`, each [E]
            or None. If there is a `bias`, it and the weight are fp32, because models with such a
            bias compute their scores in fp32. Otherwise the weight has the checkpoint's dtype.

        Raises:
            ValueError: there is no such block; or its router has other tensors, too; or it has a
                `gate.bias`, and `gate_bias` is None.
        """
        names = self._router(self._find(block), gate_bias)
        router: dict[str, Tensor | None] = {}
        for argument in ("router_weight", "bias", "logit_bias"):
            router[argument] = self.get(names.get(argument, ""))
        # Models with a bias for the choice compute scores in fp32. Some of them store it as [1, E].
        weight = router["router_weight"]
        bias = router["bias"]
        assert weight is not None
        if bias is not None:
            router["router_weight"] = weight.float()
            router["bias"] = bias.float().flatten()
        return router

    def experts(
        self,
        block: str,
        logical: Sequence[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """Read some experts of a MoE block.

        Of the block's other experts, only the headers of files that are present are read.

        By default weights keep the dtype of the checkpoint, with these exceptions. fp8 weights stay
        fp8 only if they have a scale for each block of 128 × 128. MXFP4 and NVFP4 weights stay so
        only on GPUs of compute capability 9.0. All other weights with scales become bf16, and a
        warning of the logger "epmoe" names their tensors. Scales of the rows that NVFP4 weights
        multiply are not used, since rows are bf16 or fp8 here.

        Args:
            block: the name of the block.
            logical: the numbers of the experts, in the order of the result, such as
                `Placement.logical_experts` of a rank.
            device: the device of the result.
            dtype: fp32, fp16 or bf16: weights and biases are cast or dequantized to it and rounded
                once. fp8 e4m3 or float4_e2m1fn_x2: the weights must be fp8 with blocks of 128 ×
                128, or MXFP4 or NVFP4, and stay so on any device. None: the default above.

        Returns:
            Arguments of `GroupedExperts`: `w_gate_up`, `w_down`, and scales or biases if the
            checkpoint has any. Scales of fp8 weights are fp32; scales of MXFP4 are float8_e8m0fnu;
            those of NVFP4 are float8_e4m3fn, with `tensor_scales` fp32. Biases of experts with
            scales are bf16. If F of fp8 experts is not a multiple of 128, zeros fill it up to the
            next multiple; they do not change the outputs.

        Raises:
            TypeError: `dtype` is none of these.
            ValueError: there is no such block; or its experts have an unknown format, and then the
                message names the file, the tensors and their dtypes and shapes; or the weights
                cannot be loaded as they are in the quantized dtype that `dtype` asks for.
            LookupError: the checkpoint has no expert of one of these numbers.
        """
        if dtype not in (None, *FLOATS, *PACKED):
            raise TypeError(
                f"`dtype` must be None, {', '.join(map(dtype_name, (*FLOATS, *PACKED)))}, got "
                f"{dtype}"
            )
        # The block must have these experts. The router has a row for each expert.
        found = self._find(block)
        block = found.block
        E = self.shape(f"{block}.{found.router}.weight")[0]
        outside = sorted({x for x in logical if not 0 <= x < E})
        if outside:
            raise LookupError(f"{self.path}: `{block}` has the experts 0 to {E - 1}, got {outside}")
        # It must be possible to load the experts in `dtype`.
        stored = self._stored(block, E)
        if dtype in PACKED and (stored.native is None or dtype != stored.native.codes):
            needed = "fp8 with a scale for each block of 128 × 128"
            if dtype == MXFP4:
                needed = "MXFP4 or NVFP4"
            raise ValueError(
                f"{self.path}: the experts of `{block}` must be {needed} to be loaded in "
                f"{dtype_name(dtype)}"
            )
        if dtype is None and "down_scales" in stored.tensors:
            dtype = self._dtype_with_scales(stored, device)
        return _stack(lambda x: self._expert(stored, x, device, dtype), logical, device)

    def _dtype_with_scales(self, stored: Stored, device: torch.device | str) -> torch.dtype:
        """Choose the dtype for weights with scales if the caller has not chosen one.

        Logs a warning if the weights will be dequantized.
        """
        if stored.native is None:
            why = "experts in fp8 have scales of blocks of 128 × 128"
        elif stored.native.packed > 1 and not on_hopper(device):
            why = f"GPUs of compute capability 9.0 have kernels for {stored.native.name}"
        else:
            return stored.native.codes
        names = _some({name for part in _MATRICES for name in stored.tensors[f"w_{part}"]})
        _log.warning("%s: experts are dequantized to bf16: %s: %s", self.path, names, why)
        return torch.bfloat16

    def stored(self, *blocks: str, gate_bias: GateBias = "logits") -> Stored:
        """Find out how a MoE block is stored. The block is the first of `blocks` that is present.

        Only headers are read. Raises ValueError for the faults of a block for which `router` and
        `experts` do.
        """
        found = self._find(*blocks)
        names = self._router(found, gate_bias)
        E = self.shape(names["router_weight"])[0]
        stored = self._stored(found.block, E)
        # All other tensors of the block belong to something else, such as shared experts.
        others = self._under(f"{found.block}.") - {*names.values()}
        for patterns in stored.tensors.values():
            others -= _names_of_all(patterns, E)
        return stored._replace(router=names, others=others)

    def shape(self, name: str) -> list[int]:
        """Read the shape of a tensor from its file's header."""
        shape: list[int] = self._slice(name).get_shape()
        return shape

    def _router(self, found: _Block, gate_bias: GateBias) -> dict[str, str]:
        """Map arguments of `MoELayer` to the names of the router's tensors.

        Arguments that the checkpoint does not have are left out. Raises ValueError if the router
        has other tensors, too, or a `gate.bias` of which `gate_bias` does not say what it is.
        """
        block, router = found
        names = {"router_weight": f"{block}.{router}.weight"}
        choice = {f"{block}.{bias}" for bias in _CHOICE_BIASES} & self._file_of.keys()
        # A tensor of this name may be either bias, so that `gate_bias` decides.
        plain = f"{block}.{router}.bias"
        if gate_bias == "logits":
            names["logit_bias"] = plain
        elif plain in self and gate_bias == "choice":
            choice.add(plain)
        elif plain in self:
            raise ValueError(
                f"{self._path(plain)}: `{plain}` must be said to be the bias of the logits, by "
                "`routing.logit_bias`, or that of the choice, by `routing.selection_bias`"
            )
        if choice:
            names["bias"] = min(choice)
        # A router with any other tensor would compute something else, so it is refused.
        unread = choice | self._under(f"{block}.{router.partition('.')[0]}.")
        unread -= set(names.values())
        if unread:
            raise ValueError(
                f"{self._path(min(unread))}: the router of `{block}` must have a "
                f"`{router}.weight`, and may have `{router}.bias` and one bias of the choice, got "
                f"also {_some(unread)}"
            )
        return {argument: name for argument, name in names.items() if name in self}

    def _expert(
        self, stored: Stored, x: int, device: torch.device | str, dtype: torch.dtype | None
    ) -> dict[str, Tensor]:
        """Read the expert `x`: arguments of `GroupedExperts` without the first dimension.

        `dtype` is the dtype of the result; None keeps that of the checkpoint.
        """
        # The last block of fp8 weights may be incomplete. It is filled up with zeros: rows of gate
        # and of up, and columns of down.
        padding = 0
        if dtype == FP8:
            padding = -stored.F % FP8_BLOCKS.block[1]
        out = {}
        tensor_scales = self._tensor_scales(stored, x, device)
        for part in _MATRICES:
            is_gate_up = part == "gate_up"
            # Read the tensors, of which gate and up may have one each.
            weights = self._read_all(stored, f"w_{part}", x, MXFP4, device)
            scales = self._read_all(stored, f"{part}_scales", x, MXFP4_GROUPS.scale, device)
            biases = self._read_all(stored, f"{part}_bias", x, None, device)
            if stored.transposed:
                weights = [weight.t() for weight in weights]
            # Quantized weights stay as they are, or lose their scales.
            if dtype == FP8:
                dim = 0 if is_gate_up else 1
                weights = [_padded(weight, padding, dim) for weight in weights]
            elif dtype in FLOATS and scales:
                of_part: Sequence[Tensor | None] = [None] * len(weights)
                if tensor_scales:
                    of_part = tensor_scales[:-1] if is_gate_up else tensor_scales[-1:]
                weights = [
                    dequantize_weights(weight, scale, dtype, tensor_scale)
                    for weight, scale, tensor_scale in zip(weights, scales, of_part, strict=True)
                ]
                scales = []
            # Put gate and up below each other.
            out[f"w_{part}"] = _joined(weights).to(dtype)
            if scales:
                assert stored.native is not None
                out[f"{part}_scales"] = _joined(scales).to(stored.native.scale)
            if biases:
                bias_padding = padding if is_gate_up else 0
                biases = [pad(bias, (0, bias_padding)) for bias in biases]
                out[f"{part}_bias"] = torch.cat(biases).to(torch.bfloat16 if scales else dtype)
        if tensor_scales and dtype in PACKED:
            # If gate and up are one tensor, they have one scale.
            *_, up, down = tensor_scales
            out["tensor_scales"] = torch.stack([tensor_scales[0], up, down])
        return out

    def _tensor_scales(self, stored: Stored, x: int, device: torch.device | str) -> list[Tensor]:
        """Read the tensor scales of the expert `x`, fp32 [] for each of its matrices, of which down
        is the last; [] if the checkpoint has none.
        """
        scales = []
        for name in stored.tensors.get("tensor_scales", ()):
            # A tensor may have the scales of all experts, or one scale for all of them.
            value: Tensor = self[_name_of(x, name)]
            if value.numel() > 1:
                value = value[x]
            scale = value.to(device, torch.float32).reshape(())
            scales.append(scale.reciprocal() if name.endswith(_DIVISOR) else scale)
        return scales

    def _read_all(
        self,
        stored: Stored,
        argument: str,
        x: int,
        of_bytes: torch.dtype | None,
        device: torch.device | str,
    ) -> list[Tensor]:
        """Read the tensors of one argument for the expert `x`; [] if the checkpoint has none.

        `of_bytes` is the dtype that tensors of bytes are meant to have.
        """
        names = stored.tensors.get(argument, ())
        return [self._read(name, x, of_bytes).to(device) for name in names]

    def _read(self, name: str, x: int, of_bytes: torch.dtype | None) -> Tensor:
        """Read one tensor of the expert `x`. Weights and scales become matrices.

        `name` is a name of `Stored.tensors`. A tensor of bytes is viewed as the dtype `of_bytes`.
        """
        tensor: Tensor = self[_name_of(x, name)] if "*" in name else self._slice(name)[x]
        # gpt-oss divides the bytes of a row into groups: [n, groups, bytes of a group].
        if tensor.dim() == 3:
            tensor = tensor.flatten(1)
        if of_bytes and tensor.dtype in (torch.uint8, torch.int8):
            return tensor.view(of_bytes)
        return tensor

    def _find(self, *blocks: str) -> _Block:
        """Find the first of these blocks that the checkpoint has. Raises ValueError if it has none.

        A block is present if it has a router. Mixtral's and Step's names of a block are tried, too.
        """
        for block in blocks:
            parent = block.rpartition(".")[0]
            for name in (block, f"{parent}.block_sparse_moe", f"{parent}.moe"):
                for router in _ROUTERS:
                    if f"{name}.{router}.weight" in self:
                        return _Block(name, router)
        raise ValueError(
            f"{self.path}: has no MoE block `{blocks[0]}`: it has no tensor "
            f"`{blocks[0]}.gate.weight`"
        )

    def _tensors(self, block: str, E: int) -> dict[str, list[str]]:
        """Find out which of `_FORMATS` the E experts of a block have.

        Returns the format with the full names of its tensors, and without arguments for which the
        checkpoint has no tensors. Raises ValueError if a tensor of an expert is missing, or if the
        experts have tensors that the format does not know.
        """
        present_names = self._names_of_experts(block)
        # Write the names with * in place of the number of an expert, as the formats do.
        patterns = set()
        for name in present_names:
            patterns.add(re.sub(r"^experts\.\d+\.", _EXPERT, name.removeprefix(f"{block}.")))
        # Several formats may fit, such as one with scales and the same without. Take the one that
        # leaves the fewest names unread.
        fitting = []
        for known in _FORMATS:
            found_part = {}
            for argument, names_of_argument in known.items():
                if patterns & {*names_of_argument}:
                    found_part[argument] = names_of_argument
            # Scales of rows are left unread beside NVFP4 only.
            if "tensor_scales" not in found_part:
                found_part.pop(_INPUTS, None)
            if {"w_gate_up", "w_down"} <= found_part.keys():
                fitting.append(found_part)
        if not fitting:
            where = self._path(min(present_names)) if present_names else self.path
            raise ValueError(
                f"{where}: the experts of `{block}` must be `gate_proj`, `up_proj` and "
                "`down_proj`, or `w1`, `w3` and `w2`, of each expert, or `gate_up_proj` and "
                f"`down_proj` of all, got {_some(self._under(f'{block}.'))}"
            )
        found = min(fitting, key=lambda part: len(patterns.difference(*part.values())))
        # Each expert must have all tensors of the format, and there must be no other tensors.
        names = set[str]().union(*found.values())
        wanted = _names_of_all((f"{block}.{pattern}" for pattern in names), E)
        surplus = present_names - wanted
        if wanted != present_names:
            if surplus:
                odd = f"got also {_some(surplus)}"
            else:
                odd = f"lack {_some(wanted - present_names)}"
            where = self._path(min(surplus or present_names))
            raise ValueError(
                f"{where}: the experts of `{block}`, 0 to {E - 1} "
                f"as its router has {E} rows, have {_some(names)}, but {odd}"
            )
        full_names = {}
        for argument, argument_patterns in found.items():
            full_names[argument] = [f"{block}.{pattern}" for pattern in argument_patterns]
        return full_names

    def _names_of_experts(self, block: str) -> set[str]:
        """The names of the tensors of a block's routed experts.

        They are those of the first row of `_OF_EXPERTS` of which the block has any.
        """
        biases = {f"{block}.{bias}" for bias in _CHOICE_BIASES}
        for places in _OF_EXPERTS:
            prefixes = [f"{block}.{place}" for place in places]
            found = self._under(*prefixes) - biases
            if found:
                return found
        return set()

    def _stored(self, block: str, E: int) -> Stored:
        """Find out how the E experts of a block are stored, by the headers of files.

        Some files may be absent, since only other ranks need them. Raises ValueError unless all
        experts have the same known format. The fields `router` and `others` of the result are
        empty.
        """
        tensors = self._tensors(block, E)
        # All experts must have the same header for an argument. Keep that of the first expert.
        headers: dict[str, _Header] = {}
        needed = {argument: names for argument, names in tensors.items() if argument != _INPUTS}
        for argument, names in needed.items():
            for name in dict.fromkeys(_name_of(x, name) for name in names for x in range(E)):
                # The file may be absent.
                if self._file_of[name] not in self._opened:
                    continue
                part = self._slice(name)
                header = _Header(name, part.get_dtype(), part.get_shape())
                first = headers.setdefault(argument, header)
                if header[1:] != first[1:]:
                    raise self._refusal(header, f"but {first}: all experts must have one format")
        # If no header of an argument is there, the sizes are unknown. That is no error yet: it will
        # be one for a rank that reads an absent file.
        if headers.keys() != needed.keys():
            return Stored(
                router={},
                tensors=tensors,
                others=set(),
                num=E,
                transposed=False,
                native=None,
                D=0,
                F=0,
            )
        # Both weights must have the same dtype. A tensor of all experts must have a row for each
        # row of the router.
        gate_up = headers["w_gate_up"]
        down = headers["w_down"]
        packed = down.dtype in _PACKED and "down_scales" in headers
        is_known_dtype = down.dtype in _WEIGHTS or packed
        if gate_up.dtype != down.dtype or not is_known_dtype:
            raise self._refusal(
                gate_up, f"and {down}: both must have one dtype of {', '.join(_WEIGHTS)}"
            )
        fused = "*" not in tensors["w_down"][0]
        tensor_scales = headers.pop("tensor_scales", None)
        for header in headers.values():
            if fused and header.shape[:1] != [E]:
                raise self._refusal(header, f"but must have {E} rows, as the router has")
        if tensor_scales is not None:
            self._check_tensor_scales(tensor_scales, E if fused else 1)
        # The shapes of an expert must fit each other. A header may have any number of dimensions,
        # so zeros stand for those of `down` that are missing.
        gate_up_shape = gate_up.of_expert(fused, packed)
        n, k = (0, 0, *down.of_expert(fused, packed))[-2:]
        may_be_transposed = (
            fused and len(tensors["w_gate_up"]) == 1 and "down_scales" not in headers
        )
        transposed = may_be_transposed and gate_up_shape == [k, 2 * n]
        if transposed:
            D = k
            F = n
        else:
            D = n
            F = k
        if not transposed and gate_up_shape != [2 * F // len(tensors["w_gate_up"]), D]:
            raise self._refusal(gate_up, f"and {down}, which do not fit each other")
        # `GroupedExperts` take both matrices as they are, or both must be dequantized.
        natives = set()
        for part in _MATRICES:
            scales = headers.get(f"{part}_scales")
            weight = headers[f"w_{part}"]
            natives.add(self._native(weight, scales, fused, packed, tensor_scales is not None))
        native = natives.pop() if len(natives) == 1 else None
        return Stored(
            router={},
            tensors=tensors,
            others=set(),
            num=E,
            transposed=transposed,
            native=native,
            D=D,
            F=F,
        )

    def _check_tensor_scales(self, header: _Header, num: int) -> None:
        """Raise ValueError unless a tensor is fp32 with one number, or with one for each of `num`
        experts.
        """
        if header.dtype != "F32" or math.prod(header.shape) not in (1, num):
            raise self._refusal(header, "but must be F32, one number for each matrix")

    def _native(
        self,
        weight: _Header,
        scales: _Header | None,
        fused: bool,
        packed: bool,
        has_tensor_scales: bool,
    ) -> WeightFormat | None:
        """Find out in which format `GroupedExperts` can take a quantized weight: `Stored.native`.

        Raises ValueError unless a quantized weight has the scales that it needs, and any other
        weight has none.
        """
        known = _SCALES.get(weight.dtype)
        if has_tensor_scales:
            if not packed:
                raise self._refusal(weight, "with tensor scales, which only packed weights have")
            known = _SCALES_OF_NVFP4
        if known is None:
            if scales is not None:
                raise self._refusal(scales, f"but {weight}, which needs no scales")
            return None
        if scales is None:
            raise self._refusal(weight, "without a `weight_scale_inv`")
        # Find out how many rows and columns of the weight share a scale.
        n, k = weight.of_expert(fused, packed)
        shared = granularity(scales.of_expert(fused), n, k)
        of_groups = NVFP4_GROUPS if has_tensor_scales else MXFP4_GROUPS
        in_groups = shared == of_groups.block
        needs_groups = packed or scales.dtype == "U8" or shared == NVFP4_GROUPS.block
        is_known_layout = shared is not None and (in_groups or not needs_groups)
        if scales.dtype not in known or not is_known_layout:
            if packed:
                wanted_format = of_groups
                each = f"group of {of_groups.block[1]}"
            else:
                wanted_format = FP8_BLOCKS
                each = "block of 128 × 128, or one for each row, group of 32 or weight"
            _, *wanted = wanted_format.scales_shape(1, n, k)
            why = (
                f"but scales must be {' or '.join(known)} {wanted} for {[n, k]}, one for each "
                f"{each}"
            )
            raise self._refusal(scales, why)
        if packed:
            return of_groups
        return FP8_BLOCKS if shared == FP8_BLOCKS.block else None

    def _refusal(self, header: _Header, why: str) -> ValueError:
        """The error for a tensor of another format. Its message names the file and the header."""
        return ValueError(f"{self._path(header.name)}: {header}, {why}")

    def _under(self, *prefixes: str) -> set[str]:
        """The names of tensors that begin with one of `prefixes`."""
        return {name for name in self if name.startswith(prefixes)}

    def _path(self, name: str) -> Path:
        """The path of the file that has a tensor."""
        return self.path / self._file_of[name]

    def _slice(self, name: str) -> Any:
        """Open a tensor without reading its values. Indexing the result reads some rows."""
        return self._open(self._file_of[name]).get_slice(name)

    def _open(self, file: str) -> Any:
        """Open a file, or return it if it is open. It stays open as long as this object lives.

        Raises ValueError if the file cannot be read, and ImportError without safetensors.
        """
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


def _weight_map(index: Path) -> dict[str, str]:
    """Read the file of each tensor out of an index. Raises ValueError if it is not an index."""
    try:
        described = json.loads(index.read_text(encoding="utf-8"))
        return {str(name): str(file) for name, file in described["weight_map"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index}: must have a `weight_map` of names to files, got {error!r}"
        ) from None


def _name_of(expert: int, pattern: str) -> str:
    """The name of an expert's tensor, by a name with * in place of the expert's number.

    A name without * is that of one tensor with all experts, and is returned as it is.
    """
    return pattern.replace("*", str(expert))


def _names_of_all(patterns: Iterable[str], E: int) -> set[str]:
    """The names of the tensors of all E experts, by names with * in place of the number."""
    return {_name_of(expert, pattern) for pattern in patterns for expert in range(E)}


def _some(names: Set[str]) -> str:
    """List names for a message: the first of them in order, and "…" if there are more."""
    named = ", ".join(sorted(names)[:_MOST_NAMES])
    return f"{named}…" if len(names) > _MOST_NAMES else named


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors along rows. Their bits are joined as integers, since torch cannot join MXFP4."""
    return torch.cat([bits_of(part) for part in parts]).view(parts[0].dtype)


def _padded(weight: Tensor, by: int, dim: int) -> Tensor:
    """Append `by` rows (`dim` 0) or columns (`dim` 1) of zeros to an fp8 matrix [n, k]."""
    if not by:
        return weight
    sides = (0, 0, 0, by) if dim == 0 else (0, by)
    # torch cannot pad fp8, but it can pad bytes. A zero byte is a zero in fp8.
    padded: Tensor = pad(weight.view(torch.uint8), sides)
    return padded.view(weight.dtype)


def _stack(
    read: Callable[[int], dict[str, Tensor]], logical: Sequence[int], device: torch.device | str
) -> dict[str, Tensor]:
    """Read experts one by one, by `read`, into tensors [e, …] on `device`.

    Each tensor is allocated once and filled row by row, so that memory is needed for one expert
    more. If `logical` is empty, expert 0 is read for the shapes, and the tensors are [0, …].
    """
    first = read(logical[0] if logical else 0)
    out = {}
    for name, tensor in first.items():
        shape = (len(logical), *tensor.shape)
        out[name] = torch.empty(shape, dtype=tensor.dtype, device=device)
    for row, x in enumerate(logical):
        # The first expert has been read already.
        tensors = first if x == logical[0] else read(x)
        for name, tensor in tensors.items():
            out[name][row].copy_(tensor)
    return out
