"""Finds the launch of the exchange's kernels that is fastest on this machine, for each number of tokens.

One parameter after the other, each at the best of those before it; the launch that the kernels choose themselves is the
first to beat. What is measured is a pair of the fused pipeline, as in graphs.py, its output checked at every launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table

from epmoe import memory
from epmoe.bench.graphs import pair_us
from epmoe.bench.report import write_object
from epmoe.bench.sample import Sample
from epmoe.bench.sides import Fused
from epmoe.config import EPConfig
from epmoe.service import ExpertParallel
from epmoe.simulate import Kind
from epmoe.tuning import Launch, Tuning, TuningRow

# Senders in eighths of the multiprocessors, of which a kernel has one or two blocks each; as many as the kernels allow.
_Grid = dict[str, tuple[int, ...]]
_OF_FEW: _Grid = {"combine_senders": (3, 4, 5, 6, 8), "dispatch_senders": (1, 2, 3, 4, 5)}  # whose rows no team sends
_OF_MANY: _Grid = {
    "combine_team": (1, 2, 4, 8, 16),
    "combine_senders": (8, 10, 12, 14),
    "dispatch_senders": (8, 10, 12, 14),
}


def launches(tokens: Sequence[int]) -> int:
    """How many are tried for these numbers of tokens."""
    return sum(1 + sum(map(len, _grid(T).values())) for T in tokens)


def run(
    config: EPConfig,
    tokens: Sequence[int],
    repeats: int = 20,
    routing: Kind = "uniform",
    *,
    group: dist.ProcessGroup | None = None,
    advance: Callable[[], object] = lambda: None,
) -> list[tuple[TuningRow, float, float]]:
    """By T: the row of the table, microseconds a pair with it, and with what the kernels choose. Collective.

    `repeats` replays are taken of each launch, after which `advance` is called. Raises RuntimeError where an output is
    wrong.
    """
    group = group or dist.group.WORLD
    assert group is not None  # torchrun's
    results = []
    with ExpertParallel(config, group) as ep:
        for T in sorted(tokens):
            side = Fused(ep, Sample(config, ep.rank, T, routing, ep.device))
            own = TuningRow(tokens=T, hidden_size=config.model.hidden_size, ranks=ep.size)
            default = _pair_us(ep, side, own, repeats, group)
            advance()
            best, least = own, default
            for name, values in _values(T, ep.device):
                start = best
                for value in values:
                    row = start.model_copy(update={name: value})
                    if (us := _pair_us(ep, side, row, repeats, group)) < least:
                        best, least = row, us
                    advance()
            results.append((best, least, default))
    return results


def _grid(tokens: int) -> _Grid:
    return _OF_FEW if tokens <= memory.FEW_TOKENS else _OF_MANY


def _values(tokens: int, device: torch.device) -> Iterator[tuple[str, list[int]]]:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    for name, values in _grid(tokens).items():
        yield name, [processors * value // 8 if name.endswith("senders") else value for value in values]


def _pair_us(ep: ExpertParallel, side: Fused, row: TuningRow, repeats: int, group: dist.ProcessGroup) -> float:
    ep.retune(Tuning(rows=(row,)))
    side.check()
    return pair_us(side, repeats, group)


def table(results: Sequence[tuple[TuningRow, float, float]], title: str = "") -> Table:
    """A row for each number of tokens: the launch, and what it saves."""
    view = Table(title=title, caption="µs a pair on the slowest rank; 0: the kernels choose", pad_edge=False)
    for column in ("T", *Launch.model_fields, "pair", "untuned"):
        view.add_column(column.replace("_", " "), justify="right")
    for row, us, default in results:
        launch = (f"{getattr(row, name)}" for name in Launch.model_fields)
        view.add_row(f"{row.tokens}", *launch, f"{us:,.1f}", f"{default:,.1f}")
    return view


def write_json(results: Sequence[tuple[TuningRow, float, float]], path: Path) -> None:
    """The file that `exchange.tuning` names."""
    write_object({"rows": [row.model_dump() for row, _, _ in results]}, path)
