"""Reads LoRA adapters of experts from a folder of PEFT.

PEFT has two forms. An adapter of a parameter (`target_parameters`, `ParamWrapper` of PEFT 0.21) has
the factors of all E experts in one tensor. An adapter of modules has factors for each expert. A
weight is [n, k], and r is the rank of the adapter:

    of a parameter    experts.lora_A.weight [E·r, k]    r rows for each expert
                      experts.lora_B.weight [n, r·E]    column j·E + i is the j-th of expert i
    of a module       experts.7.gate_proj.lora_A.weight [r, D]
                      experts.7.gate_proj.lora_B.weight [F, r]

If two parameters of one module have adapters, PEFT nests one wrapper in the other. The names of
their tensors then do not say to which parameter they belong; only the shapes do.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError
from torch import Tensor

from epmoe.local.adapters import LoRA
from epmoe.native.arguments import FLOATS, check_tensor, describe

# The name of a tensor is that of the module, then `_LORA`, then one of the other two.
_LORA = ".lora_"
_A = "A.weight"
_B = "B.weight"
_OTHER_FUNCTIONS = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "layer_replication",
)
"""Keys of a config that are refused. With them an adapter does not add b · a to a weight, or it
belongs to a changed base model.
"""
# If `init_lora_weights` begins like this, PEFT has changed the weights of the base model.
_CHANGE_THE_BASE = (
    "pissa",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
)
# What the parameter with all experts' weights may be called: for gate and up, and for down.
_PARAMETERS = ("gate_up_proj", "w_gate_up"), ("down_proj", "w_down")
# The projection that a module of one expert is, by the name of the module.
_PROJECTIONS = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
# A message has at most this many names.
_MOST_NAMED = 6

_Rank = Annotated[int, Field(strict=True, ge=1)]
_Alpha = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Number = TypeVar("_Number", int, float)
# The factors a and b of one weight, or of one weight of all experts.
_Factors = tuple[Tensor, Tensor]
# E, D, 2F and F.
_Sizes = tuple[int, int, int, int]


class _Config(BaseModel):
    """The keys of PEFT's `adapter_config.json` that decide what an adapter computes."""

    model_config = ConfigDict(extra="allow")
    peft_type: Literal["LORA"]
    r: _Rank
    lora_alpha: _Alpha
    use_rslora: StrictBool = False
    rank_pattern: dict[re.Pattern[str], _Rank] | None = None
    alpha_pattern: dict[re.Pattern[str], _Alpha] | None = None
    init_lora_weights: object = True
    peft_version: str | None = None

    @classmethod
    def read(cls, file: Path) -> _Config:
        """Read the config in a file. Raises ValueError unless it describes a plain LoRA adapter."""
        try:
            config = cls.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise ValueError(f"{file}: cannot be read: {error}") from None
        # Keys that are no fields of this class are in `model_extra`.
        other_keys = config.model_extra or {}
        unsupported = [name for name in _OTHER_FUNCTIONS if other_keys.get(name)]
        if str(config.init_lora_weights).lower().startswith(_CHANGE_THE_BASE):
            unsupported.append("init_lora_weights")
        if unsupported:
            raise ValueError(f"{file}: `{unsupported[0]}` is set, but adapters are plain LoRA")
        return config

    def is_sure_of_square(self, interleaved: bool) -> bool:
        """Whether a square product b · a surely has the layout [n, k] of an expert's weight.

        Its shape cannot tell the product from its transpose, so the version of PEFT decides. Since
        0.20 PEFT always saves this layout. Before 0.19 it does so for gpt-oss, whose parameters are
        stored as [k, n]; `interleaved` stands for gpt-oss.
        """
        numbers = re.findall(r"\d+", self.peft_version or "")
        version = [int(number) for number in numbers[:2]]
        if interleaved and version < [0, 19]:
            return True
        return version >= [0, 20]

    def of(self, *names: str) -> tuple[int, float]:
        """The rank and the scaling of the adapter of a module or parameter.

        `names` are the names that the module or parameter may have in the config's patterns.
        """
        r = _matched(self.rank_pattern, names, self.r)
        alpha = _matched(self.alpha_pattern, names, self.lora_alpha)
        scaling = alpha / math.sqrt(r) if self.use_rslora else alpha / r
        return r, scaling


class _Place(NamedTuple):
    """Where a projection of one expert lies in the weights of `GroupedExperts`."""

    part: int
    """the weight: 0 for `gate_up`, 1 for `down`"""
    rows: slice
    """the rows of the weight that are those of the projection"""
    shape: tuple[int, int]
    """n and k of the projection"""


