"""A checkpoint as Hugging Face has it, a folder of safetensors, of which each rank reads its own
experts.
"""

from __future__ import annotations

import json
import logging
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
    FORMATS,
    FP8_BLOCKS,
    MXFP4_GROUPS,
    bits_of,
    dequantize_weights,
    granularity,
)
from epmoe.native.arguments import FLOATS, FP8, MXFP4, dtype_name
from epmoe.native.package import sentence

_log = logging.getLogger("epmoe")

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_ROUTERS = ("gate", "gate.wg", "router", "router.layer", "router.gate")
_CHOICE_BIASES = (
    "gate.e_score_correction_bias",
    "gate.expert_bias",
    "experts.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "expert_bias",
    "router_bias",
)
# Begins the name of a tensor of one expert, whose number is *.
_EXPERT = "experts.*."
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
_SUFFIXES = (
    (".weight", ".weight_scale_inv"),
    (".weight", ".weight_scale"),
    (".weight", ".scale"),
    (".weight_packed", ".weight_scale"),
)
"""Of the names of an expert's weight and its scales: DeepSeek's, compressed-tensors',
DeepSeek-V4's, MX formats.
"""


def _format(
    gate_up: Sequence[str],
    down: str,
    weight: str,
    scales: str | None = None,
    bias: str | None = None,
) -> dict[str, list[str]]:
    """Map arguments of `GroupedExperts` to names of tensors. A * is the number of an expert."""
    suffixes = {"w_*": weight, "*_scales": scales, "*_bias": bias}
    tensors = {}
    for argument, suffix in suffixes.items():
        if suffix is not None:
            tensors[argument.replace("*", "gate_up")] = [name + suffix for name in gate_up]
            tensors[argument.replace("*", "down")] = [down + suffix]
    return tensors


_FORMATS: tuple[dict[str, list[str]], ...] = (
    *(
        _format((_EXPERT + gate, _EXPERT + up), _EXPERT + down, *suffixes, ".bias")
        for gate, up, down in _PROJECTIONS
        for suffixes in _SUFFIXES
    ),
    _format(["experts.gate_up_proj"], "experts.down_proj", "", None, "_bias"),
    _format(["experts.gate_up_proj"], "experts.down_proj", "_blocks", "_scales", "_bias"),
    _format(["input_linear"], "output_linear", ".weight"),
    _format(["experts.fc1"], "experts.fc2", ".weight"),
    _format(["gate_proj", "up_proj"], "down_proj", ".weight", ".weight_scale_inv"),
)
_OF_EXPERTS = (
    ("experts.", "input_linear.", "output_linear."),
    ("gate_proj.", "up_proj.", "down_proj."),
)
"""How names of experts begin below a block. Those of the second row are of experts where a block
has none of the first: Step 3.5's, elsewhere perhaps of a shared expert.
"""
GateBias = Literal["logits", "choice"] | None
"""What a router's `gate.bias` is added to: the logits, as in gpt-oss, or the scores for the choice,
as in DeepSeek's own files. None: a checkpoint with one is refused.
"""
# Names in a message.
_MOST_NAMES = 6
_MATRICES = ("gate_up", "down")
_WEIGHTS = ("F64", "F32", "F16", "BF16", "F8_E4M3")
# Bytes, each of which has two numbers.
_PACKED = ("U8", "I8")
_SCALES = {
    "F8_E4M3": ("F32", "F16", "BF16", "F8_E8M0", "U8"),
    "U8": ("U8", "F8_E8M0"),
    "I8": ("U8", "F8_E8M0"),
}
"""Dtypes of scales, by that of their weights. Bytes are UE8M0."""


class _Header(NamedTuple):
    """The header of a tensor in a file."""

    name: str
    dtype: str
    shape: list[int]

    def __str__(self) -> str:
        return f"`{self.name}` is {self.dtype} {self.shape}"

    def of_expert(self, fused: bool, packed: bool = False) -> list[int]:
        """The shape of one expert's tensor, in numbers. A byte of a `packed` tensor has two."""
        shape = self.shape[1:] if fused else self.shape
        if not packed or not shape:
            return shape
        # gpt-oss has its bytes in groups.
        if len(shape) == 3:
            shape = [shape[0], shape[1] * shape[2]]
        return [*shape[:-1], 2 * shape[-1]]


