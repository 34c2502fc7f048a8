"""`epmoe bench CONFIG`: rounds of the exchange, on the CPU against gloo, on GPUs against the floor and NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from epmoe.bench import exchange, nvlink, tune
from epmoe.cli.console import UserError, console
from epmoe.cli.launch import all_ranks
from epmoe.config import EPConfig
from epmoe.simulate import Kind


def bench(
    config: Annotated[Path, typer.Argument(help="Configuration file (YAML, TOML or JSON).")],
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Tokens a rank brings; may be repeated. [default: 1 16 128 1024; on GPUs 1 … 4096]"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each side.")] = 20,
    routing: Annotated[Kind, typer.Option(help="Simulated routing.")] = "uniform",
    side: Annotated[
        list[nvlink.Contender] | None, typer.Option(help="On GPUs: only this; may be repeated. [default: all]")
    ] = None,
    payload: Annotated[
        list[nvlink.Payload] | None, typer.Option(help="On GPUs: only this; may be repeated. [default: all]")
    ] = None,
    tuning: Annotated[
        Path | None,
        typer.Option("--tune", help="On GPUs: instead find the fastest launches; a file for exchange.tuning."),
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them into this .png, .svg or .pdf.")] = None,
) -> None:
    """Time dispatch and combine on all ranks, against gloo's all_to_all, on GPUs against the machine's floor and NCCL.

    Start it under torchrun.
    """
    parsed = EPConfig.load(config)
    on_gpus = parsed.exchange.transport == "nvlink"
    device: Any = nvlink if on_gpus else exchange
    limit = parsed.capacity.max_num_tokens_per_rank
    counts = tokens or [count for count in device.TOKENS if count <= limit]
    if max(counts) > limit:
        raise UserError(f"`--tokens` must be at most `capacity.max_num_tokens_per_rank` = {limit}, got {max(counts)}")
    if routing == "adversarial":
        raise UserError("`--routing` must not be adversarial: what comes back of it is not what came in")
    samples, choice = repeats * len(counts), dict[str, Any]()
    if tuning:
        if not on_gpus or side or payload or as_json or plot:
            raise UserError("`--tune` is for GPUs, and goes without `--side`, `--payload`, `--json` and `--plot`")
        device, as_json, samples = tune, tuning, tune.launches(counts)
    elif on_gpus:
        fitting = nvlink.default_payloads(parsed)
        if refused := set(payload or ()) - set(fitting):
            raise UserError(f"`--payload` {', '.join(refused)} wants `model.hidden_size` to be a multiple of 128")
        choice = {"contenders": side or list(nvlink.Contender), "payloads": payload or fitting}
        samples = len(counts) * len(choice["payloads"])
    elif side or payload:
        raise UserError("`--side` and `--payload` are for GPUs, which `exchange.transport: nvlink` asks for")
    with all_ranks(parsed) as rank, Progress(console=console, transient=True) as progress:
        task = progress.add_task("samples", total=samples)
        try:
            results = device.run(parsed, counts, repeats, routing, advance=lambda: progress.advance(task), **choice)
        except (ValueError, MemoryError) as error:
            raise UserError(str(error)) from None
    if rank != 0:
        return
    console.print(device.table(results, title=f"{config}: {parsed.topology.ep_size} ranks, {routing} routing"))
    if as_json:
        device.write_json(results, as_json)
    if plot:
        device.plot(results, plot)