class StoredAdapter(NamedTuple):
    """An adapter of all E experts of a MoE block, on the CPU. The factor b includes the scaling."""

    gate_up: _Factors | None
    """a [E, r, D] and b [E, 2F, r], or None if the adapter does not change these weights"""
    down: _Factors | None
    """a [E, r, F] and b [E, D, r], or None if the adapter does not change these weights"""

    @classmethod
    def from_lora(cls, adapter: LoRA | None, sizes: _Sizes) -> StoredAdapter:
        """Check the factors that a caller has given, and copy them to the CPU.

        None stands for an adapter that changes no weight. Raises TypeError or ValueError if a
        factor is no float tensor of the shape that `sizes` says.
        """
        E, D, two_F, F = sizes
        parts = list[_Factors | None]()
        for name, (n, k) in (("gate_up", (two_F, D)), ("down", (D, F))):
            part: _Factors | None = getattr(adapter, name, None)
            if part is not None:
                a, b = part
                check_tensor(f"{name} a", a, FLOATS, (E, "r", k))
                check_tensor(f"{name} b", b, FLOATS, (E, n, a.shape[1]))
                part = (a.detach().cpu(), b.detach().cpu())
            parts.append(part)
        return cls(*parts)

    @property
    def digest(self) -> str:
        """A digest of all shapes, dtypes and values. Ranks compare it to see that they agree."""
        digest = hashlib.blake2b()
        for part in self:
            described = None
            if part is not None:
                described = [describe(factor) for factor in part]
            digest.update(str(described).encode())
            for factor in part or ():
                digest.update(factor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def is_none(self) -> bool:
        """Whether the adapter changes no weight."""
        return self.gate_up is None and self.down is None

    def of(self, experts: Sequence[int]) -> LoRA:
        """Take the factors of these logical experts, in this order."""
        held = torch.tensor(experts, dtype=torch.int64)
        parts: list[_Factors | None] = []
        for part in self:
            if part is not None:
                a, b = part
                part = (a[held], b[held])
            parts.append(part)
        return LoRA(*parts)


def load_adapter(
    folder: str | os.PathLike[str],
    block: str,
    experts: Sequence[int],
    sizes: tuple[int, int, int, int],
    *,
    interleaved: bool = False,
    experts_only: bool = False,
) -> LoRA:
    """Read the LoRA adapter of some experts of one MoE block.

    Args:
        folder: a folder of PEFT, with `adapter_config.json` and `adapter_model.safetensors`.
        block: the name of the block in the model, such as "model.layers.3.mlp", as
            `MoELayer.from_safetensors` takes it. The adapter may be one of the parameters of
            `BLOCK.experts`, or of modules of `BLOCK.experts.0` and so on. In the second form
            `gate_proj` and `up_proj` (or `w1` and `w3`) have factors each, and the result has the
            sum of their ranks.
        experts: the logical experts to read, in the order of the result, such as those of
            `ExpertParallel.logical_experts`.
        sizes: E, D, 2F and F. 2F is the number of gate and up rows of an expert together.
        interleaved: whether gate and up rows alternate in the experts, as in `GroupedExperts`.
        experts_only: if True, parts of the adapter outside of MoE blocks, such as those of
            attention, and parts of shared experts are ignored, since the host framework serves
            them. If False, they are an error.

    Returns:
        The adapter on the CPU. The factor b includes the scaling. Weights that the adapter does not
        change have None.

    Raises:
        ValueError: the folder is not one of PEFT or is damaged; or the adapter is not a plain LoRA
            adapter; or it has parts that are not served, such as those of a router; or its factors
            of these experts do not fit `sizes` or the config; or it has no factors of them.
        ImportError: safetensors is not installed.
    """
    return read_adapter(folder, block, sizes, interleaved, experts_only).of(experts)


def read_adapter(
    folder: str | os.PathLike[str],
    block: str,
    sizes: tuple[int, int, int, int],
    interleaved: bool = False,
    experts_only: bool = False,
) -> StoredAdapter:
    """Read an adapter of all E experts. `load_adapter` describes the arguments and errors."""
    from safetensors import SafetensorError, safe_open

    config = _Config.read(Path(folder) / "adapter_config.json")
    file = Path(folder) / "adapter_model.safetensors"
    try:
        with safe_open(file, "pt") as opened:
            names = _names_of_experts(opened.keys(), block, experts_only)
            tensors = {name: opened.get_tensor(name) for name in names}
        return _assemble(tensors, block, config, sizes, interleaved)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _names_of_experts(names: Sequence[str], block: str, experts_only: bool) -> list[str]:
    """Pick the names of the tensors of a block's experts out of all names of an adapter.

    Raises ValueError if there are none, or if the adapter has parts that are not served. With
    `experts_only`, only parts of this block that are not its shared experts count as such.
    """
    expert_names = []
    unserved = []
    for name in sorted(names):
        _, separator, below = f".{name}".partition(f".{block}.")
        is_in_block = bool(separator)
        if is_in_block and below.startswith("experts."):
            expert_names.append(name)
        elif ".experts." in f".{name}":
            # These are the experts of another block.
            continue
        elif not experts_only or (is_in_block and not below.startswith("shared")):
            unserved.append(name)
    if unserved:
        hint = ""
        if not experts_only:
            hint = "; `experts_only=True` leaves what is no router's to the host"
        raise ValueError(f"the adapter has parts that are not served: {_some(unserved)}{hint}")
    if not expert_names:
        some = [name for name in names if "experts" in name]
        raise ValueError(
            f"the adapter has nothing for `{block}.experts`; of experts it has: {_some(some)}"
        )
    return expert_names


def _assemble(
    tensors: Mapping[str, Tensor], block: str, config: _Config, sizes: _Sizes, interleaved: bool
) -> StoredAdapter:
    """Make the adapter from the tensors of its experts. Raises ValueError if they do not fit.

    `tensors` has the tensors of the experts of `block` by their names in the folder.
    """
    # Group the tensors by their modules. The end of a name is `_A` or `_B`.
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, end = name.partition(_LORA)
        modules.setdefault(module, {})[end] = tensor
    # A wrapper of a parameter adds nothing to the name of the experts' module, or it adds
    # ".base_layer" where it is nested. All other modules belong to single experts.
    names = {module: f".{module}".partition(f".{block}.experts")[2] for module in modules}
    if all(re.fullmatch(r"(\.base_layer)*", name) for name in names.values()):
        return _adapter_of_parameters(modules, block, config, sizes, interleaved)
    return _adapter_of_modules(modules, names, config, sizes, interleaved)


def _adapter_of_parameters(
    modules: Mapping[str, Mapping[str, Tensor]],
    block: str,
    config: _Config,
    sizes: _Sizes,
    interleaved: bool,
) -> StoredAdapter:
    """Make an adapter from tensors that have the factors of all experts.

    `modules` has the tensors of each wrapper by the ends of their names.
    """
    E, D, two_F, F = sizes
    shapes = ((two_F, D), (D, F))
    parts: list[_Factors | None] = [None, None]
    for module, ends in modules.items():
        # Only the shapes tell whether the factors are those of gate and up or those of down. That
        # decides the name of the parameter, and the name decides rank and scaling.
        got = _shape_of_weight(ends)
        part = shapes.index(got) if got in shapes else 0
        parameter = module.replace(".base_layer", "")
        names = [f"{parameter}.{name}" for name in _PARAMETERS[part]]
        r, scaling = config.of(*names)
        a, b = _pair(module, ends, shapes, E, r)
        n = len(b)
        k = a.shape[1]
        if n == k and not config.is_sure_of_square(interleaved):
            raise ValueError(
                f"an adapter of square weights [{n}, {k}] must be saved by PEFT 0.20 or newer, got "
                f"`peft_version` {config.peft_version}, which may transpose b · a: train it anew"
            )
        if parts[part] is not None:
            raise ValueError(f"`{block}.experts` has two adapters of the shape {shapes[part]}")
        # In a, all rows of an expert follow one another. In b, the columns of experts alternate.
        a_all = a.view(E, r, -1)
        b_all = b.view(-1, r, E).permute(2, 0, 1)
        parts[part] = (a_all, b_all.float() * scaling)
    return StoredAdapter(*parts)


def _shape_of_weight(ends: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The shape (n, k) of b · a. If a factor is missing, its dimension is left out."""
    shape = []
    for end, dim in ((_B, 0), (_A, -1)):
        if end in ends and ends[end].dim():
            shape.append(ends[end].shape[dim])
    return tuple(shape)


def _adapter_of_modules(
    modules: Mapping[str, Mapping[str, Tensor]],
    names: Mapping[str, str],
    config: _Config,
    sizes: _Sizes,
    interleaved: bool,
) -> StoredAdapter:
    """Make an adapter from tensors that each have a factor of one projection of one expert.

    `names` has the name of each module below the experts, such as ".7.gate_proj". The factors of
    gate and up become one pair of factors of `w_gate_up`: they lie side by side, and where b has
    columns of gate, its rows of up are zeros.
    """
    E, D, two_F, F = sizes
    # Find the rows of gate and of up in `w_gate_up`.
    gate = slice(0, F)
    up = slice(F, None)
    if interleaved:
        gate = slice(0, None, 2)
        up = slice(1, None, 2)
    places = {
        "gate": _Place(part=0, rows=gate, shape=(F, D)),
        "up": _Place(part=0, rows=up, shape=(F, D)),
        "down": _Place(part=1, rows=slice(None), shape=(D, F)),
    }
    # Collect the factors by weight (`_Place.part`), expert and projection.
    found: tuple[dict[int, dict[str, _Factors]], ...] = ({}, {})
    for module, ends in modules.items():
        match = re.fullmatch(rf"\.(\d+)\.({'|'.join(_PROJECTIONS)})", names[module])
        if match is None or int(match[1]) >= E:
            raise ValueError(f"`{module}` is none of {E} experts' {', '.join(_PROJECTIONS)}")
        x = int(match[1])
        projection = _PROJECTIONS[match[2]]
        place = places[projection]
        r, scale = config.of(module)
        a, b = _pair(module, ends, [place.shape], 1, r)
        of_expert = found[place.part].setdefault(x, {})
        if projection in of_expert:
            raise ValueError(f"expert {x} has two adapters of {projection}")
        of_expert[projection] = (a, b.float() * scale)
    # Put the factors of an expert side by side. All experts have the same rank: zeros fill up those
    # that have fewer columns.
    parts: list[_Factors | None] = []
    for experts, (n, k) in zip(found, ((two_F, D), (D, F)), strict=True):
        ranks = [sum(len(a) for a, _ in of_expert.values()) for of_expert in experts.values()]
        r = max(ranks, default=0)
        a_all = torch.zeros(E, r, k)
        b_all = torch.zeros(E, n, r)
        for x, of_expert in experts.items():
            start = 0
            for projection, (a, b) in of_expert.items():
                columns = slice(start, start + len(a))
                start += len(a)
                a_all[x, columns] = a
                b_all[x, places[projection].rows, columns] = b
        parts.append((a_all, b_all) if experts else None)
    return StoredAdapter(*parts)


def _pair(
    module: str, ends: Mapping[str, Tensor], shapes: Sequence[tuple[int, int]], experts: int, r: int
) -> _Factors:
    """Take the two factors of a module: lora_A [experts · r, k] and lora_B [n, r · experts].

    `ends` has the module's tensors by the ends of their names, `shapes` are the (n, k) that are
    possible, and `experts` is how many experts the tensors have. Raises ValueError if the module
    has other tensors.
    """
    a = ends.get(_A)
    b = ends.get(_B)
    if a is not None and b is not None and len(ends) == 2:
        rows = experts * r
        fits = any(a.shape == (rows, k) and b.shape == (n, rows) for n, k in shapes)
        if fits and a.dtype in FLOATS and b.dtype in FLOATS:
            return a, b
    # The message says what the tensors must be and what they are.
    many = f"{experts}·" if experts > 1 else ""
    wanted = " or ".join(f"{n}, {k}" for n, k in shapes)
    got = ", ".join(f"lora_{end} {describe(ends[end])}" for end in sorted(ends))
    raise ValueError(
        f"`{module}` must have lora_{_A} [{many}r, k] and lora_{_B} [n, {many}r], for r = {r} and "
        f"n, k = {wanted}, got {got}"
    )


def _matched(
    patterns: Mapping[re.Pattern[str], _Number] | None, names: Sequence[str], usual: _Number
) -> _Number:
    """Find the value that PEFT would use for a module, such as its rank.

    It is that of the first pattern that matches the end of one of the module's `names`, or the
    `usual` value if no pattern matches.
    """
    for pattern, value in (patterns or {}).items():
        if any(re.match(rf"(.*\.)?({pattern.pattern})$", name) for name in names):
            return value
    return usual


def _some(names: Sequence[str]) -> str:
    """List names for a message: the first of them, and how many more there are."""
    listed = ", ".join(names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    if more > 0:
        listed += f" and {more} more"
    return listed or "nothing"
