"""Folders of torch.distributed.checkpoint. A save replaces the checkpoint in a folder as a whole,
at whichever write it may end.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epmoe.group.peers import Peers, run_uninterrupted

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata

_METADATA = ".metadata"
_SHARDS = "shards-"
# The metadata in `shards-…`, until it is moved to the folder.
_PREPARED = "published"


def save(
    state_of: Callable[[], Mapping[str, Any]], folder: str | os.PathLike[str], peers: Peers
) -> None:
    """Write the state dict that `state_of` returns; each rank has its own part of it. See
    `epmoe.checkpoint.save`. Collective, one step of all ranks.
    """
    # Imported here: it takes most of a second.
    import torch.distributed.checkpoint as dcp

    path = Path(folder)
    failed = f"{folder}: cannot be saved"
    # All ranks take that of rank 0.
    shards = f"{_SHARDS}{uuid.uuid4().hex[:12]}"
    publish = partial(_on_first, peers, partial(_publish, path / shards), failed)
    try:
        with peers.together(publish):
            # All ranks can, or nothing is touched.
            state = dict(state_of())
            peers.all_gather(None)
            if "://" in os.fspath(folder):
                raise ValueError(
                    f"{folder}: must be a path, for others give `sharded_state_dict` to torch's "
                    "`save`"
                )
            if peers.rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                _clean(path)
            shards = peers.all_gather(shards)[0]
            write = partial(dcp.save, state, checkpoint_id=path / shards, process_group=peers.group)
            _by_torch(write, peers, failed, RuntimeError)
            if peers.rank == 0:
                _prepare(path / shards)
    finally:
        if peers.rank == 0:
            # A folder that cannot be read has been refused already.
            with suppress(ValueError):
                _clean(path)


def load(state: dict[str, Any], folder: str | os.PathLike[str], peers: Peers) -> None:
    """Read into the tensors of a state dict; see `epmoe.checkpoint.load`. Collective, in a step of
    `Peers.together`. All ranks read one checkpoint, even while another is saved.
    """
    import torch.distributed.checkpoint as dcp

    path = Path(folder)
    path /= peers.all_gather(_shards(path))[0]
    read = partial(dcp.load, state, checkpoint_id=path, process_group=peers.group)
    what = f"{folder}: has no checkpoint of this model and optimizer"
    _by_torch(read, peers, what, ValueError)


@contextmanager
def appearing(folder: str | os.PathLike[str], peers: Peers) -> Iterator[tuple[Path, Path]]:
    """Let a folder appear as a whole or not at all. Collective, one step of all ranks.

    Yields the path of the folder, and of a hidden folder beside it. Rank 0 makes the hidden folder
    and fills it within this context. At the end it gets the name, unless a rank raises.
    """
    target = Path(folder).resolve()
    hidden = target.with_name(f".{target.name}.partial")
    name = partial(_rename, hidden, target)
    try:
        with peers.together(partial(_on_first, peers, name, f"{target}: cannot be saved")):
            yield target, hidden
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


def _on_first(peers: Peers, change: Callable[[], object], failed: str) -> None:
    """Let rank 0 make a change, in the last word of a step. If that fails, all ranks raise
    RuntimeError.
    """
    why = ""
    if peers.rank == 0:
        try:
            change()
        except OSError as error:
            why = str(error)
    why = peers.all_gather(why)[0]
    if why:
        raise RuntimeError(f"{failed}: {why}")


def _rename(hidden: Path, target: Path) -> None:
    os.rename(hidden, target)
    sync(target.parent)


def _by_torch(call: Callable[[], object], peers: Peers, failed: str, kind: type[Exception]) -> None:
    """Run a collective call of torch's checkpoints in a step of all ranks. Errors are of this kind,
    and begin with `failed`.
    """
    run_uninterrupted([peers], partial(_call_torch, call, peers, failed, kind))


def _call_torch(
    call: Callable[[], object], peers: Peers, failed: str, kind: type[Exception]
) -> None:
    """Run a call. torch's error, which has the traces of all ranks, becomes one sentence."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with peers.waiting():
            call()
    except CheckpointException as error:
        # The failure of the first rank that has one, without its trace.
        first_rank = min(error.failures)
        why, _trace = error.failures[first_rank]
        raise kind(f"{failed}: {why}") from None


def _read(path: Path) -> Metadata:
    """Read the metadata of a checkpoint. Raises ValueError if there is none."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        return FileSystemReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path}: must be a folder with a checkpoint, got {type(error).__name__}: {error}"
        ) from None


def _shards(path: Path) -> str:
    """The name of the folder in a checkpoint that has its files; "" if torch has written them."""
    files: dict[Any, Any] = _read(path).storage_data
    # All files are in one folder.
    first = next((info.relative_path.partition("/")[0] for info in files.values()), "")
    return first if first.startswith(_SHARDS) else ""


def _prepare(shards: Path) -> None:
    """Write the metadata with which the folder around `shards` becomes this checkpoint, and wait
    for the disk.
    """
    metadata = _read(shards)
    # Paths begin at the folder around.
    moved = {}
    for index, info in metadata.storage_data.items():
        path = f"{shards.name}/{info.relative_path}"
        moved[index] = dataclasses.replace(info, relative_path=path)
    metadata.storage_data = moved
    prepared = shards / _PREPARED
    prepared.write_bytes(pickle.dumps(metadata))
    for written in (prepared, shards, shards.parent):
        sync(written)


def _publish(shards: Path) -> None:
    """Make the folder around `shards` this checkpoint, by one rename."""
    os.replace(shards / _PREPARED, shards.parent / _METADATA)
    sync(shards.parent)


def _clean(path: Path) -> None:
    """Remove files of earlier checkpoints, and of saves that died."""
    kept = None
    if (path / _METADATA).is_file():
        kept = _shards(path)
        if not kept:
            return
    for shards in path.glob(f"{_SHARDS}*"):
        if shards.name != kept:
            shutil.rmtree(shards, ignore_errors=True)
    # Files that torch itself has saved beside the metadata.
    if kept:
        for file in path.glob("__*_*.distcp"):
            with suppress(OSError):
                file.unlink()
