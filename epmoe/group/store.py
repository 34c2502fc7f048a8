"""The store that `recover` uses, in a folder or over a store of torch. It outlives every rank, and
a rank that dies leaves no half-written word in it.
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
# A rank that waits for a word of another rank asks for it at this interval.
POLL_S = 0.02
# The store makes a folder of this name in the folder of the caller.
_FOLDER = "epmoe-board"
# The longest name of a file in bytes. Most file systems allow 255.
_LONGEST_NAME = 200


def folder_store(folder: str | os.PathLike[str]) -> dist.Store:
    """Make a store in a folder for `torch.distributed.init_process_group(store=…)`, as `recover`
    needs it.

    The store exists as long as the folder. It outlives every rank, and a rank that dies leaves no
    half-written record in it. Only this user can write into it. A `TCPStore`, in contrast, obeys
    everybody who reaches its port, which on the loopback interface is every user of the machine. It
    also lists its keys, so that no key is a secret.

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


# torch uses a store of Python for each further group, but does not keep it alive. This list does.
_kept = list[dist.Store]()


class OutlivingStore(dist.Store):
    """A store for torch that outlives every rank. It uses a folder or another store of torch.

    While the attribute `look` is set, waits in the store call it again and again, and end if it
    raises. The constructor raises PermissionError if other users can write into the folder. It
    raises ValueError for torch's FileStore, which may hold half a record for ever.
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

    # torch passes bytes, too, although its own declaration says str.
    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it is not there yet, and return the value that it has afterwards. Both are
        one step for all ranks. `expected` must be "".
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
    """A store in a folder, with a file for each key. A file gets its name only once it is complete.

    Whoever can write into the folder can decide which ranks take part. So the constructor raises
    PermissionError if other users can.
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
        # The lock of a process that dies ends with the process.
        with open(self._folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = amount
            if self.check([key]):
                total += int(self.get(key))
            self.set(key, str(total))
        return total

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        # NFS may remember for a minute which names are not there. Opening the folder makes it ask
        # again.
        os.close(os.open(self._folder, os.O_RDONLY))
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        """The path of the file of a key. Its name is a hash of the key if the key is too long."""
        name = quote(key, safe="")
        if len(name) > _LONGEST_NAME:
            name = hashlib.sha256(key.encode()).hexdigest()
        return self._folder / name

    @contextmanager
    def _whole(self, value: str | bytes) -> Iterator[Path]:
        """Make a complete file of the value under another name, which is gone after this context.
        The caller renames or links the file.
        """
        path = self._folder / f".{secrets.token_hex(8)}"
        try:
            path.write_bytes(value.encode() if isinstance(value, str) else bytes(value))
            yield path
        finally:
            path.unlink(missing_ok=True)
