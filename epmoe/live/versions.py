"""Versions of a model's weights, which ranks of a trainer leave in a folder, and ranks of a server map from there.

    rank of a trainer: send ─ a draft, renamed once it is whole ─▶ folder ─ mapped ─▶ rank of a server: tick

A version is complete once every rank of the trainer has its file there. A file never changes, and whoever has mapped
one keeps its bytes, also once the trainer has removed it or has died. So neither side waits for the other. Files name
the group that has written them: what a trainer that has died leaves is never completed by the next one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epmoe.config.placement import is_int
from epmoe.local.experts import GroupedExperts
from epmoe.local.given import layers_of
from epmoe.local.spread import local_view
from epmoe.native.arguments import FLOATS, describe
from epmoe.native.build import who_else

MOST_VERSIONS = (1 << 40) - 1
_FILE = re.compile(r"v(\d{13})\.(\w+\.\d+)\.\d+-of-(\d+)")  # the version, the group, and its size


class Experts(NamedTuple):
    """A rank's experts of a layer."""

    held: list[int]
    """their logical numbers"""
    computes: tuple[Any, ...]
    """what must be equal on both sides: interleaved, limit, alpha, up_offset"""
    weights: dict[str, Tensor]
    """[e, …] by name, without those that are None"""


class WeightSender:
    """Leaves versions of a model's weights for servers on the same machine. Each rank of the trainer has one.

    A rank writes its own experts, as they are when it calls `send`, and waits for no other rank and for no server. Each
    version takes memory for all weights that are sent, and `keep` versions stay, so that a server that has seen a
    version has time to map it.

    Args:
        model: whose layers are `MoELayer`s with `GroupedExperts` that are not quantized, in wrappers of torch or not.
        folder: in memory, such as one in /dev/shm; the same for all ranks of the trainer, and for the server. It is
            made, for this user only. Whoever ends the job removes it.
        keep: versions that stay, at least 2.

    Raises:
        ValueError: `keep` is less, or the model has no such layer.
        PermissionError: another user owns the folder, or can write into it.
    """

    def __init__(self, model: nn.Module, folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        if not is_int(keep) or keep < 2:
            raise ValueError(f"`keep` must be an integer of at least 2, got {keep!r}")
        self._layers, self._folder, self._keep = layers_to_hand_over(model), own_folder(folder), keep
        ep = next(iter(self._layers.values())).ep
        self._suffix = f".{ep.rank}-of-{ep.size}"
        self._group = f"{ep.origin}.{ep.generation}"
        for draft in self._folder.glob(f".v*{self._suffix}"):  # of a rank that has died
            draft.unlink(missing_ok=True)

    def send(self, version: int, dense: Mapping[str, Tensor] | None = None) -> None:
        """Leave this rank's part of a version, a number that grows. All ranks of the trainer send the same versions.

        `dense` are other weights, by any name: the server's callback gets those of all ranks. Raises ValueError where
        `version` is not above the versions that this rank has sent; and OSError where the memory is full.
        """
        sent = sorted(path for path in self._folder.glob(f"v*{self._suffix}") if _FILE.fullmatch(path.name))
        newest = int(sent[-1].name[1:14]) if sent else -1
        if not is_int(version) or not newest < version <= MOST_VERSIONS:
            raise ValueError(f"`version` must be an integer above {newest}, the last that was sent, got {version!r}")
        experts = {name: tuple(_experts_of(layer)) for name, layer in self._layers.items()}
        plain = {name: _plain(value) for name, value in (dense or {}).items()}
        whole = self._folder / f"v{version:013}.{self._group}{self._suffix}"
        draft = whole.with_name(f".{whole.name}")
        torch.save({"experts": experts, "dense": plain}, draft)
        draft.replace(whole)
        for old in sent[: max(len(sent) + 1 - self._keep, 0)]:
            old.unlink(missing_ok=True)


class Version(NamedTuple):
    """The parts of a complete version, in mapped memory."""

    number: int
    experts: dict[str, list[Experts]]
    """by layer, of each rank of the trainer"""
    dense: dict[str, Tensor]


def newest_version(folder: Path) -> int:
    """The newest complete version; −1 for none."""
    return max((int(version) for version, *_ in _complete(os.listdir(folder))), default=-1)


def map_version(folder: Path, number: int) -> Version:
    """Map a version. Raises FileNotFoundError where the trainer has removed it."""
    found = list(_complete(path.name for path in folder.glob(f"v{number:013}.*")).values())
    if len(found) != 1:
        raise FileNotFoundError(f"version {number} is not complete any more")
    version = Version(number, {}, {})
    for name in sorted(found[0]):
        part = torch.load(folder / name, map_location="cpu", mmap=True, weights_only=True)
        version.dense.update(part["dense"])
        for name, experts in part["experts"].items():
            version.experts.setdefault(name, []).append(Experts(*experts))
    return version


def _complete(names: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """Files by version, group and size, where all ranks of the group have theirs."""
    files = dict[tuple[str, ...], list[str]]()
    for name in names:
        if found := _FILE.fullmatch(name):
            files.setdefault(found.groups(), []).append(name)
    return {key: parts for key, parts in files.items() if len(parts) == int(key[-1])}


def layers_to_hand_over(model: nn.Module) -> dict[str, Any]:
    """The layers of a model, by name. Raises ValueError where there is none, or one has other experts."""
    layers = layers_of(model)
    odd = [name for name, layer in layers.items() if not isinstance(layer.experts, GroupedExperts)]
    if not layers or odd:
        raise ValueError(f"`model` must have MoELayers with GroupedExperts, got {odd[0] if odd else 'no MoELayer'!r}")
    return layers


def own_folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder).absolute()
    path.mkdir(0o700, parents=True, exist_ok=True)
    if who := who_else(path):
        raise PermissionError(f"{path} {who}, who could put weights there: take another folder")
    return path


def computes(experts: GroupedExperts) -> tuple[Any, ...]:
    """What `Experts.computes` has."""
    return experts.interleaved, experts.limit, experts.alpha, experts.up_offset


def _experts_of(layer: Any) -> Experts:
    experts = layer.experts
    if experts.dtype not in FLOATS or experts.is_quantized:
        raise ValueError(f"experts of a trainer must be fp32, fp16 or bf16, got {describe(experts.w_down)}")
    weights = {name: _plain(local_view(value.detach())) for name, value in experts.named_parameters()}
    return Experts(layer.ep.logical_experts(layer.tag), computes(experts), weights)


def _plain(value: Tensor) -> Tensor:
    """The value on the CPU, in memory of its own size, of which a file has all."""
    value = value.detach().cpu().contiguous()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
