"""`epmoe run CONFIG`: runs a MoE layer or real models over all ranks, and reports the outcome."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from epmoe.cli import simulated
from epmoe.cli.console import UserError, check_output, console, launched_rank, quiet_exit, require
from epmoe.cli.demo import models
from epmoe.cli.launch import CONFIG, NPROC, all_ranks, check_ranks, load, start_ranks
from epmoe.cli.tables import show
from epmoe.local.simulate import Kind


def run(
    context: typer.Context,
    config: Annotated[Path, CONFIG],
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Generate text with this model, one of {', '.join(models.NAMES)} (tiny, random "
            "weights), or with the checkpoint in this folder; may be repeated.",
            autocompletion=lambda: list(models.NAMES),
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Rounds, or tokens to generate with --model.")
    ] = 16,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=0, help="Tokens a rank brings to a round, without --model. [default: at most 64]"
        ),
    ] = None,
    routing: Annotated[
        Kind | None,
        typer.Option(
            help="Simulated routing, without --model. [default: uniform]", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, tokens and simulated routing.")] = 0,
    balance: Annotated[
        bool,
        typer.Option(
            "--balance", help="Move experts while it runs, as the load drifts, without --model."
        ),
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
    # A missing library must end the command here, and not after the run.
    if report is not None:
        require("jinja2", "`--report`")
    limit = parsed.capacity.max_num_tokens_per_rank
    if tokens is not None and tokens > limit:
        raise UserError(
            f"`--tokens` must be at most `capacity.max_num_tokens_per_rank` = {limit}, got {tokens}"
        )
    _check_options(model, {"--tokens": tokens, "--routing": routing, "--balance": balance or None})
    # Refuse here what cannot run on this machine.
    check_ranks(parsed)
    if balance:
        parsed = simulated.live(parsed)
    if model:
        models.check_models(parsed, model)
    else:
        simulated.require_memory(parsed)
    # This process starts the ranks, or is one of them.
    if launched_rank() is None:
        raise typer.Exit(start_ranks(parsed, context.meta["epmoe.arguments"]))
    with all_ranks(parsed) as rank:
        if model:
            results = models.run_models(parsed, model, steps, seed)
        else:
            kind = routing or "uniform"
            result = simulated.run(parsed, config.stem, kind, steps, tokens, seed, balance)
            results = [result]
            show(result)
    if rank == 0 and report is not None:
        # Import this here, because it needs jinja2, an optional package.
        from epmoe.cli.report import about, write_report

        write_report(results, report, about(config, started))
        console.print(f"\nreport: {report.resolve()}")
    # Rank 0 alone reports a failed check: the exit of another rank would end rank 0, which may
    # still be writing.
    if rank == 0 and not all(result.passed for result in results):
        raise quiet_exit()


def _check_options(model: list[str] | None, layer_options: dict[str, object]) -> None:
    """Raise UserError if an option for runs of the layer has a value, but models are to run."""
    for option, value in layer_options.items():
        if model and value is not None:
            raise UserError(
                f"`{option}` is for the rounds of the layer, and `--model` runs models: leave one "
                "out"
            )
