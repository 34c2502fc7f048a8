"""Words that the ranks of a server share: in memory of a file, which has a name in the folder of
versions until all ranks have mapped it.

The rank that makes it locks it, and the lock ends with its process. So a name whose file nobody has
locked is that of a process that was killed meanwhile, on whichever machine and in whichever
container.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PREFIX = ".words"


def shared_words(folder: Path, peers: Any, count: int, value: int) -> Tensor:
    """Make words int64 [count], `value` each, in memory of all ranks that no file names any more.
    Collective.

    Raises ValueError if a rank does not see the file of rank 0.
    """
    handle = -1
    path = ""
    here = False
    try:
        if peers.rank == 0:
            handle, path = _locked_file(folder)
            os.write(handle, value.to_bytes(8, "little", signed=True) * count)
        path = peers.all_gather(path)[0]
        words = torch.from_file(path, shared=True, size=count, dtype=torch.int64)
        here = bool(words.eq(value).all())  # on another machine `from_file` makes a file of zeros
        peers.all_gather(None)  # all have mapped it
    finally:
        # Also where a rank raises or has died meanwhile: nobody else knows of the file.
        if path and (peers.rank == 0 or not here):
            Path(path).unlink(missing_ok=True)
        if handle >= 0:
            os.close(handle)
    if not here:
        raise ValueError("all ranks of a server that receives weights must be on one machine")
    return words


def remove_orphans(folder: Path) -> None:
    """Remove the files of processes that were killed."""
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:  # its process, or another one that looks, has removed it
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # its process lives
            pass
        finally:
            os.close(handle)


def _locked_file(folder: Path) -> tuple[int, str]:
    """A new file, open and locked, and its path."""
    while True:
        handle, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # Before the lock another process may have taken it for an orphan.
        if os.fstat(handle).st_nlink:
            return handle, path
        os.close(handle)
