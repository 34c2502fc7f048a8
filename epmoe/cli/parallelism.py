"""`epmoe plan CONFIG --compare`: a layer with expert parallel, tensor parallel and replicated
experts, by a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from rich.table import Table

from epmoe.bench.parallelism import (
    BATCHES,
    GPUS,
    WRONG,
    Comparison,
    Cost,
    better_than_ep,
    problem_with,
)
from epmoe.cli.console import UserError, human_bytes, plain_table
from epmoe.config.config import EPConfig

GpuName = Literal["h100", "h200"]
_ASSUMED = (
    "By constants of {gpu} that docs/parallelism.md lists. TP was measured on two H100 only, and "
    f"replicas nowhere. Layouts that differ by less than {WRONG:g} × count as equal."
)


def cases(
    config: EPConfig, gpu: GpuName, load: float
) -> dict[str, tuple[Comparison, dict[int, dict[str, Cost]]]]:
    """By precision the model, and the costs by T and layout. Raises UserError if it knows no
    precision of `config`.
    """
    problem = problem_with(config, fp8=False)
    if problem:
        raise UserError(f"`--compare`: {problem}")
    # Up to M tokens.
    most = config.capacity.max_num_tokens_per_rank
    tokens = (*(few for few in BATCHES if few < most), most)
    found = {}
    for precision, fp8 in ((config.model.dtype, False), ("fp8", True)):
        if problem_with(config, fp8):
            continue
        model = Comparison(config, GPUS[gpu], fp8)
        found[precision] = (model, {T: model.costs(T, load) for T in tokens})
    return found


def paragraphs(config: EPConfig, gpu: GpuName, load: float) -> Iterator[str | Table]:
    """What the command prints: a table for each precision, and when EP is the wrong choice."""
    R = config.topology.ep_size
    for precision, (model, by_tokens) in cases(config, gpu, load).items():
        who = f"{R} × {gpu.upper()}, {precision} experts"
        yield f"[bold]{who}[/]: µs of a layer, MB of weights read and kB sent by a GPU"
        yield _table(by_tokens)
        first = next(iter(by_tokens.values()))
        few = "".join(f"{name} up to T = {T:,}, then " for name, T in model.borders().items())
        yield (
            f"The layer's weights take {human_bytes(int(first['EP'].held_bytes))} a GPU with EP or "
            f"TP, and {human_bytes(int(first['replicas'].held_bytes))} with replicas. With EP "
            f"experts take {few}a grouped GEMM."
        )
        # The numbers of tokens for which something else is faster.
        wrong = []
        for T, costs in by_tokens.items():
            better = better_than_ep(costs)
            if better is not None:
                wrong.append(f"{T:,} ({costs[better].us:,.0f} µs with {better})")
        if wrong:
            yield f"[yellow]EP is the wrong choice at T = {', '.join(wrong)}.[/]"
    yield f"[dim]{_ASSUMED.format(gpu=gpu.upper())}[/]"


def as_dict(config: EPConfig, gpu: GpuName, load: float) -> dict[str, Any]:
    """The same for `--json`."""
    found = cases(config, gpu, load)
    costs_of_all = []
    for precision, (_, by_tokens) in found.items():
        for T, costs in by_tokens.items():
            case = {"precision": precision, "tokens": T, "better_than_ep": better_than_ep(costs)}
            for name, cost in costs.items():
                case[name] = cost._asdict()
            costs_of_all.append(case)
    figures = {
        "gpu": gpu,
        "gpus": config.topology.ep_size,
        "load": load,
        "constants": dataclasses.asdict(GPUS[gpu]),
    }
    borders = {precision: model.borders() for precision, (model, _) in found.items()}
    return figures | {"borders": borders, "cases": costs_of_all}


def _table(by_tokens: dict[int, dict[str, Cost]]) -> Table:
    columns = ("T", "EP", "reads", "sends", "TP", "reads", "sends", "replicas", "reads")
    table = plain_table(columns)
    for T, costs in by_tokens.items():
        cells = [f"{T:,}"]
        for name, cost in costs.items():
            cells += [f"[bold]{cost.us:,.0f}[/]", f"{cost.read_bytes / 1e6:,.0f}"]
            # Replicas send nothing.
            if name != "replicas":
                cells.append(f"{cost.sent_bytes / 1e3:,.0f}")
        table.add_row(*cells)
    return table
