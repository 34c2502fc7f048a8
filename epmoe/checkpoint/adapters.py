"""LoRA adapters of experts out of a folder of PEFT: its `target_parameters` (`ParamWrapper` of PEFT
0.21), or modules of single experts.

    of a parameter    experts.lora_A.weight [E·r, k]    r rows for each expert
                      experts.lora_B.weight [n, r·E]    column j·E + i is the j-th of expert i
    of a module       experts.7.gate_proj.lora_A.weight [r, D]
                      experts.7.gate_proj.lora_B.weight [F, r]

The wrappers of two weights of one module are nested, and only the shapes tell which is whose.
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
"""Keys of a config by which an adapter is another function than b · a, or its base model another
one.
"""
# Beginnings of `init_lora_weights` by which the base model is another one.
_CHANGE_THE_BASE = (
    "pissa",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
)
# Names of the weights of all experts, by GEMM.
_PARAMETERS = ("gate_up_proj", "w_gate_up"), ("down_proj", "w_down")
_PROJECTIONS = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
# Names in a message.
_MOST_NAMED = 6

_Rank = Annotated[int, Field(strict=True, ge=1)]
_Alpha = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Number = TypeVar("_Number", int, float)
_Factors = tuple[Tensor, Tensor]
_Sizes = tuple[int, int, int, int]


class _Config(BaseModel):
    """The keys of PEFT's `adapter_config.json` that say what an adapter computes."""

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
        """Read the config in a file. Raises ValueError unless it is that of a plain LoRA."""
        try:
            config = cls.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise ValueError(f"{file}: cannot be read: {error}") from None
        odd = [name for name in _OTHER_FUNCTIONS if (config.model_extra or {}).get(name)]
        if str(config.init_lora_weights).lower().startswith(_CHANGE_THE_BASE):
            odd.append("init_lora_weights")
        if odd:
            raise ValueError(f"{file}: `{odd[0]}` is set, but adapters are plain LoRA")
        return config

    def is_sure_of_square(self, interleaved: bool) -> bool:
        """Whether b · a, if it is square, is surely a weight [n, k] of experts and not its
        transpose. PEFT is sure since 0.20, and before 0.19 for gpt-oss, whose parameters are
        [k, n].
        """
        numbers = re.findall(r"\d+", self.peft_version or "")
        version = [int(number) for number in numbers[:2]]
        if interleaved and version < [0, 19]:
            return True
        return version >= [0, 20]

    def of(self, *names: str) -> tuple[int, float]:
        """The rank and the scaling of a module or parameter, which has one of these names."""
        r = _matched(self.rank_pattern, names, self.r)
        alpha = _matched(self.alpha_pattern, names, self.lora_alpha)
        scaling = alpha / math.sqrt(r) if self.use_rslora else alpha / r
        return r, scaling


class _Place(NamedTuple):
    """Where the factors of a projection of one expert go."""

    part: int
    """0 for `gate_up`, 1 for `down`"""
    rows: slice
    """its rows of the weight"""
    shape: tuple[int, int]
    """n and k of the projection"""


