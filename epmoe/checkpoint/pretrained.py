"""A trained model as a folder of Hugging Face, which transformers loads: every rank writes its own experts into it.

    rank 0     headers of all files ─┬─▶ tensors that all ranks have ───┐
    each rank                        └─▶ its experts, in their places ──┴─▶ the folder gets its name

All ranks know the place of each tensor, so that nothing but FSDP's shards travels.
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

from epmoe.checkpoint.safetensors_folder import INDEX, SafetensorsFolder, Stored
from epmoe.group.collective import all_ranks, naming, peers_of
from epmoe.native.arguments import dtype_name
from epmoe.training.models import ExpertLayer, expert_layers, expert_parallels

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The dtypes that can be saved, as safetensors names them."""
_QUANTIZATION = ("quantization_config", "compression_config")
_ALIGNMENT = 8  # of the data in a file of safetensors
_MOST_WRITTEN = 2**30  # bytes in a call


class _Row(NamedTuple):
    """A part of a tensor, of contiguous bytes."""

    offset: int
    """in bytes, from the beginning of the tensor"""
    read: Callable[[], Tensor]


class _Saved(NamedTuple):
    """A tensor of the folder."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    rows: list[_Row]
    """What this rank writes."""
    whole: Tensor | None
    """What rank 0 writes; a DTensor is gathered by all ranks."""

    @property
    def num_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class _File(NamedTuple):
    """A file of the folder."""

    name: str
    header: bytes
    tensors: list[tuple[int, _Saved]]
    """with the places of their data in the file"""
    num_bytes: int


def save_pretrained(
    module: nn.Module,
    folder: str | os.PathLike[str],
    like: SafetensorsFolder | str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Save a model as the folder of Hugging Face from which its layers come, which transformers loads. Collective.

    Every rank writes its experts into their places in the files; rank 0 writes everything else. No rank holds more than
    one expert's tensor besides the model. The tensors have the dtypes of the model. Their names are those of `like`,
    but without scales: experts that were fp8 or MXFP4 are saved as the model has them. Other files of `like`, such as
    those of the tokenizer, are copied; `config.json` gets the dtype of the experts, and loses a quantization.

    The folder appears as a whole or not at all: files are written to a hidden folder beside it, which is renamed.

    Args:
        module: a model whose MoE blocks are `MoELayer`s with fp32, fp16 or bf16 `GroupedExperts`. A layer, or the
            module whose child it is, has the name of the block. The names of other tensors are those of `like`. A
            module `shared` of a layer is the block's own module of shared experts, or has it as a child under its name.
        folder: which all ranks see, and which does not exist yet, or is empty.
        like: the checkpoint from which the layers come, with all its files.
        max_shard_bytes: the largest size of a file with several tensors.

    Raises:
        TypeError: experts are no `GroupedExperts` of a `MoELayer`, or are MXFP4; or a tensor is fp8.
        ValueError: `folder` exists; a tensor has no name or another shape in `like`, or one of a MoE block there is
            missing in the model; ranks have different models.
        EPStateError: see `full_state_dict`.
        EPTimeoutError: see `full_state_dict`. Ranks may be as far apart when they have written.
    """
    module = module.module if isinstance(module, DistributedDataParallel) else module
    source = like if isinstance(like, SafetensorsFolder) else SafetensorsFolder(like)
    target = Path(folder).absolute()
    hidden = target.with_name(f".{target.name}.partial")
    eps = expert_parallels(module)
    with naming("save_pretrained", eps), all_ranks(eps) as peers:
        try:
            with peers.together():
                tensors = _tensors(module, source)
                files = _files(tensors, max_shard_bytes)
                digest = hashlib.sha256(b"".join(file.header for file in files)).hexdigest()
            if len(set(peers.all_gather(digest))) > 1:
                raise ValueError("ranks must have the same model and `like`, got other names, dtypes or shapes")
            with peers.together():
                if peers.rank == 0:
                    _begin(source, target, hidden, files, _dtype_of_experts(module))
            with peers.together():
                for file in files:
                    _write_experts(hidden / file.name, file)
            with peers.together():
                _write_rest(hidden, files, peers.rank == 0)
            with peers.together():
                if peers.rank == 0:
                    os.rename(hidden, target)
                    _sync(target.parent)
        finally:
            if peers.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)


