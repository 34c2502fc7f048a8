"""`epmoe run CONFIG`: runs the layer or a real model over all ranks, and reports the outcome."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.progress import Progress

from epmoe.cli import simulated
from epmoe.cli.console import UserError, check_output, console, launched_rank, quiet_exit, require
from epmoe.cli.demo import models
from epmoe.cli.launch import CONFIG, NPROC, all_ranks, check_ranks, load, start_ranks
from epmoe.cli.result import Balancing, Check, Result, sum_counters
from epmoe.cli.tables import show
from epmoe.config.config import EPConfig
from epmoe.exchange.health import Health
from epmoe.exchange.peers import Peers
from epmoe.local.simulate import Kind
from epmoe.service import ExpertParallel


def run(
    context: typer.Context,
    config: Annotated[Path, CONFIG],
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Generate text with this model, one of {', '.join(models.NAMES)} (tiny, random weights), or with the "
            "checkpoint in this folder; may be repeated.",
            autocompletion=lambda: list(models.NAMES),
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Rounds, or tokens to generate with --model.")] = 16,
    tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens a rank brings to a round, without --model. [default: at most 64]")
    ] = None,
    routing: Annotated[
        Kind | None, typer.Option(help="Simulated routing, without --model. [default: uniform]", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, tokens and simulated routing.")] = 0,
    balance: Annotated[
        bool, typer.Option("--balance", help="Move experts while it runs, as the load drifts, without --model.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report to this file.")] = None,
    nproc: Annotated[int | None, NPROC] = None,
) -> None:
    """Run the layer, or real models with --model, over all ranks, and check the outcome.

    It starts one process for each rank; under torchrun it is one of them.
    """
    started = datetime.now().astimezone()
    parsed = load(config, nproc)
    check_output("--report", report, (".html", ".htm"))
    if report is not None:
        require("jinja2", "`--report`")  # now, not after the run
    if tokens is not None and tokens > parsed.capacity.max_num_tokens_per_rank:
        limit = parsed.capacity.max_num_tokens_per_rank
        raise UserError(f"`--tokens` must be at most `capacity.max_num_tokens_per_rank` = {limit}, got {tokens}")
    for option, value in (
        ("--tokens", tokens),
        ("--routing", routing),
        ("--balance", balance or None),
    ):
        if model and value is not None:
            raise UserError(f"`{option}` is for the rounds of the layer, and `--model` runs models: leave one out")
    check_ranks(parsed)
    if balance:
        parsed = simulated.live(parsed)
    if model:
        models.check_models(parsed, model)
    else:
        simulated.require_memory(parsed)
    if launched_rank() is None:
        raise typer.Exit(start_ranks(parsed, context.meta["epmoe.arguments"]))
    with all_ranks(parsed) as rank:
        if model:
            results = models.run_models(parsed, model, steps, seed)
        else:
            results = [_run_layer(parsed, config.stem, routing or "uniform", steps, tokens, seed, balance)]
    if rank == 0 and report is not None:
        from epmoe.cli.about import About
        from epmoe.cli.report import write_report

        write_report(results, report, About.of_this_process(config, started))
        console.print(f"\nreport: {report.resolve()}")
    # Rank 0 alone reports a failed check: the exit of another rank would end rank 0, which may still be writing.
    if rank == 0 and not all(result.passed for result in results):
        raise quiet_exit()


def _run_layer(
    config: EPConfig, name: str, kind: Kind, steps: int, tokens: int | None, seed: int, balance: bool
) -> Result:
    """Rounds of the configuration's own layer. The Result is the same on every rank; rank 0 prints it."""
    model = config.model
    tokens = min(64, config.capacity.max_num_tokens_per_rank) if tokens is None else tokens
    console.rule(f"[bold]{name}[/]: {steps} rounds of {tokens} tokens a rank, {kind} routing")
    with _open(config) as ep:
        simulated.synchronise(ep)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("rounds", total=steps)
            mine = simulated.run_layer(ep, kind, steps, tokens, seed, lambda: progress.advance(task), balance)
        health, placement = ep.health(), ep.placement
    of_ranks: list[Any] = Peers.of(dist.group.WORLD).all_gather((asdict(mine), health.as_dict()))
    gathered = [(simulated.Measured(**measured), Health(**counts)) for measured, counts in of_ranks]
    load = [0] * placement.num_physical_experts
    for rank, (_, counts) in enumerate(gathered):
        for expert, count in zip(placement.local_experts(rank), counts.tokens_per_expert, strict=True):
            load[expert] = count
    limit, worst = simulated.tolerance(config), max(m.worst_error for m, _ in gathered)
    check = Check(f"error against the dense fp64 reference ≤ {limit:.0e}", f"{worst:.1e}", worst <= limit)
    result = Result(
        name=name,
        config=config,
        facts={
            "experts": f"{model.num_experts}, {model.num_experts_per_tok} per token",
            "hidden size": f"{model.hidden_size} {model.dtype}",
            "rounds": f"{steps} of {tokens} tokens a rank",
            "routing": kind,
        },
        checks=[check] if tokens else [],
        placement=placement,
        traffic=[counts.rows_sent for _, counts in gathered],
        load=load,
        dropped=[counts.dropped_pairs for _, counts in gathered],
        stages=[m.seconds for m, _ in gathered],
        elapsed=[sum(m.seconds.values()) for m, _ in gathered],
        rounds=steps,
        health=sum_counters([counts for _, counts in gathered]),
        waited=[m.waited for m, _ in gathered],
        balancing=Balancing([m.rows for m, _ in gathered], mine.moves) if balance else None,
    )
    show(result)
    if result.balancing:
        console.print(f"  {result.balancing.outcome}\n")
    return result


def _open(config: EPConfig) -> ExpertParallel:
    try:
        return ExpertParallel(config)
    except (ValueError, MemoryError) as error:
        raise UserError(str(error)) from None
