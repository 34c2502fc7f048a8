"""Tables of slots that outlive their group, with `placement.live`: in a file, or on the ranks that
keep their experts.

A table has for each layer the expert in each slot, or −1.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.config_file import ConfigError, read_config
from epmoe.live.balance import check_slots
from epmoe.live.layout import EMPTY

Table = list[list[int]]
"""[layers][slots], of one rank or of all: the expert in each slot, or −1"""
_MOST_NAMED = 8  # experts in an error


def read_slots(config: EPConfig) -> Table:
    """The table of the file that `placement.slots` names. Raises ConfigError, which names the file
    and the mistake.
    """
    section = config.placement
    path = str(config.placement.slots)
    R = config.topology.ep_size
    want = (section.layers, config.num_physical_experts)
    found = read_config(path, holds="a list `slots:` of layers")
    try:
        if found.keys() != {"slots"}:
            raise ValueError(f"must hold `slots` and nothing else, got {', '.join(found)[:80]}")
        try:
            slots = torch.tensor(found["slots"])
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(
                f"`slots` must be lists of integers, {want[0]} layers of {want[1]} slots"
            ) from None
        if slots.shape != want:
            what = f"{want[0]} layers (`placement.layers`) of {want[1]} slots (those of {R} ranks)"
            raise ValueError(f"`slots` must be {what}, got {list(slots.shape)}")
        loads = torch.empty(section.layers, config.model.num_experts, device="meta")
        return check_slots(slots, loads, R, section.most_copies).tolist()
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def write_slots(path: str | os.PathLike[str], slots: Tensor) -> None:
    """Write a table [layers, P] for `placement.slots`, in one step: whoever reads meets the old
    file or the new one.
    """
    path = Path(path)
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
    S = config.placement.slots_per_rank or 0
    return [layer[rank * S : (rank + 1) * S] for layer in table]


def agree_on_slots(
    config: EPConfig,
    held: Sequence[Table | None],
    rank: int,
    first: Table | None,
    spread_lost: bool,
) -> Table | None:
    """The table of a group whose ranks bring experts, as `keep_slots` makes it; None where no rank
    brings any.

    `held` is what each rank says that it holds; `first` is what this rank has read from a file.
    Raises ValueError where ranks have read other files, and what `keep_slots` does.
    """
    if all(table is None for table in held):
        return None
    others = [
        r
        for r, table in enumerate(held)
        if first is not None and table != slots_of(first, r, config)
    ]
    if others:
        raise ValueError(
            f"the file of `placement.slots` on rank {rank} differs from that of rank(s) {others}: "
            "it must be the same"
        )
    return keep_slots(config, held, spread_lost)


def keep_slots(config: EPConfig, held: Sequence[Table | None], spread_lost: bool) -> Table:
    """The table of a group whose ranks keep their experts, in which every expert has a slot.

    A rank may have held fewer slots than in `config`, or None if it is new. `spread_lost` puts
    experts that no rank holds on the ranks with the fewest: in empty slots, or where there is none
    in place of a copy of the expert with the most. Without it they raise a ValueError, which names
    them.
    """
    E = config.model.num_experts
    S = config.placement.slots_per_rank or 0
    L = config.placement.layers
    none: Table = [[] for _ in range(L)]
    tables = [[layer + [EMPTY] * (S - len(layer)) for layer in table or none] for table in held]
    slots = [list(chain(*layers)) for layers in zip(*tables, strict=True)]
    lost = [sorted(set(range(E)).difference(layer)) for layer in slots]
    lacking = [layer for layer, experts in enumerate(lost) if experts]
    if lacking and not spread_lost:
        raise ValueError(
            f"logical expert(s) {lost[lacking[0]][:_MOST_NAMED]} of layer {lacking[0]} have no "
            f"copy left, and {len(lacking)} layer(s) lack experts: load their weights, as "
            "`resume(spread_lost=True)` says where, or load all again, and give `placement`"
        )
    for layer, experts in zip(slots, lost, strict=True):
        _fill(layer, experts, S)
    return slots


def _fill(layer: list[int], experts: list[int], S: int) -> None:
    """Put experts that have no slot into `layer`."""
    given = Counter[int]()  # by rank
    for expert in experts:
        copies = Counter(layer)
        held = [
            sum(other != EMPTY for other in layer[begin : begin + S])
            for begin in range(0, len(layer), S)
        ]
        costs = [
            (x != EMPTY, -copies[x], held[p // S], given[p // S], p) for p, x in enumerate(layer)
        ]
        slot = min(costs)[-1]
        layer[slot] = expert
        given[slot // S] += 1
