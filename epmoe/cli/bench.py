"""`epmoe bench CONFIG` times the exchange: on CPUs against gloo, on GPUs against the floor and
NCCL. It also times layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.progress import Progress

from epmoe.bench import cpu, gpu, host, layer, peers, training
from epmoe.bench.facts import facts
from epmoe.bench.report import STDOUT, Benchmark, Job
from epmoe.cli.console import (
    UserError,
    check_output,
    command,
    console,
    launched_rank,
    log,
    print_table,
    require,
)
from epmoe.cli.launch import CONFIG, NPROC, all_ranks, check_ranks, load, start_ranks
from epmoe.config.config import EPConfig
from epmoe.local.simulate import Kind
from epmoe.native.formats import PayloadName

# Options, each with the options that must not be given beside it.
_WITHOUT = {
    "--host": ("--training", "--layer", "--eager", "--peers", "--side", "--payload"),
    "--training": ("--layer", "--eager", "--peers", "--side"),
    "--layer": ("--side", "--payload", "--eager"),
}
# Options that are for GPUs. Beside the option on the right they are for CPUs, too.
_FOR_GPUS = {"--side": "", "--payload": "--training", "--eager": "", "--peers": "--layer"}


class _Chosen(NamedTuple):
    """The benchmark that the options ask for."""

    benchmark: Benchmark
    steps_by_count: int
    """how many steps the progress bar has for each number of tokens"""


def bench(
    context: typer.Context,
    config: Annotated[Path, CONFIG],
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Tokens a rank brings; may be repeated. "
            "[default: 1 16 128 1024; on GPUs 1 … 4096]",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each side.")] = 20,
    routing: Annotated[Kind, typer.Option(help="Simulated routing.")] = "uniform",
    side: Annotated[
        list[gpu.Contender] | None,
        typer.Option(help="On GPUs: only this; may be repeated. [default: all]"),
    ] = None,
    payload: Annotated[
        list[gpu.Payload] | None,
        typer.Option(
            help=(
                "On GPUs: only this; may be repeated. [default: all] With --training: one, plain "
                "or fp8-out."
            )
        ),
    ] = None,
    whole_layer: Annotated[
        bool,
        typer.Option(
            "--layer",
            help="Instead time route + dispatch + experts + combine, and the experts alone.",
        ),
    ] = False,
    passes: Annotated[
        bool,
        typer.Option(
            "--training", help="Instead time forward and backward, of the exchange and of a layer."
        ),
    ] = False,
    host_alone: Annotated[
        bool,
        typer.Option(
            "--host",
            help="Instead time the host in calls of a layer, and count operators and launches.",
        ),
    ] = False,
    eager: Annotated[
        bool,
        typer.Option(
            help="On GPUs: dispatch and combine called one after the other, without CUDA graphs."
        ),
    ] = False,
    drivers: Annotated[
        Path | None,
        typer.Option(
            "--peers", help="On GPUs or with --layer: also these; a folder of drivers, or one."
        ),
    ] = None,
    as_json: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures to this file; `-` prints them alone."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw them into this .png, .svg or .pdf.")
    ] = None,
    nproc: Annotated[int | None, NPROC] = None,
) -> None:
    """Time dispatch and combine on all ranks, against gloo's all_to_all, on GPUs against the
    machine's floor and NCCL.

    It starts one process for each rank; under torchrun it is one of them.
    """
    parsed = load(config, nproc)
    check_output("--json", as_json, (".json",))
    check_output("--plot", plot, (".png", ".svg", ".pdf"))
    # Check that the options that were typed go together, and with the configuration.
    typed_options = {
        option.opts[0] for option in context.command.params if context.params[option.name or ""]
    }
    on_gpus = parsed.exchange.transport == "nvlink"
    _check_options(typed_options, on_gpus)
    _check_config(parsed, routing)
    # Choose the numbers of tokens.
    default_tokens: Sequence[int] = cpu.DEFAULT_TOKENS
    if host_alone:
        default_tokens = host.DEFAULT_TOKENS
    elif on_gpus and (whole_layer or passes):
        default_tokens = layer.DEFAULT_TOKENS
    elif on_gpus:
        default_tokens = gpu.DEFAULT_TOKENS
    counts = _token_counts(parsed, tokens, default_tokens)
    # Choose the benchmark.
    with _errors_naming("--peers"):
        loaded_peers = peers.load(drivers) if drivers else []
    with _errors_naming("--layer"):
        if whole_layer:
            layer.check(parsed)
    if host_alone:
        chosen = _Chosen(host.run, steps_by_count=1)
    elif passes:
        chosen = _choose_training(parsed, payload)
    elif whole_layer:
        run_layer = partial(layer.run, peers=loaded_peers)
        chosen = _Chosen(run_layer, steps_by_count=len(layer.Precision))
    elif on_gpus:
        chosen = _choose_on_gpus(parsed, payload, side, loaded_peers, eager)
    else:
        chosen = _Chosen(cpu.run, steps_by_count=repeats)
    # A missing library must end the command here, and not after the run.
    if plot:
        require("matplotlib", "`--plot`")
    check_ranks(parsed)
    # This process starts the ranks, or is one of them.
    if launched_rank() is None:
        raise typer.Exit(start_ranks(parsed, context.meta["epmoe.arguments"]))
    with all_ranks(parsed) as rank, Progress(console=console, transient=True) as progress:
        task = progress.add_task("samples", total=len(counts) * chosen.steps_by_count)
        job = Job(
            config=parsed,
            tokens=counts,
            repeats=repeats,
            routing=routing,
            advance=lambda: progress.advance(task),
            log=_log(rank),
        )
        try:
            report = chosen.benchmark(job)
        except (ValueError, MemoryError) as error:
            raise UserError(str(error)) from None
    # Rank 0 alone prints the table and writes the files.
    if rank != 0:
        return
    console.quiet = as_json == STDOUT
    title = f"{config.stem}: {parsed.topology.ep_size} ranks, {routing} routing"
    print_table(report.table(title))
    if 0 in counts:
        console.print("T = 0: no tokens, so nothing was checked")
    if as_json:
        run_facts = facts(report.benchmark, parsed, routing, repeats)
        run_facts["command"] = command(context.meta["epmoe.arguments"])
        report.write_json(as_json, run_facts)
    if plot:
        model = parsed.model
        experts = f"{model.num_experts} experts, top-{model.num_experts_per_tok}"
        report.plot(plot, f"{title}\nhidden size {model.hidden_size} {model.dtype}, {experts}")


def _check_config(config: EPConfig, routing: Kind) -> None:
    """Raise UserError for a configuration or a routing for which no benchmark knows the right
    output.
    """
    if config.placement.slots is not None:
        raise UserError(
            "`placement.slots` must be unset: the benchmarks compute with the experts that come "
            "first"
        )
    if routing == "adversarial":
        raise UserError(
            "`--routing` must not be adversarial: its outputs are not the weighted sums that are "
            "checked"
        )


def _token_counts(
    config: EPConfig, tokens: list[int] | None, default_tokens: Sequence[int]
) -> list[int]:
    """Choose the numbers of tokens of a rank, in ascending order: those that the user asks for, or
    the default ones that the configuration has room for.
    """
    limit = config.capacity.max_num_tokens_per_rank
    counts = sorted(set(tokens or [count for count in default_tokens if count <= limit]))
    if max(counts) > limit:
        raise UserError(
            f"`--tokens` must be at most `capacity.max_num_tokens_per_rank` = {limit}, got "
            f"{max(counts)}"
        )
    return counts


def _choose_training(config: EPConfig, payload: list[gpu.Payload] | None) -> _Chosen:
    """Choose the benchmark of training. The rows of its forward pass may travel in fp8."""
    forward: PayloadName = "auto"
    if payload:
        plain_and_fp8 = gpu.Payload.for_rows(config)[:2]
        if len(payload) > 1 or payload[0] not in plain_and_fp8:
            raise UserError(
                "`--training` takes one `--payload`: plain, or fp8-out where `model.hidden_size` "
                "is a multiple of 128"
            )
        forward = payload[0].wires[0]
    return _Chosen(partial(training.run, payload=forward), steps_by_count=1)


def _choose_on_gpus(
    config: EPConfig,
    payload: list[gpu.Payload] | None,
    side: list[gpu.Contender] | None,
    loaded_peers: list[peers.Peer],
    eager: bool,
) -> _Chosen:
    """Choose the benchmark of the exchange on GPUs. It measures the payloads and sides that the
    user asks for, by default all.
    """
    possible = gpu.Payload.for_rows(config)
    refused = set(payload or ()) - set(possible)
    if refused:
        raise UserError(
            f"`--payload` {', '.join(refused)} wants `model.hidden_size` to be a multiple of 128"
        )
    payloads = payload or possible
    benchmark = partial(
        gpu.run,
        contenders=side or list(gpu.Contender),
        payloads=payloads,
        peers=loaded_peers,
        eager=eager,
    )
    return _Chosen(benchmark, steps_by_count=len(payloads))


@contextmanager
def _errors_naming(option: str) -> Iterator[None]:
    """Turn a ValueError of the block into a UserError that names `option`."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"`{option}`: {error}") from None


def _check_options(typed_options: set[str], on_gpus: bool) -> None:
    """Raise UserError if the options that the user has typed do not go together, or do not go
    without GPUs.
    """
    for option, cpu_option in _FOR_GPUS.items():
        is_refused = not on_gpus and cpu_option not in typed_options
        if option in typed_options and is_refused:
            instead = f" or for `{cpu_option}`" if cpu_option else ""
            raise UserError(
                f"`{option}` is for GPUs{instead}; `exchange.transport: nvlink` asks for GPUs"
            )
    for option, excluded in _WITHOUT.items():
        if option in typed_options and typed_options.intersection(excluded):
            *first, last = (f"`{name}`" for name in excluded)
            raise UserError(f"`{option}` goes without {', '.join(first)} and {last}")


def _log(rank: int) -> Callable[[str], None]:
    """Make the function that logs a line for each case. A run that is cut off has then left its
    figures so far. On a terminal nothing is logged, because there is a progress bar.
    """
    if rank != 0 or console.is_terminal:
        return lambda line: None
    return partial(_log_with_time, time.monotonic())


def _log_with_time(start: float, line: str) -> None:
    """Log a line with the seconds since `start` in front of it."""
    log(f"{time.monotonic() - start:6.1f} s  {line}")