class _Found(NamedTuple):
    """A MoE block as the checkpoint names it."""

    block: str
    router: str
    """the name of the router below the block"""


class Stored(NamedTuple):
    """How a MoE block is stored."""

    router: dict[str, str]
    """arguments of `MoELayer`, with the names of their tensors"""
    tensors: dict[str, list[str]]
    """arguments of `GroupedExperts`, with names in which * is the number of an expert"""
    others: set[str]
    """names of other tensors below the block, such as those of shared experts"""
    num: int
    """E"""
    transposed: bool
    """whether weights are [k, n], not [n, k]"""
    native: torch.dtype | None
    """The dtype in which `GroupedExperts` take weights with these scales: fp8 or MXFP4. None: no
    scales, or others.
    """
    D: int
    """0 if a file with a header that is needed is not there"""
    F: int

    @property
    def fused(self) -> bool:
        """Whether one tensor has all experts."""
        return "*" not in self.tensors["w_down"][0]

    @property
    def dequantized(self) -> dict[str, list[str]]:
        """`tensors` as they are called in a checkpoint without scales."""
        tensors = {}
        for argument, names in self.tensors.items():
            if argument.endswith("_scales"):
                continue
            # Quantized weights have suffixes that plain ones lack.
            plain = [name.removesuffix("_packed").removesuffix("_blocks") for name in names]
            tensors[argument] = plain
        return tensors

    @property
    def dequantized_transposed(self) -> bool:
        """Whether weights are transposed in a checkpoint without scales, as those of
        gpt-oss are.
        """
        return self.transposed or self.tensors["w_down"][0].endswith("_blocks")


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors in a folder, by name. Each is read when it is asked for, and nothing is
    downloaded.

    A MoE block is named as in the model, like "model.layers.3.mlp"; the `block_sparse_moe` of
    Mixtral's checkpoints and the `moe` of Step's are found by that name, too. Its experts have
    tensors each, such as `BLOCK.experts.7.gate_proj.weight`, or one for all, such as
    `BLOCK.experts.gate_up_proj` [E, 2F, D] or transposed, with scales and biases if there are any:
    the page on checkpoints has the formats. All experts of a block have the same tensors, dtypes
    and shapes, one expert for each row of the router. Anything else below `BLOCK.experts` or the
    router is refused, since a model without it is another function.

    Args:
        path: of the folder. Its files are those that transformers reads: `model.safetensors` alone
            if it is there, otherwise those of `model.safetensors.index.json`, of which some may be
            absent, otherwise all. The headers of files say which tensors they have, and the index
            says it of absent files.

    Raises:
        ValueError: the folder has no weights, a file cannot be read, or two files have a tensor of
            one name.
        ImportError: safetensors is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._opened: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        # The file of each tensor by the index; {} without one.
        indexed: dict[str, str] = {}
        if (self.path / WHOLE).is_file():
            files = [WHOLE]
        elif (self.path / INDEX).is_file():
            indexed = _weight_map(self.path / INDEX)
            files = sorted(file for file in set(indexed.values()) if (self.path / file).is_file())
        else:
            files = sorted(file.name for file in self.path.glob("*.safetensors"))
        # Headers say what is in the files that are here.
        for file in files:
            for name in self._open(file).keys():  # noqa: SIM118
                other = self._file_of.setdefault(name, file)
                if other != file:
                    raise ValueError(
                        f"{self.path}: only one file must have `{name}`, got {other} and {file}"
                    )
        # The index says what is in the others.
        for name, file in indexed.items():
            if file not in files:
                self._file_of.setdefault(name, file)
        if not self._file_of:
            raise ValueError(f"{self.path}: has no weights (*.safetensors)")

    def __getitem__(self, name: str) -> Tensor:
        return self._open(self._file_of[name]).get_tensor(name)

    def __contains__(self, name: object) -> bool:
        # Mapping's own would read the tensor.
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def router(self, block: str, gate_bias: GateBias = "logits") -> dict[str, Tensor | None]:
        """The router of a MoE block, by its name: arguments of `MoELayer`.

        These are `router_weight` [E, D], and `bias` and `logit_bias` [E] or None. With a `bias`
        both are fp32, because models that have one compute their scores in fp32; otherwise the
        weight has the checkpoint's dtype.

        Args:
            block: its name.
            gate_bias: which bias a tensor `BLOCK.gate.bias` is, which its name does not say:
                "logits", the `logit_bias`, or "choice", the `bias`. None: such a tensor is refused.

        Returns:
            The three arguments.

        Raises:
            ValueError: there is no such block, or its router has tensors of another format, or a
                `gate.bias` that is neither.
        """
        names = self._router(self._find(block), gate_bias)
        router: dict[str, Tensor | None] = {}
        for argument in ("router_weight", "bias", "logit_bias"):
            router[argument] = self.get(names.get(argument, ""))
        # Models with a bias of the choice compute scores in fp32. Some store it as [1, E].
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
        """Some experts of a MoE block. Of other experts only headers are read, of the files that
        are there.

        fp8 with scales of blocks of 128 × 128 stays as it is, and on GPUs of compute capability 9
        so does MXFP4. All other weights with scales become bf16, and a warning of the logger
        "epmoe" names the tensors.

        Args:
            block: its name.
            logical: the experts, in the order of the result: `Placement.logical_experts` of a rank
                for instance.
            device: of the result.
            dtype: fp32, fp16 or bf16, to which weights and biases are cast or dequantized, rounded
                once; or fp8 e4m3 or float4_e2m1fn_x2 for fp8 of blocks or MXFP4 as it is, on any
                device. None: the checkpoint's, but as above.

        Returns:
            Arguments of `GroupedExperts`: `w_gate_up`, `w_down`, and scales or biases where the
            checkpoint has them. Scales are fp32, or those of MXFP4; biases of experts with scales
            are bf16. fp8 experts have zeros up to the next F that is a multiple of 128: they add
            nothing.

        Raises:
            TypeError: `dtype` is another one.
            ValueError: there is no such block, or its experts have another format: the message
                names the file, the tensors and their dtypes and shapes. Or they are not fp8 of
                blocks or MXFP4, as `dtype` wants them.
            LookupError: the checkpoint has no expert of this number.
        """
        if dtype not in (None, *FLOATS, *FORMATS):
            raise TypeError(
                f"`dtype` must be None, {', '.join(map(dtype_name, (*FLOATS, *FORMATS)))}, got "
                f"{dtype}"
            )
        # The block must have these experts.
        found = self._find(block)
        block = found.block
        E = self.shape(f"{block}.{found.router}.weight")[0]
        outside = sorted({x for x in logical if not 0 <= x < E})
        if outside:
            raise LookupError(f"{self.path}: `{block}` has the experts 0 to {E - 1}, got {outside}")
        # They must be such that they can be loaded in `dtype`.
        stored = self._stored(block, E)
        if dtype in FORMATS and dtype != stored.native:
            needed = "MXFP4" if dtype == MXFP4 else "fp8 with a scale for each block of 128 × 128"
            raise ValueError(
                f"{self.path}: the experts of `{block}` must be {needed} to be loaded in "
                f"{dtype_name(dtype)}"
            )
        if dtype is None and "down_scales" in stored.tensors:
            dtype = self._dtype_with_scales(stored, device)
        return _stack(lambda x: self._expert(stored, x, device, dtype), logical, device)

    def _dtype_with_scales(self, stored: Stored, device: torch.device | str) -> torch.dtype:
        """The dtype in which weights with scales are loaded by default. It warns if they are
        dequantized.
        """
        if stored.native is None:
            why = "experts in fp8 have scales of blocks of 128 × 128"
        elif stored.native == MXFP4 and not on_hopper(device):
            why = "GPUs of compute capability 9.0 have kernels for MXFP4"
        else:
            return stored.native
        names = _some({name for part in _MATRICES for name in stored.tensors[f"w_{part}"]})
        _log.warning("%s: experts are dequantized to bf16: %s: %s", self.path, names, why)
        return torch.bfloat16

    def stored(self, *blocks: str, gate_bias: GateBias = "logits") -> Stored:
        """How the first of these MoE blocks is stored. Raises the ValueErrors of `router` and
        `experts`.
        """
        found = self._find(*blocks)
        names = self._router(found, gate_bias)
        E = self.shape(names["router_weight"])[0]
        stored = self._stored(found.block, E)
        # All other tensors belong to shared experts, say.
        others = self._under(f"{found.block}.") - {*names.values()}
        for patterns in stored.tensors.values():
            others -= _of_all(patterns, E)
        return stored._replace(router=names, others=others)

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor. It reads only the header."""
        shape: list[int] = self._slice(name).get_shape()
        return shape

    def _router(self, found: _Found, gate_bias: GateBias) -> dict[str, str]:
        """Map arguments of `MoELayer` to names of tensors. Raises ValueError if the router has
        other tensors, too.
        """
        block, router = found
        names = {"router_weight": f"{block}.{router}.weight"}
        choice = {f"{block}.{bias}" for bias in _CHOICE_BIASES} & self._file_of.keys()
        # The name of this one does not say what it is added to.
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
        # Anything else that the router has would make it another function.
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
        """Read one expert: arguments of `GroupedExperts` without the first dimension."""
        # Fill up the last block of fp8: rows of gate and up, and columns of down, are added.
        padding = 0
        if dtype == FP8:
            padding = -stored.F % FP8_BLOCKS.block[1]
        out = {}
        for part in _MATRICES:
            is_gate_up = part == "gate_up"
            weights = self._read_all(stored, f"w_{part}", x, MXFP4, device)
            scales = self._read_all(stored, f"{part}_scales", x, MXFP4_GROUPS.scale, device)
            biases = self._read_all(stored, f"{part}_bias", x, None, device)
            if stored.transposed:
                weights = [weight.t() for weight in weights]
            if dtype == FP8:
                dim = 0 if is_gate_up else 1
                weights = [_padded(weight, padding, dim) for weight in weights]
            elif dtype in FLOATS and scales:
                pairs = zip(weights, scales, strict=True)
                weights = [dequantize_weights(weight, scale, dtype) for weight, scale in pairs]
                scales = []
            out[f"w_{part}"] = _joined(weights).to(dtype)
            if scales:
                assert dtype is not None
                out[f"{part}_scales"] = _joined(scales).to(FORMATS[dtype].scale)
            if biases:
                behind = padding if is_gate_up else 0
                biases = [pad(bias, (0, behind)) for bias in biases]
                out[f"{part}_bias"] = torch.cat(biases).to(torch.bfloat16 if scales else dtype)
        return out

    def _read_all(
        self,
        stored: Stored,
        argument: str,
        x: int,
        of_bytes: torch.dtype | None,
        device: torch.device | str,
    ) -> list[Tensor]:
        """Read the tensors of an argument for expert x; [] if the checkpoint has none."""
        names = stored.tensors.get(argument, ())
        return [self._read(name, x, of_bytes).to(device) for name in names]

    def _read(self, name: str, x: int, of_bytes: torch.dtype | None) -> Tensor:
        """Read the tensor of expert x, with a row for each row of a weight. Bytes become
        `of_bytes`.
        """
        tensor: Tensor = self[_of(x, name)] if "*" in name else self._slice(name)[x]
        # gpt-oss has its bytes in groups.
        if tensor.dim() == 3:
            tensor = tensor.flatten(1)
        if of_bytes and tensor.dtype in (torch.uint8, torch.int8):
            return tensor.view(of_bytes)
        return tensor

    def _find(self, *blocks: str) -> _Found:
        """Find the first of these blocks that the checkpoint has. Raises ValueError."""
        for block in blocks:
            parent = block.rpartition(".")[0]
            for name in (block, f"{parent}.block_sparse_moe", f"{parent}.moe"):
                for router in _ROUTERS:
                    if f"{name}.{router}.weight" in self:
                        return _Found(name, router)
        raise ValueError(
            f"{self.path}: has no MoE block `{blocks[0]}`: it has no tensor "
            f"`{blocks[0]}.gate.weight`"
        )

    def _tensors(self, block: str, E: int) -> dict[str, list[str]]:
        """Find the one of `_FORMATS` that the experts have. Returns it with full names, and without
        arguments that the experts lack.

        Raises ValueError unless each of E experts has its tensors, and the experts have no others.
        """
        held = self._names_of_experts(block)
        # Names with * in place of the number of an expert.
        patterns = set()
        for name in held:
            patterns.add(re.sub(r"^experts\.\d+\.", _EXPERT, name.removeprefix(f"{block}.")))
        # Take the format that leaves fewest of them unread.
        present = []
        for known in _FORMATS:
            here = {argument: names for argument, names in known.items() if patterns & {*names}}
            if {"w_gate_up", "w_down"} <= here.keys():
                present.append(here)
        if not present:
            where = self._path(min(held)) if held else self.path
            raise ValueError(
                f"{where}: the experts of `{block}` must be `gate_proj`, `up_proj` and "
                "`down_proj`, or `w1`, `w3` and `w2`, of each expert, or `gate_up_proj` and "
                f"`down_proj` of all, got {_some(self._under(f'{block}.'))}"
            )
        found = min(present, key=lambda here: len(patterns.difference(*here.values())))
        # Each expert must have all of its tensors, and there must be no others.
        names = set[str]().union(*found.values())
        wanted = _of_all((f"{block}.{pattern}" for pattern in names), E)
        surplus = held - wanted
        if wanted != held:
            odd = f"got also {_some(surplus)}" if surplus else f"lack {_some(wanted - held)}"
            raise ValueError(
                f"{self._path(min(surplus or held))}: the experts of `{block}`, 0 to {E - 1} "
                f"as its router has {E} rows, have {_some(names)}, but {odd}"
            )
        full_names = {}
        for argument, argument_patterns in found.items():
            full_names[argument] = [f"{block}.{pattern}" for pattern in argument_patterns]
        return full_names

    def _names_of_experts(self, block: str) -> set[str]:
        """Names of tensors of routed experts, by the first row of `_OF_EXPERTS` that has any."""
        biases = {f"{block}.{bias}" for bias in _CHOICE_BIASES}
        for places in _OF_EXPERTS:
            prefixes = [f"{block}.{place}" for place in places]
            found = self._under(*prefixes) - biases
            if found:
                return found
        return set()

    def _stored(self, block: str, E: int) -> Stored:
        """How the experts are stored. Only headers are read, and not those of files that other
        ranks have. Raises ValueError unless all experts have one format, and it is a known one.
        """
        tensors = self._tensors(block, E)
        # The header of each argument, which all experts must have.
        headers: dict[str, _Header] = {}
        for argument, names in tensors.items():
            for name in dict.fromkeys(_of(x, name) for name in names for x in range(E)):
                if self._file_of[name] not in self._opened:
                    continue
                part = self._slice(name)
                header = _Header(name, part.get_dtype(), part.get_shape())
                first = headers.setdefault(argument, header)
                if header[1:] != first[1:]:
                    raise self._refusal(header, f"but {first}: all experts must have one format")
        # If a file is not there, reading it will raise.
        if headers.keys() != tensors.keys():
            return Stored({}, tensors, set(), E, transposed=False, native=None, D=0, F=0)
        # Weights must have one dtype, and a fused tensor one row for each row of the router.
        gate_up = headers["w_gate_up"]
        down = headers["w_down"]
        packed = down.dtype in _PACKED and "down_scales" in headers
        if gate_up.dtype != down.dtype or down.dtype not in _WEIGHTS and not packed:
            raise self._refusal(
                gate_up, f"and {down}: both must have one dtype of {', '.join(_WEIGHTS)}"
            )
        fused = "*" not in tensors["w_down"][0]
        for header in headers.values():
            if fused and header.shape[:1] != [E]:
                raise self._refusal(header, f"but must have {E} rows, as the router has")
        # The shapes of an expert must fit. A header may have any number of dimensions.
        up = gate_up.of_expert(fused, packed)
        *_, n, k = (0, 0, *down.of_expert(fused, packed))
        may_be_transposed = (
            fused and len(tensors["w_gate_up"]) == 1 and "down_scales" not in headers
        )
        transposed = may_be_transposed and up == [k, 2 * n]
        D = k if transposed else n
        F = n if transposed else k
        if not transposed and up != [2 * F // len(tensors["w_gate_up"]), D]:
            raise self._refusal(gate_up, f"and {down}, which do not fit each other")
        # Both matrices are taken as they are, or both are dequantized.
        natives = set()
        for part in _MATRICES:
            scales = headers.get(f"{part}_scales")
            natives.add(self._native(headers[f"w_{part}"], scales, fused, packed))
        native = natives.pop() if len(natives) == 1 else None
        return Stored({}, tensors, set(), E, transposed, native, D, F)

    def _native(
        self, weight: _Header, scales: _Header | None, fused: bool, packed: bool
    ) -> torch.dtype | None:
        """`Stored.native` of a weight. Raises ValueError unless it has the scales that it needs."""
        known = _SCALES.get(weight.dtype)
        if known is None:
            if scales is not None:
                raise self._refusal(scales, f"but {weight}, which needs no scales")
            return None
        if scales is None:
            raise self._refusal(weight, "without a `weight_scale_inv`")
        # How many numbers share a scale.
        n, k = weight.of_expert(fused, packed)
        shared = granularity(scales.of_expert(fused), n, k)
        in_groups = shared == MXFP4_GROUPS.block
        needs_groups = packed or scales.dtype == "U8"
        if scales.dtype not in known or shared is None or needs_groups and not in_groups:
            if packed:
                wanted_format = MXFP4_GROUPS
                each = "group of 32"
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
            return MXFP4
        return FP8 if shared == FP8_BLOCKS.block else None

    def _refusal(self, header: _Header, why: str) -> ValueError:
        return ValueError(f"{self._path(header.name)}: {header}, {why}")

    def _under(self, *prefixes: str) -> set[str]:
        """The names that begin with one of these."""
        return {name for name in self if name.startswith(prefixes)}

    def _path(self, name: str) -> Path:
        return self.path / self._file_of[name]

    def _slice(self, name: str) -> Any:
        """A tensor of which only the header is read, and later the rows that are asked for."""
        return self._open(self._file_of[name]).get_slice(name)

    def _open(self, file: str) -> Any:
        """Open a file, which stays open. Raises ValueError if it cannot be read."""
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
    try:
        described = json.loads(index.read_text(encoding="utf-8"))
        return {str(name): str(file) for name, file in described["weight_map"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index}: must have a `weight_map` of names to files, got {error!r}"
        ) from None


def _of(expert: int, pattern: str) -> str:
    """The name of an expert's tensor. A name without * is that of all experts."""
    return pattern.replace("*", str(expert))


