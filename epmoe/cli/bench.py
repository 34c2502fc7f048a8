"""`epmoe bench CONFIG`: a round of the exchange against the same work over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from epmoe.bench import exchange
from epmoe.cli.console import UserError, console
from epmoe.cli.launch import all_ranks
from epmoe.config import EPConfig


def bench(
    config: Annotated[Path, typer.Argument(help="Configuration file (YAML, TOML or JSON).")],
    tokens: Annotated[
        list[int] | None, typer.Option(min=0, help="Tokens a rank brings; may be repeated. [default: 1 16 128 1024]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each side.")] = 20,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them into this .png, .svg or .pdf.")] = None,
) -> None:
    """Time dispatch and combine against gloo's all_to_all on all ranks. Start it under torchrun."""
    parsed = EPConfig.load(config)
    limit = parsed.capacity.max_num_tokens_per_rank
    counts = tokens or [count for count in exchange.TOKENS if count <= limit]
    if max(counts) > limit:
        raise UserError(f"`--tokens` must be at most `capacity.max_num_tokens_per_rank` = {limit}, got {max(counts)}")
    with all_ranks(parsed) as rank, Progress(console=console, transient=True) as progress:
        task = progress.add_task("samples", total=repeats * len(counts))
        try:
            results = exchange.run(parsed, counts, repeats, advance=lambda: progress.advance(task))
        except (ValueError, MemoryError) as error:
            raise UserError(str(error)) from None
    if rank != 0:
        return
    console.print(exchange.table(results, title=f"{config}: {parsed.topology.ep_size} ranks"))
    if as_json:
        exchange.write_json(results, as_json)
    if plot:
        exchange.plot(results, plot)
