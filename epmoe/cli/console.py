"""What the commands share: where they print, how they fail, how they write numbers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.markup import escape

from epmoe.extras import sentence

console = Console(highlight=False)
_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


class UserError(Exception):
    """A mistake that the user can correct: printed without a traceback, exit code 2."""


def require(package: str, purpose: str) -> None:
    """Raise UserError, which names the extra to install, unless `package` can be imported."""
    if importlib.util.find_spec(package) is None:
        raise UserError(sentence(purpose, package))


def launched_rank() -> int | None:
    """This process's rank under torchrun or a launcher that sets the same variables, else None."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return int(rank) if rank is not None and size is not None else None


def fail(message: str, *, code: int, every_rank: bool = False) -> typer.Exit:
    """Print one message, on rank 0 only unless `every_rank`, and return the exception to raise."""
    rank = launched_rank()
    if not rank or every_rank:
        where = f" (rank {rank})" if every_rank and rank is not None else ""
        _stderr.print(f"[bold red]epmoe{where}:[/] {escape(message)}")
    return typer.Exit(code)


def human_bytes(count: float) -> str:
    """1536 → '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """0.0123 → '12.3 ms'."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """One bar per value, scaled to the largest; with more than `width` values, neighbours are summed."""
    step = -(-len(values) // width) or 1
    sums = [sum(values[i : i + step]) for i in range(0, len(values), step)]
    top = max(sums, default=0) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * int(v) // int(top))] for v in sums)
