"""Tables of slots that outlive their group, with `placement.live`. They come from a file, or from
ranks that keep their experts.

A table has the expert in each slot of each layer, or −1.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.config_file import ConfigError, read_config
from epmoe.config.placement import Move
from epmoe.live.balance import check_slots
from epmoe.live.layout import EMPTY

Table = list[list[int]]
"""[layers][slots], of one rank or of all: the expert in each slot, or −1"""
# Experts that an error names.
_MOST_NAMED = 8


def read_slots(config: EPConfig) -> Table:
    """Read the table from the file that `placement.slots` names. Raises ConfigError, which names
    the file and the mistake.
    """
    path = str(config.placement.slots)
    found = read_config(path, holds="a list `slots:` of layers")
    try:
        return _table_of(found, config)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _table_of(found: dict[str, Any], config: EPConfig) -> Table:
    """Check the contents of a file. Raises ValueError unless they are a table of this
    configuration.
    """
    section = config.placement
    R = config.topology.ep_size
    L = section.layers
    P = config.num_physical_experts
    if found.keys() != {"slots"}:
        raise ValueError(f"must hold `slots` and nothing else, got {', '.join(found)[:80]}")
    try:
        slots = torch.tensor(found["slots"])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"`slots` must be lists of integers, {L} layers of {P} slots") from None
    if slots.shape != (L, P):
        wanted = f"{L} layers (`placement.layers`) of {P} slots (those of {R} ranks)"
        raise ValueError(f"`slots` must be {wanted}, got {list(slots.shape)}")
    # Only the shape of loads counts for the check.
    loads = torch.empty(L, config.model.num_experts, device="meta")
    checked: Table = check_slots(slots, loads, R, section.most_copies).tolist()
    return checked


def write_slots(path: str | os.PathLike[str], slots: Tensor) -> None:
    """Write a table [layers, P] for `placement.slots`. Readers find the old file or the new one,
    never a part.
    """
    path = Path(path)
    # Draft, bring to the disk, and rename.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with draft.open("x", encoding="utf-8") as file:
            json.dump({"slots": slots.tolist()}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def slots_of(table: Table, rank: int, config: EPConfig) -> Table:
    """The part of a table that one rank has."""
    S = config.placement.slots_per_rank or 0
    return [layer[rank * S : (rank + 1) * S] for layer in table]


def agree_on_slots(
    config: EPConfig,
    held: Sequence[Table | None],
    rank: int,
    first: Table | None,
    spread_lost: bool,
) -> Table | None:
    """Make the table of a group whose ranks bring experts, by `keep_slots`. Returns None if no rank
    brings any.

    `held` is what each rank says that it holds, and `first` the table that this rank has read from
    a file. Raises ValueError if ranks have read different files, and what `keep_slots` does.
    """
    # A new group begins with the file, or with the usual slots.
    if all(table is None for table in held):
        return None
    if first is not None:
        _check_same_file(config, held, rank, first)
    return keep_slots(config, held, spread_lost)


def _check_same_file(
    config: EPConfig, held: Sequence[Table | None], rank: int, first: Table
) -> None:
    """Raise ValueError if a rank holds something else than the file of this rank says."""
    others = [other for other, table in enumerate(held) if table != slots_of(first, other, config)]
    if others:
        raise ValueError(
            f"the file of `placement.slots` on rank {rank} differs from that of rank(s) {others}: "
            "it must be the same"
        )


def keep_slots(config: EPConfig, held: Sequence[Table | None], spread_lost: bool) -> Table:
    """Make a table in which ranks keep their experts, and every expert has a slot.

    A rank may have held fewer slots than in `config`, or None if it is new. With `spread_lost`,
    experts that no rank holds go to the ranks with the fewest experts: into empty slots, otherwise
    in place of a copy of the expert with the most. Without it, a ValueError names them.
    """
    E = config.model.num_experts
    S = config.placement.slots_per_rank or 0
    L = config.placement.layers
    nothing: Table = [[] for _ in range(L)]
    # Join the slots of all ranks. Slots that a rank did not have are empty.
    slots: Table = [[] for _ in range(L)]
    for table in held:
        for layer, experts in zip(slots, table or nothing, strict=True):
            layer += experts + [EMPTY] * (S - len(experts))
    lost = [sorted(set(range(E)).difference(layer)) for layer in slots]
    lacking = [layer for layer, experts in enumerate(lost) if experts]
    if lacking and not spread_lost:
        first = lacking[0]
        raise ValueError(
            f"logical expert(s) {lost[first][:_MOST_NAMED]} of layer {first} have no "
            f"copy left, and {len(lacking)} layer(s) lack experts: load their weights, as "
            "`resume(spread_lost=True)` says where, or load all again, and give `placement`"
        )
    for layer, experts in zip(slots, lost, strict=True):
        _fill(layer, experts, S)
    return slots


def lacking(wanted: Table, had: Table) -> tuple[Move, ...]:
    """The experts that slots are to hold, and that they do not hold yet. Tables are by layer, whose
    tags begin at 1; a layer may have had fewer slots.
    """
    moves = []
    for tag, (experts, held) in enumerate(zip(wanted, had, strict=True), 1):
        for slot, expert in enumerate(experts):
            is_there = slot < len(held) and held[slot] == expert
            if expert != EMPTY and not is_there:
                moves.append(Move(slot, expert, None, tag))
    return tuple(moves)


def _fill(layer: list[int], experts: list[int], S: int) -> None:
    """Give each of these experts, which have no slot, one in `layer`."""
    # The number of experts that each rank has got here.
    given = Counter[int]()
    for expert in experts:
        copies = Counter(layer)
        held = Counter(slot // S for slot, other in enumerate(layer) if other != EMPTY)
        # An empty slot first, then that of the expert with most copies, then the idlest rank.
        costs = []
        for slot, other in enumerate(layer):
            rank = slot // S
            costs.append((other != EMPTY, -copies[other], held[rank], given[rank], slot))
        *_, slot = min(costs)
        layer[slot] = expert
        given[slot // S] += 1
