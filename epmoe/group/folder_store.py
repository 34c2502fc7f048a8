"""A store of torch.distributed in a folder: a file for each key, which no process leaves half written."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

from epmoe.native.build import who_else

FOLDER = "epmoe-board"
_POLL_S = 0.01
_TIMEOUT = timedelta(minutes=5)  # that of torch's stores
_LONGEST_NAME = 200  # of a file, in bytes; most file systems have 255

Store = dist.Store | str | os.PathLike[str]


def open_store(store: Store) -> dist.Store:
    """The store itself, or a `FolderStore` in a folder.

    Raises PermissionError where others can write into the folder, and ValueError for torch's FileStore: half a record
    of a process that has died would stop every rank for ever.
    """
    if not isinstance(store, dist.Store):
        return FolderStore(Path(store))
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, dist.FileStore):
        raise ValueError("`store` must be a folder or a TCPStore: a FileStore may keep half a record of a dead rank")
    return store


class FolderStore(dist.Store):
    """Keys and values in a folder that all ranks see. Whoever can write into it decides which ranks go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder.absolute() / FOLDER
        self._folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for path in (self._folder.parent, self._folder):
            path.mkdir(0o700, exist_ok=True)
            if who := who_else(path, around=path != self._folder):
                raise PermissionError(f"{path} {who}, who could decide there which ranks go on: take another folder")

    def set(self, key: str, value: str | bytes) -> None:
        """In one step."""
        with self._new_file(value) as file:
            os.replace(file, self._path(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that is not there yet, in one step. Returns what is there then."""
        if expected:
            raise NotImplementedError("a FolderStore sets keys by `compare_set` only where they are not there yet")
        with self._new_file(desired) as file, suppress(FileExistsError):
            os.link(file, self._path(key))
        return self._path(key).read_bytes()

    def get(self, key: str) -> bytes:
        """Waits until it is there."""
        self.wait([key])
        return self._path(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        """Raises `DistStoreError` after the deadline."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"nobody has set {keys} in {self._folder}")
            time.sleep(_POLL_S)

    def add(self, key: str, amount: int) -> int:
        """Torch counts so. The lock ends with its process."""
        with open(self._folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = amount + (int(self.get(key)) if self.check([key]) else 0)
            self.set(key, str(total))
        return total

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        there = self.check([key])
        self._path(key).unlink(missing_ok=True)
        return there

    def _path(self, key: str) -> Path:
        name = quote(key, safe="")
        return self._folder / (name if len(name) <= _LONGEST_NAME else hashlib.sha256(key.encode()).hexdigest())

    @contextmanager
    def _new_file(self, value: str | bytes) -> Iterator[Path]:
        """A file of its own, which is gone afterwards."""
        path = self._folder / f".{secrets.token_hex(8)}"
        try:
            path.write_bytes(value.encode() if isinstance(value, str) else bytes(value))
            yield path
        finally:
            path.unlink(missing_ok=True)
