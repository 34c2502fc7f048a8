"""Saves a trained model as a folder of Hugging Face, which transformers can load.

    every rank   its own experts ──────────────────▶ files of its own ─┐
    rank 0       all other tensors, gathered ──────▶ files of rank 0 ──┴─▶ folder gets its name

All ranks first work out which tensors each file will have. If several ranks hold parts of a tensor,
they send the parts to rank 0, which writes the tensor.
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
from epmoe.live.sleeping import refuse_without_memory
from epmoe.local.experts import GroupedExperts
from epmoe.local.spread import local_view
from epmoe.local.weight_formats import NVFP4_GROUPS
from epmoe.native.arguments import dtype_name
from epmoe.service import ExpertParallel
from epmoe.training.models import expert_parallels

# Keys of `config.json` that describe a quantization.
_QUANTIZATION = ("quantization_config", "compression_config")
# A file beside `config.json` in which modelopt describes a quantization.
_QUANTIZATION_FILE = "hf_quant_config.json"


class _Owner(NamedTuple):
    """The only rank that holds a tensor."""

    ep: int
    """the position of the layer's `ExpertParallel` among those of the model"""
    rank: int
    """the rank in the group of this `ExpertParallel`"""


class _Saved(NamedTuple):
    """A tensor that will be saved, with its name in the folder."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    read: Callable[[], Tensor]
    """returns the tensor on the rank that writes it"""
    owner: _Owner | None = None
    """The rank that writes the tensor. None: all ranks have the tensor or parts of it. Then all
    ranks call `read` together, and rank 0 writes.
    """

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
    """Save a trained model as a folder of Hugging Face that transformers can load. Collective.

    The tensors get the names that they have in `like`, the checkpoint from which the layers were
    loaded, and they have the dtypes of the model. Scales are not saved: if the experts of `like`
    are fp8, MXFP4 or NVFP4, they are saved in the dtype in which the model has them. Other files of
    `like`, such as those of the tokenizer, are copied. `config.json` gets the dtype of the experts,
    and its quantization is removed.

    Every rank writes files with its own experts. Rank 0 writes everything else, also the experts of
    a checkpoint that has one tensor for all experts. Besides the model, a rank needs CPU memory for
    the tensors of one file.

    The folder appears as a whole or not at all: all files are written to a hidden folder beside it,
    which is renamed at the end.

    Args:
        module: a model whose MoE blocks are `MoELayer`s with fp32, fp16 or bf16 `GroupedExperts`.
            Either the layer or the module that has it as a child has the name of the block. All
            other tensors have the names that they have in `like`. If a layer has a module `shared`,
            this is the block's own module of shared experts, or has that module as a child under
            its name.
        folder: a path that all ranks see, and that does not exist yet or is an empty folder.
        like: the checkpoint from which the layers were loaded, with all its files.
        max_shard_bytes: the largest size of a file that has several tensors, in bytes.

    Raises:
        TypeError: the experts of a layer are not `GroupedExperts`, or they are MXFP4 or NVFP4; or a
            tensor is fp8.
        ValueError: `folder` exists and is not empty; or `like` lacks a tensor of the model or has
            it in another shape; or the model lacks a tensor of a MoE block of `like`; or `like` has
            one NVFP4 tensor for all experts; or ranks have different models.
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
        refuse_without_memory(module)
        # Every rank works out which tensors each file will have. All must come to the same result,
        # since they gather these tensors together.
        files = _files(_tensors(module, layers, eps, source), max_shard_bytes)
        if len(set(peers.all_gather(_digest(files)))) > 1:
            raise ValueError(
                "ranks must have the same model and `like`, got other names, dtypes or shapes"
            )
        # Rank 0 makes the hidden folder. The other ranks wait until it is there.
        if peers.rank == 0:
            experts = layers[0][1].experts if layers else next(module.parameters())
            _begin(source, target, hidden, files, dtype_name(experts.dtype))
        peers.all_gather(None)
        # Each rank writes the experts that it alone holds. Where there are replicas, only those of
        # the replica with global rank 0 write.
        mine = {_Owner(i, ep.rank) for i, ep in enumerate(eps) if 0 in peers_of(ep).global_ranks}
        for name, tensors in files.items():
            if tensors[0].owner in mine:
                _write(hidden / name, _gathered(tensors))
        # All ranks gather the other tensors, file by file, and rank 0 writes them.
        for name, tensors in files.items():
            if tensors[0].owner is None:
                gathered = run_uninterrupted(
                    [peers], partial(_gathered, tensors, kept=peers.rank == 0)
                )
                if peers.rank == 0:
                    _write(hidden / name, gathered)