class StoredAdapter(NamedTuple):
    """An adapter of all E experts of a MoE block, on the CPU. b includes its scaling."""

    gate_up: _Factors | None
    """a [E, r, D] and b [E, 2F, r]; None: the adapter leaves these weights alone"""
    down: _Factors | None
    """a [E, r, F] and b [E, D, r]"""

    @classmethod
    def from_lora(cls, adapter: LoRA | None, sizes: _Sizes) -> StoredAdapter:
        """Check factors of a caller; None adds nothing. Raises TypeError or ValueError."""
        E, D, wide, F = sizes
        parts = list[_Factors | None]()
        for name, (n, k) in (("gate_up", (wide, D)), ("down", (D, F))):
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
        """A digest of shapes, dtypes and values, equal for equal adapters."""
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
        """Whether it adds nothing."""
        return self.gate_up is None and self.down is None

    def of(self, experts: Sequence[int]) -> LoRA:
        """The adapter of these logical experts, in this order."""
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
    """Read an adapter of one MoE block.

    Args:
        folder: with PEFT's `adapter_config.json` and `adapter_model.safetensors`.
        block: the name of the block in the model, such as "model.layers.3.mlp", as
            `MoELayer.from_safetensors` takes it. Its experts are `BLOCK.experts`, or
            `BLOCK.experts.0` and so on. Of single experts, the ranks of `gate_proj` and `up_proj`
            (or `w1` and `w3`) add up.
        experts: the logical experts to read, in the order wanted, such as
            `ExpertParallel.logical_experts` says.
        sizes: E, D, rows of gate and up of an expert (2F), and F.
        interleaved: that of the experts, see `GroupedExperts`.
        experts_only: leaves parts of the adapter outside of MoE blocks, such as those of attention,
            and parts of shared experts to the host. Otherwise they are an error.

    Returns:
        The adapter, on the CPU, whose b have its scaling. What it leaves alone is None.

    Raises:
        ValueError: the folder is none of PEFT's, or broken; the adapter is no plain LoRA; it has
            parts that nobody serves, such as the router's; what it has for these experts does not
            fit `sizes` and its config, or it has nothing for them.
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
    """`load_adapter` of all E experts, with its arguments and errors."""
    from safetensors import SafetensorError, safe_open

    config = _Config.read(Path(folder) / "adapter_config.json")
    file = Path(folder) / "adapter_model.safetensors"
    try:
        with safe_open(file, "pt") as opened:
            names = _of_experts(opened.keys(), block, experts_only)
            tensors = {name: opened.get_tensor(name) for name in names}
        return _assembled(tensors, block, config, sizes, interleaved)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _of_experts(names: Sequence[str], block: str, experts_only: bool) -> list[str]:
    """Pick the names of tensors of a block's experts. Raises ValueError if there are none, and for
    parts of the adapter that nobody serves.
    """
    ours = []
    unserved = []
    for name in sorted(names):
        _, inside, below = f".{name}".partition(f".{block}.")
        if inside and below.startswith("experts."):
            ours.append(name)
        elif ".experts." in f".{name}":
            # Another block has them.
            continue
        elif not experts_only or inside and not below.startswith("shared"):
            unserved.append(name)
    if unserved:
        hint = ""
        if not experts_only:
            hint = "; `experts_only=True` leaves what is no router's to the host"
        raise ValueError(f"the adapter has parts that are not served: {_some(unserved)}{hint}")
    if not ours:
        some = [name for name in names if "experts" in name]
        raise ValueError(
            f"the adapter has nothing for `{block}.experts`; of experts it has: {_some(some)}"
        )
    return ours


def _assembled(
    tensors: Mapping[str, Tensor], block: str, config: _Config, sizes: _Sizes, interleaved: bool
) -> StoredAdapter:
    """Make the adapter from the tensors of its experts. Raises ValueError if they do not fit."""
    # The tensors of each module, by the end of their names.
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, end = name.partition(_LORA)
        modules.setdefault(module, {})[end] = tensor
    # Modules with all experts are nested wrappers, all others are of single experts.
    names = {module: f".{module}".partition(f".{block}.experts")[2] for module in modules}
    if all(re.fullmatch(r"(\.base_layer)*", name) for name in names.values()):
        return _of_all(modules, block, config, sizes, interleaved)
    return _of_single(modules, names, config, sizes, interleaved)


def _of_all(
    modules: Mapping[str, Mapping[str, Tensor]],
    block: str,
    config: _Config,
    sizes: _Sizes,
    interleaved: bool,
) -> StoredAdapter:
    """Make an adapter from modules that have all experts each."""
    E, D, wide, F = sizes
    shapes = ((wide, D), (D, F))
    parts: list[_Factors | None] = [None, None]
    for module, ends in modules.items():
        # The shapes tell which weights it is for, and so its name, rank and scaling.
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
        # In a, experts follow one another; in b, their columns alternate.
        a_all = a.view(E, r, -1)
        b_all = b.view(-1, r, E).permute(2, 0, 1)
        parts[part] = (a_all, b_all.float() * scaling)
    return StoredAdapter(*parts)


def _shape_of_weight(ends: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The shape n, k of b · a. A factor that is missing leaves its dimension out."""
    shape = []
    for end, dim in ((_B, 0), (_A, -1)):
        if end in ends and ends[end].dim():
            shape.append(ends[end].shape[dim])
    return tuple(shape)


def _of_single(
    modules: Mapping[str, Mapping[str, Tensor]],
    names: Mapping[str, str],
    config: _Config,
    sizes: _Sizes,
    interleaved: bool,
) -> StoredAdapter:
    """Make an adapter from modules of single experts. Factors of gate and up lie side by side."""
    E, D, wide, F = sizes
    # The rows of gate and of up in `w_gate_up`.
    gate = slice(0, F)
    up = slice(F, None)
    if interleaved:
        gate = slice(0, None, 2)
        up = slice(1, None, 2)
    places = {
        "gate": _Place(0, gate, (F, D)),
        "up": _Place(0, up, (F, D)),
        "down": _Place(1, slice(None), (D, F)),
    }
    # The factors that the folder has, by GEMM, expert and projection.
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
    # Put the factors of an expert side by side. Where it has fewer than others, zeros follow.
    parts: list[_Factors | None] = []
    for experts, (n, k) in zip(found, ((wide, D), (D, F)), strict=True):
        ranks = [sum(len(a) for a, _ in each.values()) for each in experts.values()]
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
    """Take lora_A [experts · r, k] and lora_B [n, r · experts] of a module. Raises ValueError for
    any other tensors.
    """
    a = ends.get(_A)
    b = ends.get(_B)
    if a is not None and b is not None and len(ends) == 2:
        rows = experts * r
        fits = any(a.shape == (rows, k) and b.shape == (n, rows) for n, k in shapes)
        if fits and a.dtype in FLOATS and b.dtype in FLOATS:
            return a, b
    # Say what they must be, and what they are.
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
    """The value that PEFT takes for a module: that of the first pattern that matches the end of its
    name, otherwise the usual one.
    """
    for pattern, value in (patterns or {}).items():
        if any(re.match(rf"(.*\.)?({pattern.pattern})$", name) for name in names):
            return value
    return usual


def _some(names: Sequence[str]) -> str:
    """Names in a message."""
    named = ", ".join(names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    if more > 0:
        named += f" and {more} more"
    return named or "nothing"
