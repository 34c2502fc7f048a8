"""Words that the ranks of a server share. They lie in memory of a file, which has a name in the
folder of versions until all ranks have mapped it.

The rank that makes the file locks it, and the lock ends with its process. So if nobody has locked a
file that still has a name, its process was killed before it could remove the name. This also holds
for processes of other containers, whose ids mean nothing here.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Names of these files begin so.
_PREFIX = ".words"


def shared_words(folder: Path, peers: Any, count: int, value: int) -> Tensor:
    """Make `count` words that all ranks share, int64 [count], each with the value `value`.
    Collective.

    When it returns, the file has no name any more, so the memory goes with its last rank. Raises
    ValueError if a rank does not see the file of rank 0, since it is on another machine.
    """
    handle = -1
    path = ""
    is_on_this_machine = False
    try:
        if peers.rank == 0:
            handle, path = _locked_file(folder)
            os.write(handle, value.to_bytes(8, "little", signed=True) * count)
        path = peers.all_gather(path)[0]
        words = torch.from_file(path, shared=True, size=count, dtype=torch.int64)
        # On another machine there is no such file, and `from_file` makes a new one of zeros.
        is_on_this_machine = bool(words.eq(value).all())
        # Wait until all ranks have mapped the file.
        peers.all_gather(None)
    finally:
        # Remove the name, also if a rank has raised or died: nobody else would do so. Rank 0 has
        # made the file; a rank on another machine has made one of its own.
        has_made_file = peers.rank == 0 or not is_on_this_machine
        if path and has_made_file:
            Path(path).unlink(missing_ok=True)
        if handle >= 0:
            os.close(handle)
    if not is_on_this_machine:
        raise ValueError("all ranks of a server that receives weights must be on one machine")
    return words


def remove_orphans(folder: Path) -> None:
    """Remove the files of killed processes: the files that no process has locked."""
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            # Its process, or another call of this function, has removed it meanwhile.
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            # Its process lives, and holds the lock.
            pass
        finally:
            os.close(handle)


def _locked_file(folder: Path) -> tuple[int, str]:
    """Make a file and lock it. Returns its open descriptor and its path."""
    while True:
        handle, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # Before this process had the lock, `remove_orphans` of another one may have removed the
        # file. Then it has no name any more: make another.
        has_name = os.fstat(handle).st_nlink > 0
        if has_name:
            return handle, path
        os.close(handle)
