"""The buffers that experts that move need in the window of each rank: words, loads, the plan of
rank 0, and a staging area for weights.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from epmoe.config.config import EPConfig
from epmoe.exchange.memory import Parts, reserve

EMPTY = -1
"""In a table of slots: the slot holds no expert."""


class Word(IntEnum):
    """The words that each rank writes to all ranks. The number is a word's place in the writer's
    row of `moves.words`.

    The first six belong to `Moves`; docs/protocol.md says what they mean. The last three belong to
    `Balancer`.
    """

    PLAN = 0
    VERSION = 1
    READY = 2
    COPIED = 3
    PUSHED = 4
    CANCELLED = 5
    # The tick at which the writer has sent its last loads.
    COUNTED = 6
    # The number of the call of `replace` that carries out the last plan of rank 0.
    PLANNED = 7
    # `number << 32 | call`: the number of a call of `Balancer.finish`, and the call of `replace`
    # that carries out the last plan before it.
    LAST_PLAN = 8


@reserve
def _parts(config: EPConfig) -> Parts:
    """The shape and dtype of each of these buffers; none without `placement.live`."""
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
