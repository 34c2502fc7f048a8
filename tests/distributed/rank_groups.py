"""Groups of some of the ranks, each of which is made once for all tests."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

_made: dict[tuple[tuple[int, ...], str | None], dist.ProcessGroup] = {}


def group_of(ranks: Iterable[int], backend: str | None = None) -> dist.ProcessGroup:
    """The group of these ranks. All ranks of the world call it, in one order.

    Tests use it again, as they do the group of all ranks. torch keeps every group to the end of
    the process, and a thread of gloo in each looks for messages 100 times a second: with a group
    for each test, these threads took a quarter of the time of all tests over 3 ranks.
    """
    key = (tuple(ranks), backend)
    if key not in _made:
        _made[key] = dist.new_group(list(key[0]), backend=backend)
    return _made[key]