def _tensors(module: nn.Module, source: SafetensorsFolder) -> list[_Saved]:
    """All tensors of the folder, in an order that is the same on all ranks. Raises what `save_pretrained` says."""
    state = dict(module.state_dict())
    saved: list[_Saved] = []
    names: dict[str, str] = {}  # of other tensors of MoE blocks, by key
    blocks: dict[str, set[str]] = {}  # names below a block that the model must have
    for layer in expert_layers(module):
        prefix, _, own = layer.prefix.rstrip(".").rpartition(".")
        if own != "experts" or not hasattr(layer.owner, "router_weight") or layer.experts.is_quantized:
            raise TypeError(
                f"`{layer.prefix.rstrip('.')}` must be the experts of a MoELayer in fp32, fp16 or bf16: load it with "
                f"`from_safetensors(…, dtype=…)`, got {dtype_name(layer.experts.w_down.dtype)}"
            )
        stored = source.stored(prefix, prefix.rpartition(".")[0])
        found = *sorted(stored.dequantized), stored.D, stored.F
        wanted = *sorted(layer.names), *layer.experts.w_down.shape[1:]
        if found != wanted:
            raise ValueError(
                f"{source.path}: must have all files, and the experts of `{prefix}` with D and F: {wanted}, got {found}"
            )
        state.pop(layer.extra, None)
        saved += _of_experts(layer, stored, {name: state.pop(layer.prefix + name) for name in layer.names})
        blocks[prefix] = stored.others
        for key in [key for key in state if key.startswith(f"{prefix}.")]:
            names[key] = _name_in_block(key, prefix, stored, source)
    tied = _tied(module)
    for key, value in state.items():
        name = names.get(key, key)
        if name not in source or not isinstance(value, Tensor):
            if any(other in source for other in tied.get(key, ())):
                continue
            raise ValueError(f"{source.path}: has no tensor for `{key}` of the model")
        shape = source.shape(name)
        flat = key in names and shape[:-1] == [1] * (len(shape) - 1)  # a bias of the choice, which may be [1, E]
        if (shape[-1:] if flat else shape) != list(value.shape):
            raise ValueError(f"{source.path}: `{name}` is {shape}, but `{key}` of the model is {list(value.shape)}")
        saved.append(_Saved(name, value.dtype, shape, [], value))
    written = {each.name for each in saved}
    for prefix, others in blocks.items():
        if missing := sorted(others - written):
            raise ValueError(
                f"{source.path}: the model must have {', '.join(missing)}: let `shared` of `{prefix}` be a module "
                "whose names end like these"
            )
    for each in saved:
        if each.dtype not in _NAMES:
            raise TypeError(f"`{each.name}` must be dequantized to be saved, got {dtype_name(each.dtype)}")
    return sorted(saved, key=lambda each: each.name)


