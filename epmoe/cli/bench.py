"""`epmoe bench CONFIG`: times the exchange, on CPUs against gloo, on GPUs against the floor and NCCL; or layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from epmoe.bench import cpu, gpu, layer, peers, training, tune
from epmoe.bench.facts import facts
from epmoe.bench.report import STDOUT, Benchmark, Job
from epmoe.cli.console import UserError, check_output, console, launched_rank, log, print_table, require
from epmoe.cli.launch import CONFIG, NPROC, all_ranks, check_ranks, load, start_ranks
from epmoe.local.simulate import Kind


def bench(
    context: typer.Context,
    config: Annotated[Path, CONFIG],
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Tokens a rank brings; may be repeated. [default: 1 16 128 1024; on GPUs 1 … 4096]"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each side.")] = 20,
    routing: Annotated[Kind, typer.Option(help="Simulated routing.")] = "uniform",
    side: Annotated[
        list[gpu.Contender] | None, typer.Option(help="On GPUs: only this; may be repeated. [default: all]")
    ] = None,
    payload: Annotated[
        list[gpu.Payload] | None,
        typer.Option(
            help="On GPUs: only this; may be repeated. [default: all] With --training: one, plain or fp8-out."
        ),
    ] = None,
    whole_layer: Annotated[
        bool,
        typer.Option("--layer", help="Instead time route + dispatch + experts + combine beside the experts alone."),
    ] = False,
    passes: Annotated[
        bool, typer.Option("--training", help="Instead time forward and backward, of the exchange and of a layer.")
    ] = False,
    eager: Annotated[
        bool, typer.Option(help="On GPUs: dispatch and combine called one after the other, without CUDA graphs.")
    ] = False,
    drivers: Annotated[
        Path | None,
        typer.Option("--peers", help="On GPUs or with --layer: also these; a folder of drivers, or one."),
    ] = None,
    tuning: Annotated[
        Path | None,
        typer.Option("--tune", help="On GPUs: instead find the fastest launches; a file for exchange.tuning."),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file; `-` prints them alone.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them into this .png, .svg or .pdf.")] = None,
    nproc: Annotated[int | None, NPROC] = None,
) -> None:
    """Time dispatch and combine on all ranks, against gloo's all_to_all, on GPUs against the machine's floor and NCCL.

    It starts one process for each rank; under torchrun it is one of them.
    """
    parsed = load(config, nproc)
    check_output("--tune", tuning, (".json", ".yaml", ".yml"))  # JSON is YAML
    check_output("--json", as_json, (".json",))
    check_output("--plot", plot, (".png", ".svg", ".pdf"))
    on_gpus = parsed.exchange.transport == "nvlink"
    model, limit = parsed.model, parsed.capacity.max_num_tokens_per_rank
    usual = layer.TOKENS if (whole_layer or passes) and on_gpus else gpu.TOKENS if on_gpus else cpu.TOKENS
    counts = sorted(set(tokens or [count for count in usual if count <= limit]))
    if max(counts) > limit:
        raise UserError(f"`--tokens` must be at most `capacity.max_num_tokens_per_rank` = {limit}, got {max(counts)}")
    if parsed.placement.slots is not None:
        raise UserError("`placement.slots` must be unset: the benchmarks compute with the experts that come first")
    if routing == "adversarial":
        raise UserError("`--routing` must not be adversarial: its outputs are not the weighted sums that are checked")
    benchmark: Benchmark = cpu.run
    steps = repeats * len(counts)
    if eager and (not on_gpus or whole_layer or tuning):
        raise UserError("`--eager` is for GPUs, and goes without `--layer` and `--tune`")
    if drivers and (tuning or not (on_gpus or whole_layer)):
        raise UserError("`--peers` is for GPUs or for `--layer`, and goes without `--tune`")
    try:
        others = peers.load(drivers) if drivers else []
    except ValueError as error:
        raise UserError(f"`--peers`: {error}") from None
    if passes:
        if side or tuning or whole_layer or eager or drivers:
            raise UserError("`--training` goes without `--layer`, `--eager`, `--peers`, `--side` and `--tune`")
        if payload and (len(payload) > 1 or payload[0] not in gpu.default_payloads(parsed)[:2]):
            raise UserError(
                "`--training` takes one `--payload`: plain, or fp8-out where `model.hidden_size` is a multiple of 128"
            )
        forward: training.TrainingPayload = "fp8" if payload == [gpu.Payload.FP8_OUT] else "auto"
        benchmark, steps = partial(training.run, payload=forward), len(counts)
    elif tuning:
        if not on_gpus or side or payload or as_json or whole_layer:
            raise UserError("`--tune` is for GPUs, and goes without `--layer`, `--side`, `--payload` and `--json`")
        benchmark, steps = tune.run, tune.launches(counts)
    elif whole_layer:
        if side or payload:
            raise UserError("`--layer` goes without `--side` and `--payload`")
        try:
            layer.check(parsed)
        except ValueError as error:
            raise UserError(f"`--layer`: {error}") from None
        benchmark, steps = partial(layer.run, peers=others), len(counts) * len(layer.Precision)
    elif on_gpus:
        fitting = gpu.default_payloads(parsed)
        if refused := set(payload or ()) - set(fitting):
            raise UserError(f"`--payload` {', '.join(refused)} wants `model.hidden_size` to be a multiple of 128")
        payloads = payload or fitting
        contenders = side or list(gpu.Contender)
        benchmark = partial(gpu.run, contenders=contenders, payloads=payloads, peers=others, eager=eager)
        steps = len(counts) * len(payloads)
    elif side or payload:
        raise UserError("`--side` and `--payload` are for GPUs, which `exchange.transport: nvlink` asks for")
    if plot:
        require("matplotlib", "`--plot`")  # now, not after the run
    check_ranks(parsed)
    if launched_rank() is None:
        raise typer.Exit(start_ranks(parsed, context.meta["epmoe.arguments"]))
    with all_ranks(parsed) as rank, Progress(console=console, transient=True) as progress:
        task = progress.add_task("samples", total=steps)
        job = Job(parsed, counts, repeats, routing, advance=lambda: progress.advance(task), log=_log(rank))
        try:
            report = benchmark(job)
        except (ValueError, MemoryError) as error:
            raise UserError(str(error)) from None
    if rank != 0:
        return
    console.quiet = as_json == STDOUT
    title = f"{config.stem}: {parsed.topology.ep_size} ranks, {routing} routing"
    print_table(report.table(title))
    if 0 in counts:
        console.print("T = 0: no tokens, so nothing was checked")
    if tuning:
        report.write_json(tuning)  # what `exchange.tuning` names, without facts
    elif as_json:
        report.write_json(as_json, facts(report.benchmark, parsed, routing, repeats))
    if plot:
        experts = f"{model.num_experts} experts, top-{model.num_experts_per_tok}"
        report.plot(plot, f"{title}\nhidden size {model.hidden_size} {model.dtype}, {experts}")


def _log(rank: int) -> Callable[[str], None]:
    """What tells of each case where no progress bar is seen, so that a run that is cut off leaves its figures."""
    start, silent = time.monotonic(), rank != 0 or console.is_terminal
    return lambda line: None if silent else log(f"{time.monotonic() - start:6.1f} s  {line}")
