"""Saves a trained model as a folder of Hugging Face, which transformers loads.

    every rank   its experts ─────────────────────▶ files of its own ─┐
    all ranks    tensors that ranks share or part ─▶ files of rank 0 ─┴─▶ index ─▶ folder is named

All ranks know the tensors of each file. If several ranks have parts of a tensor, these travel to
the rank that writes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from epmoe.checkpoint.folders import appearing, sync
from epmoe.checkpoint.safetensors_folder import INDEX, WHOLE, GateBias, SafetensorsFolder, Stored
from epmoe.checkpoint.state_dicts import gather
from epmoe.checkpoint.whole import whole_tensor
from epmoe.config.from_hf import PART_KEYS
from epmoe.group.collective import all_ranks, naming, peers_of
from epmoe.group.peers import run_uninterrupted
from epmoe.local.experts import GroupedExperts
from epmoe.local.spread import local_view
from epmoe.native.arguments import dtype_name
from epmoe.service import ExpertParallel
from epmoe.training.models import expert_parallels

_QUANTIZATION = ("quantization_config", "compression_config")


class _Owner(NamedTuple):
    """The one rank that has a tensor."""

    ep: int
    """the number of its ExpertParallel in the model"""
    rank: int
    """its rank there"""


class _Saved(NamedTuple):
    """A tensor of the folder."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    read: Callable[[], Tensor]
    """returns the tensor on the rank that writes it"""
    owner: _Owner | None = None
    """None: all ranks have it or parts of it. Then `read` is collective, and rank 0 writes."""

    @property
    def num_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def save_pretrained(
    module: nn.Module,
    folder: str | os.PathLike[str],
    like: SafetensorsFolder | str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Save a model as the folder of Hugging Face from which its layers come, which transformers
    loads. Collective.

    Every rank writes files with its experts; rank 0 writes everything else, also experts of
    checkpoints that have one tensor of all experts. A rank holds the tensors of a file on the CPU
    besides the model. They have the dtypes of the model. Their names are those of `like`, but
    without scales: experts that were fp8 or MXFP4 are saved as the model has them. Other files of
    `like`, such as those of the tokenizer, are copied; `config.json` gets the dtype of the experts,
    and loses a quantization.

    The folder appears as a whole or not at all: files are written to a hidden folder beside it,
    which is renamed.

    Args:
        module: a model whose MoE blocks are `MoELayer`s with fp32, fp16 or bf16 `GroupedExperts`. A
            layer, or the module whose child it is, has the name of the block. The names of other
            tensors are those of `like`. A module `shared` of a layer is the block's own module of
            shared experts, or has it as a child under its name.
        folder: which all ranks see, and which does not exist yet, or is empty.
        like: the checkpoint from which the layers come, with all its files.
        max_shard_bytes: the largest size of a file with several tensors.

    Raises:
        TypeError: experts are no `GroupedExperts` of a `MoELayer`, or are MXFP4; or a tensor is
            fp8.
        ValueError: `folder` exists; a tensor has no name or another shape in `like`, or one of a
            MoE block there is missing in the model; ranks have different models.
        EPError: EPStateError or EPTimeoutError, as in `save`.
    """
    if isinstance(module, DistributedDataParallel):
        module = module.module
    source = like if isinstance(like, SafetensorsFolder) else SafetensorsFolder(like)
    eps = expert_parallels(module)
    layers = _layers(module)
    with (
        naming("save_pretrained", eps),
        all_ranks(eps) as peers,
        appearing(folder, peers) as (target, hidden),
    ):
        # All ranks know the tensors of each file.
        files = _files(_tensors(module, layers, eps, source), max_shard_bytes)
        if len(set(peers.all_gather(_digest(files)))) > 1:
            raise ValueError(
                "ranks must have the same model and `like`, got other names, dtypes or shapes"
            )
        # Rank 0 makes the folder.
        if peers.rank == 0:
            experts = layers[0][1].experts if layers else next(module.parameters())
            _begin(source, target, hidden, files, dtype_name(experts.dtype))
        peers.all_gather(None)
        # Each rank writes what it alone has.
        mine = {_Owner(i, ep.rank) for i, ep in enumerate(eps) if 0 in peers_of(ep).global_ranks}
        for name, tensors in files.items():
            if tensors[0].owner in mine:
                _write(hidden / name, _gathered(tensors))
        # Rank 0 writes what others have parts of.
        for name, tensors in files.items():
            if tensors[0].owner is None:
                gathered = run_uninterrupted(
                    [peers], partial(_gathered, tensors, kept=peers.rank == 0)
                )
                if peers.rank == 0:
                    _write(hidden / name, gathered)


def _digest(files: Mapping[str, list[_Saved]]) -> str:
    """A digest of names, dtypes and shapes of files, to compare those of ranks."""
    described = []
    for name, tensors in files.items():
        described.append((name, [(each.name, each.dtype, each.shape) for each in tensors]))
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _tensors(
    module: nn.Module,
    layers: list[tuple[str, Any]],
    eps: list[ExpertParallel],
    source: SafetensorsFolder,
) -> list[_Saved]:
    """All tensors of the folder, in an order that is the same on all ranks. Raises what
    `save_pretrained` says.
    """
    state = dict(module.state_dict())
    saved: list[_Saved] = []
    # The names in the folder of other tensors of MoE blocks, by their keys.
    names: dict[str, str] = {}
    # The names below each block that the model must have.
    needed: dict[str, set[str]] = {}
    # Experts, and what else is in their blocks.
    for prefix, layer in layers:
        stored = _stored(prefix, layer, source)
        tensors = {}
        for name, _ in layer.experts.named_parameters():
            tensors[name] = state.pop(f"{prefix}.experts.{name}")
        state.pop(f"{prefix}._extra_state", None)
        saved += _of_experts(layer, eps.index(layer.ep), stored, tensors)
        needed[prefix] = stored.others
        for key in state:
            if key.startswith(f"{prefix}."):
                names[key] = _name_in_block(key, prefix, stored, source)
    # All other tensors. One that is tied to another need not be in the folder by its own name.
    tied = _tied(module)
    for key, value in state.items():
        name = names.get(key, key)
        if name not in source or not isinstance(value, Tensor):
            if any(other in source for other in tied.get(key, ())):
                continue
            raise ValueError(f"{source.path}: has no tensor for `{key}` of the model")
        shape = source.shape(name)
        # A bias of the choice [E] may be stored as [1, E].
        is_flat = key in names and shape[:-1] == [1] and list(value.shape) == shape[1:]
        if list(value.shape) != shape and not is_flat:
            raise ValueError(
                f"{source.path}: `{name}` is {shape}, but `{key}` of the model is "
                f"{list(value.shape)}"
            )
        saved.append(_Saved(name, value.dtype, shape, partial(whole_tensor, value)))
    _check_complete(saved, needed, source)
    return sorted(saved, key=lambda each: (each.owner or (-1, 0), each.name))


def _stored(prefix: str, layer: Any, source: SafetensorsFolder) -> Stored:
    """How the folder stores the block of a layer. Raises TypeError or ValueError if the layer's
    experts are not those of the block.
    """
    if not isinstance(layer.experts, GroupedExperts) or layer.experts.is_quantized:
        raise TypeError(
            f"`{prefix}.experts` must be GroupedExperts in fp32, fp16 or bf16: load the layer "
            f"with `from_safetensors(…, dtype=…)`, got {layer.experts}"
        )
    is_only_of_choice = layer.bias is not None and layer.logit_bias is None
    gate_bias: GateBias = "choice" if is_only_of_choice else "logits"
    stored = source.stored(prefix, prefix.rpartition(".")[0], gate_bias=gate_bias)
    # Compare names of parameters, D and F.
    parameters = sorted(name for name, _ in layer.experts.named_parameters())
    D, F = layer.experts.w_down.shape[1:]
    wanted = (*parameters, D, F)
    found = (*sorted(stored.dequantized), stored.D, stored.F)
    if found != wanted:
        raise ValueError(
            f"{source.path}: must have all files, and the experts of `{prefix}` with D and F: "
            f"{wanted}, got {found}"
        )
    return stored


def _check_complete(
    saved: list[_Saved], needed: Mapping[str, set[str]], source: SafetensorsFolder
) -> None:
    """Raise ValueError if the model lacks a tensor of a block, and TypeError for one in fp8."""
    written = {each.name for each in saved}
    for prefix, names in needed.items():
        missing = sorted(names - written)
        if missing:
            raise ValueError(
                f"{source.path}: the model must have {', '.join(missing)}: let `shared` of "
                f"`{prefix}` be a module whose names end like these"
            )
    for each in saved:
        if each.dtype.itemsize == 1 and each.dtype.is_floating_point:
            raise TypeError(
                f"`{each.name}` must be dequantized to be saved, got {dtype_name(each.dtype)}"
            )


def _layers(module: nn.Module) -> list[tuple[str, Any]]:
    """The layers of a model with their names. A layer that the model has twice has two names."""
    layers = []
    for name, each in module.named_modules(remove_duplicate=False):
        if hasattr(each, "ep") and hasattr(each, "router_weight"):
            layers.append((name, each))
    return layers


def _of_experts(
    layer: Any, number: int, stored: Stored, tensors: Mapping[str, Tensor]
) -> Iterator[_Saved]:
    """The tensors of a layer's experts. Of copies of an expert one is written. `number` is that of
    the layer's ExpertParallel.
    """
    for argument, tensor in tensors.items():
        local = local_view(tensor.detach())
        names = stored.dequantized[argument]
        shape = [local.shape[1] // len(names), *local.shape[2:]]
        # One tensor for all experts, which all ranks gather.
        if stored.fused:
            transposed = stored.dequantized_transposed and argument.startswith("w_")
            if transposed:
                shape = shape[::-1]
            shape = [stored.num, *shape]
            for part, name in enumerate(names):
                read = partial(_all_experts, local, layer, transposed, part, len(names))
                yield _Saved(name, local.dtype, shape, read)
            continue
        # One tensor for each expert, which one rank has completely.
        for x in range(stored.num):
            rank, index = layer.ep.holder(x, layer.tag)
            for part, name in enumerate(names):
                read = partial(_chunk_of_expert, local, index, part, len(names))
                owner = _Owner(number, rank)
                yield _Saved(name.replace("*", str(x)), local.dtype, shape, read, owner)


def _all_experts(local: Tensor, layer: Any, transposed: bool, part: int, parts: int) -> Tensor:
    """Gather weights of all experts, and take part number `part` of their rows."""
    whole = gather(local, layer.ep, layer.tag, cpu_offload=True)
    if parts > 1:
        whole = whole.chunk(parts, 1)[part]
    return whole.mT if transposed else whole


def _chunk_of_expert(local: Tensor, index: int, part: int, parts: int) -> Tensor:
    return local[index].chunk(parts)[part]


def _name_in_block(key: str, prefix: str, stored: Stored, source: SafetensorsFolder) -> str:
    """The name that the folder has for a tensor of a MoE block outside of the routed experts."""
    local_name = key.removeprefix(f"{prefix}.")
    if local_name in stored.router:
        return stored.router[local_name]
    local_name = local_name.removeprefix("shared.")
    found = [name for name in stored.others if name.endswith(f".{local_name}")]
    if len(found) != 1:
        names = ", ".join(sorted(found)) or "none"
        raise ValueError(
            f"{source.path}: must have one tensor for `{key}` of the model, got {names}"
        )
    return found[0]


def _tied(module: nn.Module) -> dict[str, list[str]]:
    """All names that each parameter has, by each of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def _files(tensors: list[_Saved], max_shard_bytes: int) -> dict[str, list[_Saved]]:
    """Divide tensors into files, named as by `save_pretrained` of transformers. The tensors of a
    file have one owner.
    """
    shards: list[list[_Saved]] = []
    room = 0
    for tensor in tensors:
        is_of_other_rank = not shards or tensor.owner != shards[-1][0].owner
        if is_of_other_rank or tensor.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    count = len(shards)
    names = [WHOLE]
    if count > 1:
        names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    return dict(zip(names, shards, strict=True))


def _begin(
    source: SafetensorsFolder,
    target: Path,
    hidden: Path,
    files: Mapping[str, list[_Saved]],
    dtype: str,
) -> None:
    """Make the hidden folder, with all files that have no tensors."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: must not exist, or be an empty folder")
    # A process that was killed may have left it.
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    if len(files) > 1:
        _write_index(hidden / INDEX, files)
    # Copy files without tensors, such as the tokenizer.
    for other in source.path.iterdir():
        is_written_here = other.suffix == ".safetensors" or other.name in (INDEX, "config.json")
        if other.is_file() and not is_written_here:
            shutil.copyfile(other, hidden / other.name)
    described = source.path / "config.json"
    if described.is_file():
        config = json.loads(described.read_text(encoding="utf-8"))
        config = without_quantization(config, dtype)
        (hidden / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_index(path: Path, files: Mapping[str, list[_Saved]]) -> None:
    size = 0
    file_of = {}
    for file, tensors in files.items():
        for each in tensors:
            size += each.num_bytes
            file_of[each.name] = file
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def without_quantization(config: Any, dtype: str) -> Any:
    """A model's configuration without a quantization and with this dtype, also in its parts."""
    if not isinstance(config, dict):
        return config
    kept = {key: value for key, value in config.items() if key not in _QUANTIZATION}
    for key in ("dtype", "torch_dtype"):
        if kept.get(key) is not None:
            kept[key] = dtype
    for key in PART_KEYS:
        if key in kept:
            kept[key] = without_quantization(kept[key], dtype)
    return kept


def _gathered(tensors: list[_Saved], kept: bool = True) -> dict[str, Tensor]:
    """Read tensors into memory of their own, as safetensors wants them. Returns {} unless they are
    `kept`.
    """
    out = {}
    for each in tensors:
        # Read it in any case: other ranks may need this rank's part.
        tensor = each.read()
        if kept:
            copy = torch.empty(each.shape, dtype=each.dtype)
            out[each.name] = copy.copy_(tensor.detach().reshape(each.shape))
    return out


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    sync(path)