def _digest(files: Mapping[str, list[_Saved]]) -> str:
    """A digest of the names, dtypes and shapes in all files, by which ranks compare them."""
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
    """List all tensors to save, in an order that is the same on all ranks.

    `layers` are the model's `MoELayer`s with their names, `eps` are its `ExpertParallel`s, and
    `source` is the checkpoint whose names the tensors get. Raises the TypeErrors and ValueErrors of
    `save_pretrained`.
    """
    state = dict(module.state_dict())
    saved: list[_Saved] = []
    # For tensors of MoE blocks outside of the routed experts: the name in the folder, by the key in
    # `state`.
    names: dict[str, str] = {}
    # For each block: the names in the folder that the model must have.
    needed: dict[str, set[str]] = {}
    # Take the routed experts out of `state`, and find the names of the rest of their blocks.
    for prefix, layer in layers:
        stored = _stored(prefix, layer, source)
        tensors = {}
        for name, _ in layer.experts.named_parameters():
            tensors[name] = state.pop(f"{prefix}.experts.{name}")
        state.pop(f"{prefix}._extra_state", None)
        saved += _experts_to_save(layer, eps.index(layer.ep), stored, tensors)
        needed[prefix] = stored.others
        for key in state:
            if key.startswith(f"{prefix}."):
                names[key] = _name_in_block(key, prefix, stored, source)
    # Add all other tensors. A folder has tied parameters once, so that a parameter may be missing
    # there if another of its names is present.
    tied = _tied(module)
    for key, value in state.items():
        name = names.get(key, key)
        if name not in source or not isinstance(value, Tensor):
            if any(other in source for other in tied.get(key, ())):
                continue
            raise ValueError(f"{source.path}: has no tensor for `{key}` of the model")
        shape = source.shape(name)
        # Some checkpoints store the bias of the choice of experts [E] as [1, E].
        is_flat = key in names and shape[:-1] == [1] and list(value.shape) == shape[1:]
        if list(value.shape) != shape and not is_flat:
            raise ValueError(
                f"{source.path}: `{name}` is {shape}, but `{key}` of the model is "
                f"{list(value.shape)}"
            )
        saved.append(_Saved(name, value.dtype, shape, partial(whole_tensor, value)))
    _check_complete(saved, needed, source)
    # Tensors without an owner come first, then those of each rank, so that a file has one owner.
    return sorted(saved, key=lambda each: (each.owner or (-1, 0), each.name))


def _stored(prefix: str, layer: Any, source: SafetensorsFolder) -> Stored:
    """Find out how the checkpoint `source` stores the MoE block of a layer.

    `prefix` is the name of the layer in the model. Raises TypeError if the layer's experts cannot
    be saved, and ValueError if the checkpoint has no such block or its experts differ in their
    parameters or sizes.
    """
    if not isinstance(layer.experts, GroupedExperts) or layer.experts.is_quantized:
        raise TypeError(
            f"`{prefix}.experts` must be GroupedExperts in fp32, fp16 or bf16: load the layer "
            f"with `from_safetensors(…, dtype=…)`, got {layer.experts}"
        )
    # The name `gate.bias` does not say which of the layer's two biases it is.
    has_only_choice_bias = layer.bias is not None and layer.logit_bias is None
    gate_bias: GateBias = "choice" if has_only_choice_bias else "logits"
    # The layer may be the block itself, or a child of the module that has the block's name.
    stored = source.stored(prefix, prefix.rpartition(".")[0], gate_bias=gate_bias)
    # transformers expects [E, 2F, D] of some models and the transpose of others, and the names of
    # such tensors do not tell them apart.
    if stored.native == NVFP4_GROUPS and stored.fused:
        raise ValueError(
            f"{source.path}: must have tensors of each expert to be saved like, got the experts of "
            f"`{prefix}` in NVFP4 as one tensor"
        )
    # The layer and the block must have the same parameters, D and F.
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
    """Raise ValueError if the model lacks a tensor of a block, and TypeError if a tensor is fp8.

    `needed` has the names that the model must have, by the name of the layer.
    """
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
    """The `MoELayer`s of a model with their names.

    A layer that a model has under two names occurs twice, since the folder has both names.
    """
    layers = []
    for name, each in module.named_modules(remove_duplicate=False):
        if hasattr(each, "ep") and hasattr(each, "router_weight"):
            layers.append((name, each))
    return layers


