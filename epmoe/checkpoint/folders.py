"""Saves and loads folders of torch.distributed.checkpoint.

A save replaces the checkpoint in a folder as a whole. If a process dies during the save, the folder
still has the former checkpoint.

    saved/shards-5f2c…/   all ranks write their files here, and nobody reads these files yet
    saved/.metadata       names the files of the checkpoint

When all files are on the disk, one rename replaces `.metadata`, and the files of the former
checkpoint are removed. torch's own readers can read such a folder, too, since they find the files
by the paths in `.metadata`.
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
from epmoe.group.waiting import import_undisturbed

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata

# The import of these modules takes most of a second, which programs without checkpoints should not
# spend. torch imports the second one when it first writes a file.
_TORCH_CHECKPOINTS = ("torch.distributed.checkpoint", "torch.utils.serialization.config")
_METADATA = ".metadata"
_SHARDS = "shards-"
# The name of the new metadata file within `shards-…`, before it becomes `.metadata`.
_PREPARED = "published"


def save(
    state_of: Callable[[], Mapping[str, Any]], folder: str | os.PathLike[str], peers: Peers
) -> None:
    """Write a checkpoint into a folder. Collective; it succeeds on all ranks or raises on all.

    `epmoe.checkpoint.save` calls it and describes its errors. Each rank calls `state_of`, which
    returns the state dict with this rank's part of each tensor.
    """
    import_undisturbed(*_TORCH_CHECKPOINTS)
    import torch.distributed.checkpoint as dcp

    path = Path(folder)
    failed = f"{folder}: cannot be saved"
    # Each rank draws a name. Below, all ranks take the name that rank 0 has drawn.
    shards = f"{_SHARDS}{uuid.uuid4().hex[:12]}"
    publish = partial(_on_first, peers, partial(_publish, path / shards), failed)
    try:
        with peers.together(publish):
            # Wait until every rank has its state dict. If a rank cannot make one, all ranks raise
            # here, before anything in the folder has changed.
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
            # Write the new files beside the files of the former checkpoint.
            shards = peers.all_gather(shards)[0]
            # Without a writer torch would look for packages that are not there, in each call.
            writer = dcp.FileSystemWriter(path / shards)
            write = partial(dcp.save, state, storage_writer=writer, process_group=peers.group)
            _by_torch(write, peers, failed, RuntimeError)
            if peers.rank == 0:
                _prepare(path / shards)
    finally:
        if peers.rank == 0:
            # Remove the files of the former checkpoint, or those of this save if it has failed. A
            # folder that cannot be read raised ValueError above, which is the error to report.
            with suppress(ValueError):
                _clean(path)


def load(state: dict[str, Any], folder: str | os.PathLike[str], peers: Peers) -> None:
    """Read a checkpoint into the tensors of a state dict. Collective.

    `epmoe.checkpoint.load` calls it within `Peers.together` and describes its errors. All ranks
    read the same checkpoint, even if another process replaces it meanwhile: rank 0 decides which
    `shards-…` folder is read.
    """
    import_undisturbed(*_TORCH_CHECKPOINTS)
    import torch.distributed.checkpoint as dcp

    path = Path(folder)
    path /= peers.all_gather(_shards_folder(path))[0]
    reader = dcp.FileSystemReader(path)
    read = partial(dcp.load, state, storage_reader=reader, process_group=peers.group)
    failed = f"{folder}: has no checkpoint of this model and optimizer"
    _by_torch(read, peers, failed, ValueError)


@contextmanager
def appearing(folder: str | os.PathLike[str], peers: Peers) -> Iterator[tuple[Path, Path]]:
    """Let a folder appear as a whole or not at all. Collective.

    Yields two paths: that of the folder, and that of a hidden folder beside it. Within this context
    rank 0 makes the hidden folder, and ranks write files into it. At the end rank 0 renames the
    hidden folder. If any rank raises, all ranks raise and the hidden folder is removed.
    """
    target = Path(folder).resolve()
    hidden = target.with_name(f".{target.name}.partial")
    rename = partial(_rename, hidden, target)
    publish = partial(_on_first, peers, rename, f"{target}: cannot be saved")
    try:
        with peers.together(publish):
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
    """Let rank 0 make the change that publishes a save. Every rank calls it.

    `Peers.together` calls it last, when all ranks have done their part. If the change fails, all
    ranks raise a RuntimeError that begins with `failed`.
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
    """Give the hidden folder its name, and wait until the rename is on the disk."""
    os.rename(hidden, target)
    sync(target.parent)


def _by_torch(call: Callable[[], object], peers: Peers, failed: str, kind: type[Exception]) -> None:
    """Run a collective call of torch's checkpoints to its end, whatever a signal handler raises.

    An error of torch becomes an exception of class `kind`, whose message begins with `failed`.
    """
    run_uninterrupted([peers], partial(_call_torch, call, peers, failed, kind))


def _call_torch(
    call: Callable[[], object], peers: Peers, failed: str, kind: type[Exception]
) -> None:
    """Run a call of torch's checkpoints, and shorten its error to one sentence.

    torch's own message would have the stack traces of all ranks.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with peers.waiting():
            call()
    except CheckpointException as error:
        # Take the failure of the lowest rank that failed, without its stack trace.
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


def _shards_folder(path: Path) -> str:
    """The name of the `shards-…` folder that has the files of the checkpoint in `path`.

    It is "" if torch itself has written the checkpoint, since the files then lie beside
    `.metadata`. Raises ValueError if there is no checkpoint.
    """
    files: dict[Any, Any] = _read(path).storage_data
    # All files are in one folder, so any file tells its name.
    for info in files.values():
        first_part = info.relative_path.partition("/")[0]
        return first_part if first_part.startswith(_SHARDS) else ""
    return ""


def _prepare(shards: Path) -> None:
    """Write the metadata that `_publish` will move into the folder around `shards`.

    It returns when all files are on the disk. A checkpoint is only published if a loss of power
    can no longer take its files away.
    """
    metadata = _read(shards)
    # torch wrote paths that begin in `shards`. They have to begin in the folder around it.
    moved = {}
    for index, info in metadata.storage_data.items():
        path = f"{shards.name}/{info.relative_path}"
        moved[index] = dataclasses.replace(info, relative_path=path)
    metadata.storage_data = moved
    prepared = shards / _PREPARED
    prepared.write_bytes(pickle.dumps(metadata))
    # A folder has to be on the disk, too, or the names of its files may be lost.
    for written in (prepared, shards, shards.parent):
        sync(written)


def _publish(shards: Path) -> None:
    """Make the files in `shards` the checkpoint of the folder around it, by one rename."""
    os.replace(shards / _PREPARED, shards.parent / _METADATA)
    sync(shards.parent)


def _clean(path: Path) -> None:
    """Remove the files of earlier checkpoints, and those of saves in which a process died.

    A checkpoint that torch itself has written stays as it is. Raises ValueError if `.metadata`
    cannot be read.
    """
    kept = None
    if (path / _METADATA).is_file():
        kept = _shards_folder(path)
        if not kept:
            return
    for shards in path.glob(f"{_SHARDS}*"):
        if shards.name != kept:
            shutil.rmtree(shards, ignore_errors=True)
    # A checkpoint that torch itself had written here is now replaced. Its files lie beside the
    # metadata.
    if kept:
        for file in path.glob("__*_*.distcp"):
            with suppress(OSError):
                file.unlink()
