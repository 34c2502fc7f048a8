"""What experts that move keep in the window of each rank: words, loads, the plan of rank 0, and a staging."""

from __future__ import annotations

from enum import IntEnum

import torch

from epmoe.config.config import EPConfig
from epmoe.exchange.memory import Parts, reserve

EMPTY = -1
"""In a table of slots: the slot holds no expert."""


class Word(IntEnum):
    """A word that each rank has in the window of each other rank, by its place in `moves.words`.

    The value of the first six is `call << 32 | value`, where `call` is the number of a call of `replace`.
    """

    PLAN = 0
    """a checksum of slots and sizes, or 0 where the writer takes no part in the call"""
    VERSION = 1
    READY = 2
    COPIED = 3
    PUSHED = 4
    CANCELLED = 5
    COUNTED = 6
    """the tick of a balancer at which the writer has sent its loads"""
    PLANNED = 7
    """the number of the call of `replace` that carries out the plan in this window"""
    LAST_PLAN = 8
    """`finish << 32 | call`: the last plan before a call of `Balancer.finish`"""


@reserve
def _parts(config: EPConfig) -> Parts:
    section, R, E = config.placement, config.topology.ep_size, config.model.num_experts
    if not section.live:
        return {}
    return {
        "moves.words": ((R, len(Word)), torch.int64),
        "moves.loads": ((R, section.layers, E), torch.float64),
        "moves.planned_loads": ((section.layers, E), torch.float64),
        "moves.planned_slots": ((section.layers, config.num_physical_experts), torch.int32),
        "moves.staging": ((section.staging_mb << 20,), torch.uint8),
    }