def _experts_to_save(
    layer: Any, ep_index: int, stored: Stored, tensors: Mapping[str, Tensor]
) -> Iterator[_Saved]:
    """Yield the tensors to save of a layer's experts. Of copies of an expert, one is saved.

    `ep_index` is the position of the layer's `ExpertParallel` among those of the model. `tensors`
    has the parameters of the experts by their names.
    """
    for argument, tensor in tensors.items():
        local = local_view(tensor.detach())
        # The folder may have gate and up as two tensors, which are two parts of our rows.
        names = stored.dequantized[argument]
        shape = [local.shape[1] // len(names), *local.shape[2:]]
        # The folder has one tensor for all experts. All ranks gather it.
        if stored.fused:
            transposed = stored.dequantized_transposed and argument.startswith("w_")
            if transposed:
                shape = shape[::-1]
            shape = [stored.num, *shape]
            for part, name in enumerate(names):
                read = partial(_all_experts, local, layer, transposed, part, len(names))
                yield _Saved(name, local.dtype, shape, read)
            continue
        # The folder has a tensor for each expert, and one rank holds all of the tensor.
        for expert in range(stored.num):
            rank, index = layer.ep.holder(expert, layer.tag)
            for part, name in enumerate(names):
                read = partial(_chunk_of_expert, local, index, part, len(names))
                owner = _Owner(ep_index, rank)
                yield _Saved(name.replace("*", str(expert)), local.dtype, shape, read, owner)


def _all_experts(local: Tensor, layer: Any, transposed: bool, part: int, parts: int) -> Tensor:
    """Gather the weights of all experts, and take one of `parts` equal parts of their rows.

    All ranks call it, and only rank 0 gets useful values.
    """
    whole = gather(local, layer.ep, layer.tag, cpu_offload=True)
    if parts > 1:
        whole = whole.chunk(parts, 1)[part]
    return whole.mT if transposed else whole


def _chunk_of_expert(local: Tensor, index: int, part: int, parts: int) -> Tensor:
    """Take one of `parts` equal parts of the rows of one expert, local[index]."""
    return local[index].chunk(parts)[part]


def _name_in_block(key: str, prefix: str, stored: Stored, source: SafetensorsFolder) -> str:
    """Find the name that the folder has for a tensor of a MoE block outside of the routed experts.

    `key` is the name of the tensor in the model. A tensor of the router has a known name. Any other
    tensor is one of shared experts, whose name must end as one name in the folder does. Raises
    ValueError unless there is exactly one such name.
    """
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
    """For each name of a parameter, all names that the parameter has in the model."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def _files(tensors: list[_Saved], max_shard_bytes: int) -> dict[str, list[_Saved]]:
    """Divide tensors into files, which have the names that transformers gives to its files.

    All tensors of a file have the same owner, which writes the file.
    """
    shards: list[list[_Saved]] = []
    bytes_left = 0
    for tensor in tensors:
        is_of_other_rank = not shards or tensor.owner != shards[-1][0].owner
        if is_of_other_rank or tensor.num_bytes > bytes_left:
            shards.append([])
            bytes_left = max_shard_bytes
        shards[-1].append(tensor)
        bytes_left -= tensor.num_bytes
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
    """Make the hidden folder and write all files that have no tensors. Rank 0 calls it.

    `files` are the tensors of each file, for the index. `dtype` is the name of the experts' dtype,
    for `config.json`. Raises ValueError if `target`, the folder's final path, is not free.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: must not exist, or be an empty folder")
    # An earlier save whose process was killed may have left the hidden folder.
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    if len(files) > 1:
        _write_index(hidden / INDEX, files)
    # Copy the files that have no tensors, such as those of the tokenizer.
    for other in source.path.iterdir():
        is_written_here = other.suffix == ".safetensors" or other.name in (INDEX, "config.json")
        is_left_out = is_written_here or other.name == _QUANTIZATION_FILE
        if other.is_file() and not is_left_out:
            shutil.copyfile(other, hidden / other.name)
    described = source.path / "config.json"
    if described.is_file():
        config = json.loads(described.read_text(encoding="utf-8"))
        config = without_quantization(config, dtype)
        (hidden / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_index(path: Path, files: Mapping[str, list[_Saved]]) -> None:
    """Write the index, which says in which file each tensor is."""
    size = 0
    file_of = {}
    for file, tensors in files.items():
        for each in tensors:
            size += each.num_bytes
            file_of[each.name] = file
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def without_quantization(config: Any, dtype: str) -> Any:
    """Return a model's `config.json` without its quantization, and with `dtype` as its dtype.

    A model with several parts, such as one for text and one for images, has a configuration for
    each part, which is changed in the same way.
    """
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
    """Read tensors into separate contiguous memory, as safetensors requires.

    A rank that does not write the tensors calls it, too, with `kept` False, because the other ranks
    may need its parts. It then returns {}.
    """
    out = {}
    for each in tensors:
        # `read` may be a collective call.
        tensor = each.read()
        if kept:
            copy = torch.empty(each.shape, dtype=each.dtype)
            out[each.name] = copy.copy_(tensor.detach().reshape(each.shape))
    return out


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of safetensors, and wait until it is on the disk."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    sync(path)