def _of_all(patterns: Iterable[str], E: int) -> set[str]:
    return {_of(x, pattern) for pattern in patterns for x in range(E)}


def _some(names: Set[str]) -> str:
    """Names in a message."""
    named = ", ".join(sorted(names)[:_MOST_NAMES])
    return f"{named}…" if len(names) > _MOST_NAMES else named


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors along rows by their bits, since torch joins no MXFP4."""
    return torch.cat([bits_of(part) for part in parts]).view(parts[0].dtype)


def _padded(weight: Tensor, by: int, dim: int) -> Tensor:
    """Add `by` zeros behind the rows or columns of fp8 [n, k]."""
    if not by:
        return weight
    sides = (0, 0, 0, by) if dim == 0 else (0, by)
    # torch pads no fp8, but bytes: a zero is the same.
    padded: Tensor = pad(weight.view(torch.uint8), sides)
    return padded.view(weight.dtype)


def _stack(
    read: Callable[[int], dict[str, Tensor]], logical: Sequence[int], device: torch.device | str
) -> dict[str, Tensor]:
    """Read experts one by one into tensors [e, …] on `device`. If there are none, expert 0 gives
    the shapes.
    """
    first = read(logical[0] if logical else 0)
    out = {}
    for name, tensor in first.items():
        shape = (len(logical), *tensor.shape)
        out[name] = torch.empty(shape, dtype=tensor.dtype, device=device)
    for row, x in enumerate(logical):
        # The first expert is read already.
        tensors = first if x == logical[0] else read(x)
        for name, tensor in tensors.items():
            out[name][row].copy_(tensor)
    return out