def _of_experts(layer: ExpertLayer, stored: Stored, tensors: Mapping[str, Tensor]) -> Iterator[_Saved]:
    """The tensors of a layer's experts. Of copies of an expert one is written, in the group that has rank 0."""
    ep = layer.ep
    E = stored.num
    writes = 0 in peers_of(ep).global_ranks
    holders = [ep.holder(x, layer.tag) for x in range(E)]
    mine = {x: index for x, (rank, index) in enumerate(holders) if writes and rank == ep.rank}
    for argument, local in tensors.items():
        names = stored.dequantized[argument]
        transposed = stored.dequantized_transposed and argument.startswith("w_")
        shape = [local.shape[1] // len(names), *local.shape[2:]]
        shape = shape[::-1] if transposed else shape
        num_bytes = int(torch.Size(shape).numel()) * local.dtype.itemsize
        for part, name in enumerate(names):
            rows = {
                x: _Row(x * num_bytes, partial(_part, local, i, part, len(names), transposed)) for x, i in mine.items()
            }
            if stored.fused:
                yield _Saved(name, local.dtype, [E, *shape], list(rows.values()), None)
                continue
            for x in range(E):
                own = [rows[x]._replace(offset=0)] if x in rows else []
                yield _Saved(name.replace("*", str(x)), local.dtype, shape, own, None)


def _part(local: Tensor, index: int, part: int, parts: int, transposed: bool) -> Tensor:
    """A part of an expert's rows: gate or up, or both."""
    rows = local[index].chunk(parts)[part]
    return rows.t() if transposed else rows


def _name_in_block(key: str, prefix: str, stored: Stored, source: SafetensorsFolder) -> str:
    """The name in the folder of a tensor of a MoE block that is not one of the routed experts."""
    own = key.removeprefix(f"{prefix}.")
    if own in stored.router:
        return stored.router[own]
    own = own.removeprefix("shared.")
    found = [name for name in stored.others if name.endswith(f".{own}")]
    if len(found) != 1:
        names = ", ".join(sorted(found)) or "none"
        raise ValueError(f"{source.path}: must have one tensor for `{key}` of the model, got {names}")
    return found[0]


def _tied(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by name."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def _files(tensors: list[_Saved], max_shard_bytes: int) -> list[_File]:
    """The files, named as `save_pretrained` of transformers does."""
    shards: list[list[_Saved]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    files = []
    for i, shard in enumerate(shards, start=1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts = []
        end = 0
        for each in sorted(shard, key=lambda each: (-each.dtype.itemsize, each.name)):  # which aligns them all
            starts.append((end, each))
            offsets = [end, end + each.num_bytes]
            described[each.name] = {"dtype": _NAMES[each.dtype], "shape": each.shape, "data_offsets": offsets}
            end = offsets[1]
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        files.append(_File(name, header, [(len(header) + start, each) for start, each in starts], len(header) + end))
    return files


def _begin(source: SafetensorsFolder, target: Path, hidden: Path, files: list[_File], dtype: str) -> None:
    """Make the hidden folder, with headers, room for all tensors, and the files that are not of tensors."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: must not exist, or be an empty folder")
    shutil.rmtree(hidden, ignore_errors=True)  # of a process that was killed
    hidden.mkdir(parents=True)
    for file in files:
        with (hidden / file.name).open("wb") as opened:
            opened.write(file.header)
            opened.truncate(file.num_bytes)
    if len(files) > 1:
        weight_map = {each.name: file.name for file in files for _, each in file.tensors}
        size = sum(each.num_bytes for file in files for _, each in file.tensors)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (hidden / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for other in source.path.iterdir():
        if other.is_file() and other.suffix != ".safetensors" and other.name not in (INDEX, "config.json"):
            shutil.copyfile(other, hidden / other.name)
    if (described := source.path / "config.json").is_file():
        config = json.loads(described.read_text(encoding="utf-8"))
        for part in (config, config.get("text_config")):
            for key in _QUANTIZATION if isinstance(part, dict) else ():
                part.pop(key, None)
            for key in ("dtype", "torch_dtype"):
                if isinstance(part, dict) and part.get(key) is not None:
                    part[key] = dtype
        (hidden / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_experts(path: Path, file: _File) -> None:
    """Write this rank's experts."""
    for start, tensor in file.tensors:
        for row in tensor.rows:
            _write(path, row.read(), start + row.offset)
    _sync(path)


def _write_rest(hidden: Path, files: list[_File], is_first: bool) -> None:
    """Write what all ranks have, on rank 0. Where it fails it still gathers DTensors, for which other ranks wait."""
    problem: OSError | None = None
    for file in files:
        for start, tensor in file.tensors:
            whole: Any = tensor.whole
            if hasattr(whole, "full_tensor"):
                whole = whole.full_tensor()
            if is_first and whole is not None and problem is None:
                try:
                    _write(hidden / file.name, whole, start)
                except OSError as error:
                    problem = error
    if problem is not None:
        raise problem
    for file in files if is_first else ():
        _sync(hidden / file.name)


def _write(path: Path, tensor: Tensor, offset: int) -> None:
    """Write a tensor's bytes to a place of a file."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    written = 0
    descriptor = os.open(path, os.O_WRONLY)
    try:
        while written < len(data):
            written += os.pwrite(descriptor, data[written : written + _MOST_WRITTEN], offset + written)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dtype_of_experts(module: nn.Module) -> str:
    layers = expert_layers(module)
    return dtype_name(layers[0].experts.dtype if layers else next(module.parameters()).dtype)
