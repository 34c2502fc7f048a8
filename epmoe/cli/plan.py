"""`epmoe plan CONFIG`: every buffer's bytes, before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from epmoe.cli.console import console, human_bytes
from epmoe.config import EPConfig
from epmoe.memory import MemoryPlan
from epmoe.placement import Placement


def plan(
    config: Annotated[Path, typer.Argument(help="Configuration file (YAML, TOML or JSON).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what memory a configuration takes, buffer by buffer, per rank and per node."""
    parsed = EPConfig.load(config)
    plans = rank_plans(parsed)
    if as_json:
        typer.echo(json.dumps(_as_dict(parsed, plans), indent=2))
        return
    largest = max(plans, key=lambda p: p.total_bytes)
    rank = plans.index(largest)
    console.print(f"[bold]{config}[/]: memory of rank {rank}, shared by all MoE layers of a model")
    table = Table("buffer", "region", "shape", "dtype", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("bytes", justify="right")
    for buffer in largest.buffers:
        if buffer.nbytes:
            shape = " × ".join(map(str, buffer.shape))
            dtype = str(buffer.dtype).removeprefix("torch.")
            table.add_row(buffer.name, buffer.region, shape, dtype, f"{buffer.nbytes:,}")
    table.add_section()
    for name, count in _totals(parsed, plans).items():
        table.add_row(f"[bold]{name}", "", f"[bold]{human_bytes(count)}", "", f"[bold]{count:,}")
    console.print(table)
    console.print("[dim]Buffers start at aligned offsets, so a region is a little larger than their sum.[/]")


def rank_plans(config: EPConfig) -> list[MemoryPlan]:
    """The plan of every rank; they differ only where ranks own different numbers of experts."""
    placement = Placement.from_config(config)
    return [MemoryPlan.build(config, rank, placement) for rank in range(config.topology.ep_size)]


def _totals(config: EPConfig, plans: list[MemoryPlan]) -> dict[str, int]:
    node = plans[: config.topology.ranks_per_node or config.topology.ep_size]
    return {
        "window per rank": max(p.window_bytes for p in plans),
        "scratch per rank": max(p.scratch_bytes for p in plans),
        "total per rank": max(p.total_bytes for p in plans),
        "total per node": sum(p.total_bytes for p in node),
    }


def _as_dict(config: EPConfig, plans: list[MemoryPlan]) -> dict[str, object]:
    ranks = [
        {
            "rank": rank,
            "window_bytes": p.window_bytes,
            "scratch_bytes": p.scratch_bytes,
            "total_bytes": p.total_bytes,
            "buffers": [
                {
                    "name": b.name,
                    "region": b.region,
                    "shape": list(b.shape),
                    "dtype": str(b.dtype).removeprefix("torch."),
                    "offset": b.offset,
                    "nbytes": b.nbytes,
                }
                for b in p.buffers
            ],
        }
        for rank, p in enumerate(plans)
    ]
    return {"ranks": ranks, "node_bytes": _totals(config, plans)["total per node"]}
