"""`epmoe plan CONFIG`: every buffer's bytes before anything is allocated, and on GPUs the launch of each kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from epmoe.build import BuildError
from epmoe.cli.console import console, human_bytes
from epmoe.config import EPConfig
from epmoe.memory import MemoryPlan
from epmoe.placement import Placement

TOKENS = (1, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096)


def plan(
    config: Annotated[Path, typer.Argument(help="Configuration file (YAML, TOML or JSON).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    multiprocessors: Annotated[int, typer.Option(min=1, help="Of the GPU; an H200 has 132.")] = 132,
) -> None:
    """Show what memory a configuration takes, per rank and per node, and on GPUs how its kernels are launched."""
    parsed = EPConfig.load(config)
    plans = rank_plans(parsed)
    if as_json:
        content = _as_dict(parsed, plans)
        if parsed.exchange.transport == "nvlink":
            content["launches"] = _launches(parsed, plans[0], multiprocessors)
        typer.echo(json.dumps(content, indent=2))
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
    if parsed.exchange.transport == "nvlink":
        try:
            console.print(_launch_table(_launches(parsed, plans[0], multiprocessors), multiprocessors))
        except (BuildError, OSError) as error:
            console.print(f"[dim]The launches are not shown, since the native library cannot be loaded: {error}[/]")


def rank_plans(config: EPConfig) -> list[MemoryPlan]:
    """The plan of every rank; plans differ only where ranks own different numbers of experts."""
    placement = Placement.from_config(config)
    return [MemoryPlan.build(config, rank, placement) for rank in range(config.topology.ep_size)]


def _launches(config: EPConfig, plan: MemoryPlan, multiprocessors: int) -> list[dict[str, Any]]:
    """By T, up to M: the launch of dispatch and that of combine, from both phases in one call and expert-major rows."""
    from epmoe.launch_policy import launches  # needs the native library, unlike the memory plan

    dtype, largest = config.model.torch_dtype, config.capacity.max_num_tokens_per_rank
    rows = []
    for T in sorted({*(tokens for tokens in TOKENS if tokens < largest), largest}):
        dispatch, combine = launches(plan, T, dtype, multiprocessors=multiprocessors)
        rows.append(
            {
                "tokens": T,
                "dispatch": dispatch._asdict() | {"protocol": dispatch.protocol, "send_lines": dispatch.send_lines},
                "combine": combine._asdict() | {"protocol": combine.protocol, "recv_lines": combine.recv_lines},
            }
        )
    return rows


def _launch_table(rows: list[dict[str, Any]], multiprocessors: int) -> Table:
    table = Table(
        title=f"launches by T on {multiprocessors} multiprocessors",
        caption="LL s/r: lines of 16 bytes that a sending / receiving lane moves at once. blocks × threads",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("T", "dispatch", "blocks", "send + notify", "combine", "blocks", "send"):
        table.add_column(column, justify="left" if column in ("dispatch", "combine") else "right", no_wrap=True)
    for row in rows:
        out, back = row["dispatch"], row["combine"]
        table.add_row(
            f"{row['tokens']}",
            *_shown(out),
            f"{out['send_blocks']} + {out['notify_blocks']}",
            *_shown(back),
            f"{back['send_blocks']}",
        )
    return table


def _shown(launch: dict[str, Any]) -> tuple[str, str]:
    lines = f" {launch['send_lines']}/{launch['recv_lines']}" if launch["protocol"] == "LL" else ""
    return launch["protocol"] + lines, f"{launch['blocks']} × {launch['threads']}"


def _totals(config: EPConfig, plans: list[MemoryPlan]) -> dict[str, int]:
    node = plans[: config.topology.ranks_per_node or config.topology.ep_size]
    return {
        "window per rank": max(p.window_bytes for p in plans),
        "scratch per rank": max(p.scratch_bytes for p in plans),
        "total per rank": max(p.total_bytes for p in plans),
        "total per node": sum(p.total_bytes for p in node),
    }


def _as_dict(config: EPConfig, plans: list[MemoryPlan]) -> dict[str, Any]:
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
