"""Folders of torch.distributed.checkpoint that a save replaces as a whole, whichever of its writes
is the last.

    saved/shards-5f2c…/   the files of all ranks, which nobody reads yet
    saved/.metadata       names them: one rename replaces it, then the former files go

torch's own readers take such a folder, too. They find files by the paths in `.metadata`.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epmoe.group.peers import Peers

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata

_METADATA = ".metadata"
_SHARDS = "shards-"


def save(state: Mapping[str, Any], folder: str | os.PathLike[str], peers: Peers) -> None:
    """Write a state dict, of which each rank has its own part; see `epmoe.checkpoint.save`.
    Collective.
    """
    # Imported here: it takes most of a second.
    import torch.distributed.checkpoint as dcp

    path = Path(folder)
    with peers.together():
        if "://" in os.fspath(folder):
            raise ValueError(
                f"{folder}: must be a path, for others give `sharded_state_dict` to torch's `save`"
            )
        if peers.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            _clean(path)
    # All write into a folder that rank 0 names, beside what is there.
    shards = path / peers.all_gather(f"{_SHARDS}{uuid.uuid4().hex[:12]}")[0]
    try:
        with _telling(f"{folder}: cannot be saved", RuntimeError), peers.waiting():
            dcp.save(dict(state), checkpoint_id=shards, process_group=peers.group)
        # Once all have written, it takes the place of the former one.
        with peers.together():
            if peers.rank == 0:
                _publish(shards)
    finally:
        if peers.rank == 0:
            _clean(path)


def load(state: dict[str, Any], folder: str | os.PathLike[str], peers: Peers) -> None:
    """Read into the tensors of a state dict; see `epmoe.checkpoint.load`. Collective. All ranks
    read one checkpoint, even while another is saved.
    """
    import torch.distributed.checkpoint as dcp

    path = Path(folder)
    with peers.together():
        shards = _shards(path)
    path /= peers.all_gather(shards)[0]
    with (
        _telling(f"{folder}: has no checkpoint of this model and optimizer", ValueError),
        peers.waiting(),
    ):
        dcp.load(state, checkpoint_id=path, process_group=peers.group)


@contextmanager
def appearing(folder: str | os.PathLike[str], peers: Peers) -> Iterator[tuple[Path, Path]]:
    """A folder that appears as a whole or not at all: its path, and that of a hidden folder beside
    it, which rank 0 makes, and which gets the name at the end unless a rank raises. Collective.
    """
    target = Path(folder).resolve()
    hidden = target.with_name(f".{target.name}.partial")
    try:
        yield target, hidden
        with peers.together():
            if peers.rank == 0:
                os.rename(hidden, target)
                sync(target.parent)
    finally:
        if peers.rank == 0:
            shutil.rmtree(hidden, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _telling(what: str, kind: type[Exception]) -> Iterator[None]:
    """Raises an error of one sentence, on all ranks, in place of torch's, which has the traces of
    all ranks.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        _, (why, _) = min(error.failures.items())
        raise kind(f"{what}: {why}") from None


def _read(path: Path) -> Metadata:
    """Metadata of a checkpoint. Raises ValueError if there is none."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        return FileSystemReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path}: must be a folder with a checkpoint, got {type(error).__name__}: {error}"
        ) from None


def _shards(path: Path) -> str:
    """The folder in a checkpoint that has its files: "" if torch has written them itself."""
    files: dict[Any, Any] = _read(path).storage_data
    # All files are in one folder.
    first = next((info.relative_path.partition("/")[0] for info in files.values()), "")
    return first if first.startswith(_SHARDS) else ""


def _publish(shards: Path) -> None:
    """Let the folder around `shards` be this checkpoint."""
    metadata = _read(shards)
    located = {}
    for index, info in metadata.storage_data.items():
        path = f"{shards.name}/{info.relative_path}"
        located[index] = dataclasses.replace(info, relative_path=path)
    metadata.storage_data = located
    # All is on the disk before the rename that publishes it.
    unnamed = shards / "published"
    unnamed.write_bytes(pickle.dumps(metadata))
    for written in (unnamed, shards, shards.parent):
        sync(written)
    os.replace(unnamed, shards.parent / _METADATA)
    sync(shards.parent)


def _clean(path: Path) -> None:
    """Remove files of checkpoints that are not this one: of one before, or of saves that died."""
    kept = None
    if (path / _METADATA).is_file():
        kept = _shards(path)
        if not kept:
            return
    for shards in path.glob(f"{_SHARDS}*"):
        if shards.name != kept:
            shutil.rmtree(shards, ignore_errors=True)
    # Files that torch itself has saved beside the metadata.
    for file in path.glob("__*_*.distcp") if kept else ():
        with suppress(OSError):
            file.unlink()
