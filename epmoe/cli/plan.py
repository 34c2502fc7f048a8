"""`epmoe plan CONFIG`: every buffer's bytes before anything is allocated, and on GPUs the launch of
each kernel.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from epmoe.bench.report import write_json
from epmoe.cli import parallelism
from epmoe.cli.capacity import Capacity, advice, experts, network, rank_plans, suggestions
from epmoe.cli.console import UserError, check_output, console, human_bytes, print_whole
from epmoe.cli.launch import CONFIG, NPROC, load
from epmoe.config.config import EPConfig
from epmoe.exchange.memory import MemoryPlan
from epmoe.native.arguments import dtype_name
from epmoe.native.build import BuildError

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
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Instead what a layer takes with expert and tensor parallel, and replicas.",
        ),
    ] = False,
    gpu: Annotated[
        parallelism.GpuName, typer.Option(help="With --compare: whose constants.")
    ] = "h200",
    imbalance: Annotated[
        float,
        typer.Option(
            "--load", min=1.0, help="With --compare: rows of EP's busiest rank over the mean."
        ),
    ] = 1.0,
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
    if compare:
        if as_json:
            write_json(as_json, parallelism.as_dict(parsed, gpu, imbalance))
            return
        for paragraph in parallelism.paragraphs(parsed, gpu, imbalance):
            print_whole(paragraph)
        return
    plans = rank_plans(parsed)
    on_gpus = parsed.exchange.transport == "nvlink"
    if as_json:
        content = _as_dict(parsed, plans)
        if on_gpus:
            content["launches"] = _launches(parsed, plans[0], multiprocessors)
        write_json(as_json, content)
        return
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
    if on_gpus:
        try:
            print_whole(
                _launch_table(_launches(parsed, plans[0], multiprocessors), multiprocessors)
            )
        except (BuildError, OSError) as error:
            console.print(
                "[dim]The launches are not shown, since the native library cannot be loaded: "
                f"{error}[/]"
            )


def _memory_table(plan: MemoryPlan, totals: dict[str, int]) -> Table:
    """The buffers by region, and the totals; 80 columns hold it."""
    table = Table("", "shape", "dtype", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("bytes", justify="right", no_wrap=True)
    table.columns[0].no_wrap = True
    regions = {"window": "window, which every rank maps", "scratch": "scratch, of the rank alone"}
    if plan.rail_bytes:
        regions |= {
            "window": "window, which every rank of the node maps",
            "rail": "rail, to the other nodes",
        }
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
    """The launches of dispatch and combine by T, up to M, for both phases in one call and
    expert-major rows.
    """
    # Needs the native library, unlike the memory plan.
    from epmoe.exchange.launch_policy import (
        launches,
    )

    most = config.capacity.max_num_tokens_per_rank
    rows: list[dict[str, Any]] = []
    for T in (*(tokens for tokens in TOKENS if tokens < most), most):
        dispatch, combine = launches(
            plan, T, config.model.torch_dtype, multiprocessors=multiprocessors
        )
        ways = {"dispatch": dispatch, "combine": combine}
        rows.append(
            {"tokens": T} | {way: vars(of) | {"protocol": of.protocol} for way, of in ways.items()}
        )
    return rows


def _launch_table(rows: list[dict[str, Any]], multiprocessors: int) -> Table:
    table = Table(
        title=f"launches by T on {multiprocessors} multiprocessors",
        caption=(
            "LL s/r: lines of 16 bytes that a sending / receiving lane moves at once. blocks × "
            "threads"
        ),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("T", "dispatch", "blocks", "send + notify", "combine", "blocks", "send"):
        table.add_column(
            column, justify="left" if column in ("dispatch", "combine") else "right", no_wrap=True
        )
    for row in rows:
        cells = [f"{row['tokens']}"]
        for launch in (row["dispatch"], row["combine"]):
            lines = (
                f" {launch['send_lines']}/{launch['recv_lines']}"
                if launch["protocol"] == "LL"
                else ""
            )
            notify = f" + {launch['notify_blocks']}" if launch is row["dispatch"] else ""
            cells += [launch["protocol"] + lines, f"{launch['blocks']} × {launch['threads']}"]
            cells.append(f"{launch['send_blocks']}{notify}")
        table.add_row(*cells)
    return table


def _totals(config: EPConfig, plans: list[MemoryPlan]) -> dict[str, int]:
    node = plans[: config.topology.ranks_here]
    return {
        "window per rank": max(p.window_bytes for p in plans),
        "scratch per rank": max(p.scratch_bytes for p in plans),
        **({"rail per rank": plans[0].rail_bytes} if plans[0].rail_bytes else {}),
        "total per rank": max(p.total_bytes for p in plans),
        "total per node": sum(p.total_bytes for p in node),
    }


def _as_dict(config: EPConfig, plans: list[MemoryPlan]) -> dict[str, Any]:
    ranks = []
    for rank, plan in enumerate(plans):
        sizes = {
            f"{part}_bytes": getattr(plan, f"{part}_bytes")
            for part in ("window", "scratch", "rail", "total")
        }
        buffers = [
            dataclasses.asdict(one) | {"dtype": dtype_name(one.dtype), "nbytes": one.nbytes}
            for one in plan.buffers
        ]
        ranks.append({"rank": rank, **sizes, "buffers": buffers})
    capacity = Capacity.of(config)
    found = [dataclasses.asdict(one) for one in suggestions(config)]
    return {
        "ranks": ranks,
        "node_bytes": _totals(config, plans)["total per node"],
        "expert_rows": {"worst": capacity.worst, "mean": capacity.mean, "suggestions": found},
    }
