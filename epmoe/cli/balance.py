"""`epmoe balance CONFIG --loads FILE`: shows how many experts would move in each layer, and how
evenly the ranks are loaded before and after.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from epmoe.bench.report import write_json
from epmoe.cli.console import (
    UserError,
    check_output,
    console,
    human_bytes,
    plain_table,
    print_table,
)
from epmoe.cli.launch import CONFIG, load
from epmoe.config.config import EPConfig
from epmoe.live.balance import GOAL, MAX_MOVES
from epmoe.live.balance import balance as plan_of
from epmoe.live.layout import EMPTY
from epmoe.live.slots import read_slots

_SUFFIXES = (".json", ".pt", ".npy")


def balance(
    config: Annotated[Path, CONFIG],
    loads: Annotated[
        Path,
        typer.Option(
            help="Load of each expert, \\[layers, E] or \\[E]: a JSON list, a tensor (.pt) or .npy."
        ),
    ],
    goal: Annotated[
        float, typer.Option(min=1, help="Load of the busiest rank over the mean that is enough.")
    ] = GOAL,
    max_moves: Annotated[int, typer.Option(min=0, help="Most moves of a layer.")] = MAX_MOVES,
    out: Annotated[
        Path | None, typer.Option(help="Write the experts in all slots to this JSON file.")
    ] = None,
) -> None:
    """Plan the moves of experts that give all ranks as much load, from the placement of a
    configuration.
    """
    parsed = load(config)
    check_output("--out", out, (".json",))
    loads_LE = _read(loads, parsed.model.num_experts)
    section = parsed.placement
    R = parsed.topology.ep_size
    most_copies = section.most_copies if section.live else None
    try:
        slots_LP = _slots(parsed, len(loads_LE))
        plan = plan_of(
            loads_LE, slots_LP, ep_size=R, goal=goal, max_moves=max_moves, most_copies=most_copies
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    # Print a line for each layer, then the cost of the moves.
    num_moves = Counter(move.layer for move in plan.moves)
    balances = zip(plan.balance_before, plan.balance_after, strict=True)
    table = plain_table(("layer", "before", "after", "moves"))
    for layer, (before, after) in enumerate(balances):
        table.add_row(f"{layer}", f"{before:.3f}", f"{after:.3f}", f"{num_moves[layer]}")
    print_table(table)
    console.print(
        f"\n{len(plan.moves)} moves{_volume(parsed, len(plan.moves))}; before and after are max / "
        "mean"
    )
    if slots_LP.shape[1] == parsed.model.num_experts:
        key = "slots_per_rank" if section.live else "num_redundant_experts"
        console.print(
            "No slot is free, on any rank: each holds the only copy of its expert, and nothing can "
            f"move. `placement.{key}` gives more slots."
        )
    if out is not None:
        write_json(out, {"slots": plan.slots.tolist()})


def _read(path: Path, num_experts: int) -> Tensor:
    """Read the loads of E experts in L layers, [L, E], from a file. Raises UserError."""
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise UserError(
            f"`--loads` must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}, got {path}"
        )
    try:
        # Each format has a reader of its own.
        if suffix == ".json":
            values = json.loads(path.read_text(encoding="utf-8"))
        elif suffix == ".pt":
            values = torch.load(path, map_location="cpu", weights_only=True)
        else:
            import numpy

            values = numpy.load(path, allow_pickle=False)
        loads = torch.as_tensor(values, dtype=torch.float64)
    except OSError as error:
        raise UserError(f"`--loads` cannot be read: {path}: {error.strerror}") from None
    except Exception as error:  # each reader raises errors of its own
        raise UserError(
            f"`--loads` must be numbers [layers, {num_experts}]: {path}: {error}"
        ) from None
    # There must be a row for each layer. A single layer may come without the first dimension.
    if loads.dim() not in (1, 2) or not loads.numel() or loads.shape[-1] != num_experts:
        raise UserError(
            f"`--loads` must be numbers [layers, {num_experts}], got {list(loads.shape)} in {path}"
        )
    return loads.reshape(-1, num_experts)


def _slots(config: EPConfig, layers: int) -> Tensor:
    """List the expert in each slot of all ranks: [layers, P], as the configuration places them.
    Ranks with fewer experts than others have empty slots.
    """
    if config.placement.slots is not None:
        return torch.tensor(read_slots(config), dtype=torch.int32)
    placement = config.place_experts()
    experts_by_rank = [placement.logical_experts(rank) for rank in range(config.topology.ep_size)]
    slots_per_rank = max(map(len, experts_by_rank))
    slots = []
    for experts in experts_by_rank:
        slots.append(experts + [EMPTY] * (slots_per_rank - len(experts)))
    return torch.tensor(slots, dtype=torch.int32).flatten().expand(layers, -1)


def _volume(config: EPConfig, moves: int) -> str:
    """Say how many bytes one move carries, and all moves together, as the end of a sentence."""
    model = config.model
    if model.intermediate_size is None:
        return " (`model.intermediate_size` would tell their bytes)"
    expert = 3 * model.hidden_size * model.intermediate_size * model.torch_dtype.itemsize
    return f" of {human_bytes(expert)}, {human_bytes(moves * expert)} in all"
