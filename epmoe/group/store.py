"""A store that outlives each rank, and of which none that dies leaves a half-written word: a
folder, or torch's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

from epmoe.native.build import who_else

Store = dist.Store | str | os.PathLike[str]
POLL_S = 0.02
_FOLDER = "epmoe-board"
_LONGEST_NAME = 200  # of a file, in bytes; most file systems have 255


def folder_store(folder: str | os.PathLike[str]) -> dist.Store:
    """Make a store in a folder for `torch.distributed.init_process_group(store=…)`, as `recover`
    needs it.

    It is there as long as the folder, outlives every rank, and no rank that dies leaves half a
    record in it. Only this user decides there. A `TCPStore` obeys whoever reaches its port, which
    on the loopback interface is every user of the machine; and it lists its keys, so that none is
    a secret.

    Args:
        folder: all ranks see it. It is made where it is not there. The ranks of a run need one of
            their own, in which no earlier run has left words.

    Returns:
        The store; `recover` takes the folder itself.

    Raises:
        PermissionError: other users own the folder or can write into it.
    """
    store = OutlivingStore(folder)
    _kept.append(store)
    return store


# torch calls a store of Python for each further group, and keeps none of them.
_kept = list[dist.Store]()


class OutlivingStore(dist.Store):
    """The store of `recover`, as torch takes it. While it has a `look`, a wait ends if that raises.

    Raises PermissionError if others can write into the folder, and ValueError for torch's
    FileStore, which may hold half a record for ever.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        inner = store
        while isinstance(inner, dist.PrefixStore):
            inner = inner.underlying_store
        if isinstance(inner, dist.FileStore):
            raise ValueError(
                "`store` must be a folder or a TCPStore: a FileStore may hold half a record for "
                "ever"
            )
        self._inner = store if isinstance(store, dist.Store) else _Files(Path(store))
        self.look: Callable[[], None] | None = None

    def set(self, key: str, value: str) -> None:  # or bytes, as for torch's own
        self._inner.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """In one step: set a key that is not there yet; `expected` must be "". Returns the value
        that is there then.
        """
        return self._inner.compare_set(key, expected, desired)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._inner.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._inner.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(minutes=5)) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if self.look is not None:
                self.look()
            elif time.monotonic() > deadline:
                raise dist.DistStoreError(f"nobody has set {keys}")
            time.sleep(POLL_S)


class _Files:
    """A file for each key. A file gets its name once it is complete. Whoever can write here decides
    which ranks take part.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute() / _FOLDER
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        for path in (self._folder.parent, self._folder):
            path.mkdir(0o700, exist_ok=True)
            who = who_else(path, around=path != self._folder)
            if who:
                raise PermissionError(
                    f"{path} {who}, who could decide there which ranks go on: take another folder"
                )

    def set(self, key: str, value: str | bytes) -> None:
        with self._whole(value) as file:
            os.replace(file, self._path(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if expected:
            raise NotImplementedError(
                "a folder sets keys by `compare_set` only where they are not there yet"
            )
        with self._whole(desired) as file, suppress(FileExistsError):
            os.link(file, self._path(key))
        return self.get(key)

    def add(self, key: str, amount: int) -> int:
        with open(self._folder / ".lock", "w") as lock:  # which ends with its process
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = amount + (int(self.get(key)) if self.check([key]) else 0)
            self.set(key, str(total))
        return total

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        # NFS may remember for a minute which names are not there.
        os.close(os.open(self._folder, os.O_RDONLY))
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        name = quote(key, safe="")
        return self._folder / (
            name if len(name) <= _LONGEST_NAME else hashlib.sha256(key.encode()).hexdigest()
        )

    @contextmanager
    def _whole(self, value: str | bytes) -> Iterator[Path]:
        """A file that has the value, under a name that is gone afterwards."""
        path = self._folder / f".{secrets.token_hex(8)}"
        try:
            path.write_bytes(value.encode() if isinstance(value, str) else bytes(value))
            yield path
        finally:
            path.unlink(missing_ok=True)
