"""Tables of slots that outlive their group, with `placement.live`. A new group begins with a table
from a file, or with the experts that its ranks keep.

A table says for each slot of each layer which expert it holds, or −1. Letters of shapes: L layers,
R ranks, E experts of a layer, S slots of a rank for each layer, and P = R·S slots of a layer.
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
# An error names at most this many experts.
_MOST_NAMED = 8


def read_slots(config: EPConfig) -> Table:
    """Read the table of all ranks from the file that `placement.slots` names.

    Raises ConfigError, which names the file and the mistake.
    """
    path = str(config.placement.slots)
    content = read_config(path, holds="a list `slots:` of layers")
    try:
        return _table_of(content, config)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _table_of(content: dict[str, Any], config: EPConfig) -> Table:
    """Check the content of a file, and return its table.

    Raises ValueError unless it is a table that fits this configuration.
    """
    section = config.placement
    R = config.topology.ep_size
    L = section.layers
    P = config.num_physical_experts
    if content.keys() != {"slots"}:
        raise ValueError(f"must hold `slots` and nothing else, got {', '.join(content)[:80]}")
    try:
        slots = torch.tensor(content["slots"])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"`slots` must be lists of integers, {L} layers of {P} slots") from None
    if slots.shape != (L, P):
        wanted = f"{L} layers (`placement.layers`) of {P} slots (those of {R} ranks)"
        raise ValueError(f"`slots` must be {wanted}, got {list(slots.shape)}")
    # `check_slots` only looks at the shape of loads, so a meta tensor will do.
    loads = torch.empty(L, config.model.num_experts, device="meta")
    checked: Table = check_slots(slots, loads, R, section.most_copies).tolist()
    return checked


def write_slots(path: str | os.PathLike[str], slots: Tensor) -> None:
    """Write a table [L, P] to a file for `placement.slots`. Readers find the former file or the new
    one, never a part of it.
    """
    path = Path(path)
    # Write a draft, wait until it is on the disk, and rename it.
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
    """The part of a table of all ranks that has the slots of one rank."""
    S = config.placement.slots_per_rank or 0
    return [layer[rank * S : (rank + 1) * S] for layer in table]


def agree_on_slots(
    config: EPConfig,
    held: Sequence[Table | None],
    rank: int,
    first: Table | None,
    spread_lost: bool,
) -> Table | None:
    """Make the table of a group from the experts that its ranks bring. Returns None if no rank
    brings any: the group then begins with the usual slots.

    `held` has for each rank the experts in its slots, from its memory or from the file of
    `placement.slots`; None for a rank that brings nothing. `first` is the table that this rank has
    read from that file, or None. `keep_slots` says what `spread_lost` means. Raises ValueError if
    ranks have read different files, or for the reasons of `keep_slots`.
    """
    if all(table is None for table in held):
        return None
    if first is not None:
        _check_same_file(config, held, rank, first)
    return keep_slots(config, held, spread_lost)


def _check_same_file(
    config: EPConfig, held: Sequence[Table | None], rank: int, first: Table
) -> None:
    """Raise ValueError if another rank holds other experts than the file of this rank says, since
    then it has read another file. `first` is the table of this rank's file.
    """
    others = [other for other, table in enumerate(held) if table != slots_of(first, other, config)]
    if others:
        raise ValueError(
            f"the file of `placement.slots` on rank {rank} differs from that of rank(s) {others}: "
            "it must be the same"
        )


def keep_slots(config: EPConfig, held: Sequence[Table | None], spread_lost: bool) -> Table:
    """Make a table in which ranks keep their experts, and every expert has a slot.

    `held` has for each rank the experts in its slots, or None if the rank is new. A rank may have
    had fewer slots than `config` says. If no rank holds an expert, the expert is lost. With
    `spread_lost`, each lost expert gets a slot on a rank with few experts: an empty slot, or else
    one of the slots of the expert with the most copies. Without `spread_lost`, a ValueError names
    the lost experts.
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
    # Find the lost experts, by layer.
    lost = [sorted(set(range(E)).difference(layer)) for layer in slots]
    incomplete_layers = [layer for layer, experts in enumerate(lost) if experts]
    if incomplete_layers and not spread_lost:
        first = incomplete_layers[0]
        raise ValueError(
            f"logical expert(s) {lost[first][:_MOST_NAMED]} of layer {first} have no "
            f"copy left, and {len(incomplete_layers)} layer(s) lack experts: load their weights, "
            "as `resume(spread_lost=True)` says where, or load all again, and give `placement`"
        )
    for layer, experts in zip(slots, lost, strict=True):
        _fill(layer, experts, S)
    return slots


def lacking(wanted: Table, had: Table) -> tuple[Move, ...]:
    """The experts that slots of a rank are to hold, and that these slots do not hold yet. Each must
    be loaded, so it is a `Move` that comes from no rank.

    `wanted` and `had` are tables of one rank. A layer may have fewer slots in `had`.
    """
    moves = []
    # Tags of layers begin at 1.
    for tag, (experts, held) in enumerate(zip(wanted, had, strict=True), 1):
        for slot, expert in enumerate(experts):
            is_there = slot < len(held) and held[slot] == expert
            if expert != EMPTY and not is_there:
                moves.append(Move(local_index=slot, logical=expert, source=None, tag=tag))
    return tuple(moves)


def _fill(layer: list[int], experts: list[int], S: int) -> None:
    """Give each of these lost experts a slot of `layer`, the table of one layer, in place.

    `S` is the number of slots of a rank.
    """
    # By rank: how many lost experts the rank has got so far.
    num_received = Counter[int]()
    for expert in experts:
        num_copies = Counter(layer)
        num_held = Counter(slot // S for slot, held in enumerate(layer) if held != EMPTY)
        # Rate each slot. The best is empty, or holds an expert with many copies. Of equal ones,
        # take that of the rank with the fewest experts, then with the fewest lost experts so far.
        costs = []
        for slot, held in enumerate(layer):
            rank = slot // S
            is_full = held != EMPTY
            costs.append((is_full, -num_copies[held], num_held[rank], num_received[rank]))
        # If several slots are best, `index` finds the first one.
        best_slot = costs.index(min(costs))
        layer[best_slot] = expert
        num_received[best_slot // S] += 1
