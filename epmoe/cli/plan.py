"""`epmoe plan CONFIG`: shows how many bytes each buffer takes, before anything is allocated, and on
GPUs how each kernel is launched.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from epmoe.bench.report import write_json
from epmoe.cli.capacity import Capacity, advice, experts, network, rank_plans, suggestions
from epmoe.cli.console import UserError, check_output, console, human_bytes, print_whole
from epmoe.cli.launch import CONFIG, NPROC, load
from epmoe.config.config import EPConfig
from epmoe.exchange.memory import MemoryPlan
from epmoe.native.arguments import dtype_name
from epmoe.native.build import BuildError

# The numbers of tokens of a rank for which launches are shown.
TOKENS = (1, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096)


def plan(
    config: Annotated[Path, CONFIG],
    as_json: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write JSON to this file instead of printing tables; `-` prints it."
        ),
    ] = None,
    multiprocessors: Annotated[int, typer.Option(min=1, help="Of the GPU; an H200 has 132.")] = 132,
    nproc: Annotated[int | None, NPROC] = None,
) -> None:
    """Show what memory a configuration takes, per rank and per node, and on GPUs how its kernels
    are launched.

    With --nproc, CONFIG may also be the folder of a Hugging Face checkpoint, of which config.json
    is read.
    """
    if nproc is None and (config / "config.json").is_file():
        raise UserError(
            f"{config} is a checkpoint, which does not say on how many ranks it runs: give "
            "`--nproc`"
        )
    parsed = load(config, nproc)
    check_output("--json", as_json, (".json",))
    plans = rank_plans(parsed)
    on_gpus = parsed.exchange.transport == "nvlink"
    if as_json:
        content = _as_dict(parsed, plans)
        if on_gpus:
            content["launches"] = _launches(parsed, plans[0], multiprocessors)
        write_json(as_json, content)
        return
    # Show the memory of the rank that needs most, and advice on it.
    largest = max(plans, key=lambda p: p.total_bytes)
    title = (
        f"[bold]{config.stem}[/]: memory of rank {plans.index(largest)}, shared by all MoE layers "
        "of a model"
    )
    console.print(title, soft_wrap=True)
    print_whole(_memory_table(largest, _totals(parsed, plans)))
    console.print(
        "[dim]Buffers start at aligned offsets, so a region is a little larger than their sum.[/]"
    )
    for paragraph in (*network(parsed), *advice(parsed), *experts(parsed)):
        console.print()
        print_whole(paragraph)
    # Show the launches. Only they need the native library, so the plan is shown without it, too.
    if on_gpus:
        try:
            rows = _launches(parsed, plans[0], multiprocessors)
            print_whole(_launch_table(rows, multiprocessors))
        except (BuildError, OSError) as error:
            console.print(
                "[dim]The launches are not shown, since the native library cannot be loaded: "
                f"{error}[/]"
            )


def _memory_table(plan: MemoryPlan, totals: dict[str, int]) -> Table:
    """Make a table of the buffers of each region, and of the totals. It fits into 80 columns."""
    table = Table("", "shape", "dtype", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("bytes", justify="right", no_wrap=True)
    table.columns[0].no_wrap = True
    # With several nodes there is one more region, the rail.
    regions = {"window": "window, which every rank maps", "scratch": "scratch, of the rank alone"}
    if plan.rail_bytes:
        regions |= {
            "window": "window, which every rank of the node maps",
            "rail": "rail, to the other nodes",
        }
    # Add the buffers of each region, then the totals.
    for region, title in regions.items():
        table.add_row(f"[bold]{title}")
        for buffer in plan.buffers:
            if buffer.nbytes and buffer.region == region:
                shape = " × ".join(map(str, buffer.shape))
                table.add_row(
                    f"  {buffer.name}", shape, dtype_name(buffer.dtype), f"{buffer.nbytes:,}"
                )
        table.add_section()
    for name, count in totals.items():
        table.add_row(f"[bold]{name}", f"[bold]{human_bytes(count)}", "", f"[bold]{count:,}")
    return table


def _launches(config: EPConfig, plan: MemoryPlan, multiprocessors: int) -> list[dict[str, Any]]:
    """List the launches of dispatch and combine for each of `TOKENS` that a rank may bring, and for
    the most tokens. They are those of calls that do both phases, with expert-major rows.
    """
    # Import this here, because it loads the native library, which a memory plan does not need.
    from epmoe.exchange.launch_policy import launches

    max_tokens = config.capacity.max_num_tokens_per_rank
    counts = [tokens for tokens in TOKENS if tokens < max_tokens]
    counts.append(max_tokens)
    rows: list[dict[str, Any]] = []
    for T in counts:
        dispatch, combine = launches(
            plan, T, config.model.torch_dtype, multiprocessors=multiprocessors
        )
        rows.append(
            {
                "tokens": T,
                "dispatch": vars(dispatch) | {"protocol": dispatch.protocol},
                "combine": vars(combine) | {"protocol": combine.protocol},
            }
        )
    return rows


def _launch_table(rows: list[dict[str, Any]], multiprocessors: int) -> Table:
    """Make a table of launches, with a line for each number of tokens."""
    table = Table(
        title=f"launches by T on {multiprocessors} multiprocessors",
        caption=(
            "LL s/r: lines of 16 bytes that a sending / receiving lane moves at once. blocks × "
            "threads"
        ),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    # Dispatch and combine have the same three columns. Only dispatch has blocks that notify.
    for column in ("T", "dispatch", "blocks", "send + notify", "combine", "blocks", "send"):
        is_word = column in ("dispatch", "combine")
        table.add_column(column, justify="left" if is_word else "right", no_wrap=True)
    for row in rows:
        cells = [f"{row['tokens']}"]
        for launch in (row["dispatch"], row["combine"]):
            protocol = launch["protocol"]
            if protocol == "LL":
                protocol += f" {launch['send_lines']}/{launch['recv_lines']}"
            senders = f"{launch['send_blocks']}"
            if launch is row["dispatch"]:
                senders += f" + {launch['notify_blocks']}"
            cells += [protocol, f"{launch['blocks']} × {launch['threads']}", senders]
        table.add_row(*cells)
    return table


def _totals(config: EPConfig, plans: list[MemoryPlan]) -> dict[str, int]:
    """Add up the bytes of each region for the rank that needs most of it, and of all regions for a
    rank and for a node.
    """
    node = plans[: config.topology.ranks_here]
    totals = {
        "window per rank": max(p.window_bytes for p in plans),
        "scratch per rank": max(p.scratch_bytes for p in plans),
    }
    # Only configurations of several nodes have a rail.
    if plans[0].rail_bytes:
        totals["rail per rank"] = plans[0].rail_bytes
    totals["total per rank"] = max(p.total_bytes for p in plans)
    # Ranks without experts need less memory.
    if len(set(plans[0].windows)) > 1:
        totals["total without experts"] = min(p.total_bytes for p in plans)
    totals["total per node"] = sum(p.total_bytes for p in node)
    return totals


def _as_dict(config: EPConfig, plans: list[MemoryPlan]) -> dict[str, Any]:
    """Make the content of the JSON file: the memory plan of each rank, and suggestions."""
    ranks = []
    for rank, plan in enumerate(plans):
        sizes = {
            "window_bytes": plan.window_bytes,
            "scratch_bytes": plan.scratch_bytes,
            "rail_bytes": plan.rail_bytes,
            "total_bytes": plan.total_bytes,
        }
        buffers = []
        for buffer in plan.buffers:
            derived = {"dtype": dtype_name(buffer.dtype), "nbytes": buffer.nbytes}
            buffers.append(dataclasses.asdict(buffer) | derived)
        ranks.append({"rank": rank, **sizes, "buffers": buffers})
    # Add what is known about `capacity.max_expert_rows`.
    capacity = Capacity.of(config)
    suggested = [dataclasses.asdict(suggestion) for suggestion in suggestions(config)]
    return {
        "ranks": ranks,
        "node_bytes": _totals(config, plans)["total per node"],
        "expert_rows": {"worst": capacity.worst, "mean": capacity.mean, "suggestions": suggested},
    }
