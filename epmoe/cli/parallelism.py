"""`epmoe plan CONFIG --compare`: a layer with expert parallel, tensor parallel and replicated experts, by a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from rich.table import Table

from epmoe.bench.parallelism import BATCHES, GPUS, WRONG, Comparison, Cost, better_than_ep, problem_with
from epmoe.cli.console import UserError, human_bytes, plain_table
from epmoe.config.config import EPConfig

GpuName = Literal["h100", "h200"]
_ASSUMED = (
    "By constants of {gpu} that docs/parallelism.md lists. TP was measured on two H100 only, and replicas nowhere. "
    f"Layouts that differ by less than {WRONG:g} × count as equal."
)


def cases(config: EPConfig, gpu: GpuName, load: float) -> dict[str, dict[int, dict[str, Cost]]]:
    """The costs by precision, T and layout. Raises UserError if the model knows no precision of `config`."""
    precisions = {config.model.dtype: False, "fp8": True}
    if problem := problem_with(config, fp8=False):
        raise UserError(f"`--compare`: {problem}")
    most = config.capacity.max_num_tokens_per_rank
    tokens = (*(few for few in BATCHES if few < most), most)
    models = {
        name: Comparison(config, GPUS[gpu], fp8) for name, fp8 in precisions.items() if not problem_with(config, fp8)
    }
    return {name: {T: model.costs(T, load) for T in tokens} for name, model in models.items()}


def paragraphs(config: EPConfig, gpu: GpuName, load: float) -> Iterator[str | Table]:
    """What the command prints: a table for each precision, and when EP is the wrong choice."""
    R = config.topology.ep_size
    for precision, by_tokens in cases(config, gpu, load).items():
        few = Comparison(config, GPUS[gpu], precision == "fp8").few_rows_tokens()
        who = f"{R} × {gpu.upper()}, {precision} experts"
        yield f"[bold]{who}[/]: µs of a layer, MB of weights read and kB sent by a GPU"
        yield _table(by_tokens)
        first = next(iter(by_tokens.values()))
        yield (
            f"The layer's weights take {human_bytes(int(first['EP'].held_bytes))} a GPU with EP or TP, and "
            f"{human_bytes(int(first['replicas'].held_bytes))} with replicas. Experts take "
            f"the kernels for few rows up to T = {few:,}, and a grouped GEMM beyond."
        )
        better = {T: name for T, costs in by_tokens.items() if (name := better_than_ep(costs)) is not None}
        wrong = (f"{T:,} ({by_tokens[T][name].us:,.0f} µs with {name})" for T, name in better.items())
        if better:
            yield f"[yellow]EP is the wrong choice at T = {', '.join(wrong)}.[/]"
    yield f"[dim]{_ASSUMED.format(gpu=gpu.upper())}[/]"


def as_dict(config: EPConfig, gpu: GpuName, load: float) -> dict[str, Any]:
    """The same for `--json`."""
    found = [
        {"precision": precision, "tokens": T, "better_than_ep": better_than_ep(costs)}
        | {name: cost._asdict() for name, cost in costs.items()}
        for precision, by_tokens in cases(config, gpu, load).items()
        for T, costs in by_tokens.items()
    ]
    constants = dataclasses.asdict(GPUS[gpu])
    return {"gpu": gpu, "gpus": config.topology.ep_size, "load": load, "constants": constants, "cases": found}


def _table(by_tokens: dict[int, dict[str, Cost]]) -> Table:
    columns = ("T", "EP", "reads", "sends", "TP", "reads", "sends", "replicas", "reads")
    table = plain_table(columns)
    for T, costs in by_tokens.items():
        cells = [f"{T:,}"]
        for name, cost in costs.items():
            cells += [f"[bold]{cost.us:,.0f}[/]", f"{cost.read_bytes / 1e6:,.0f}"]
            cells += [f"{cost.sent_bytes / 1e3:,.0f}"] if name != "replicas" else []
        table.add_row(*cells)
    return table
