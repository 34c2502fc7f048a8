"""What experts that move keep in the window of each rank: words, loads, the plan of rank 0, and a
staging.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from epmoe.config.config import EPConfig
from epmoe.exchange.memory import Parts, reserve

EMPTY = -1
"""In a table of slots: the slot holds no expert."""


class Word(IntEnum):
    """The words that each rank writes to each other rank, by their places in `moves.words`.

    docs/protocol.md says what the first six mean, which belong to `Moves`. The last three belong to
    `Balancer`.
    """

    PLAN = 0
    VERSION = 1
    READY = 2
    COPIED = 3
    PUSHED = 4
    CANCELLED = 5
    COUNTED = 6  # the tick at which the writer has sent its loads
    PLANNED = 7  # the call of `replace` that carries out the plan of rank 0
    LAST_PLAN = 8  # `finish << 32 | call`: the last plan before a call of `finish`


@reserve
def _parts(config: EPConfig) -> Parts:
    section = config.placement
    R = config.topology.ep_size
    E = config.model.num_experts
    if not section.live:
        return {}
    return {
        "moves.words": ((R, len(Word)), torch.int64),
        "moves.loads": ((R, section.layers, E), torch.float64),
        "moves.planned_loads": ((section.layers, E), torch.float64),
        "moves.planned_slots": ((section.layers, config.num_physical_experts), torch.int32),
        "moves.staging": ((section.staging_mb << 20,), torch.uint8),
    }
