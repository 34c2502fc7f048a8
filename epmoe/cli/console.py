"""What the commands share: where they print, how they fail, how they write numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import tempfile
import time
from collections.abc import Container, Iterable, Sequence
from pathlib import Path, PurePath

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epmoe.bench.report import STDOUT
from epmoe.native.package import sentence

console = Console(highlight=False)
_stderr = Console(stderr=True, highlight=False, soft_wrap=True)
SEE_TRACEBACK = "; the same command under torchrun shows the traceback"
# Lines of a message: with what a shell adds, one screen.
MOST_LINES = 18
# Columns of a table in a file.
_WIDEST = 10_000
# The variable with the file descriptor of the command's stderr.
STDERR = "EPMOE_STDERR"
# How the ids of runs begin that `epmoe` started itself.
RUN_ID = "epmoe-run-"


class UserError(Exception):
    """A mistake that the user can correct: printed without a traceback, exit code 2."""


def require(package: str, purpose: str) -> None:
    """Raise UserError, which names the extra to install, unless `package` can be imported."""
    if importlib.util.find_spec(package) is None:
        raise UserError(sentence(purpose, package))


def launched_rank() -> int | None:
    """This process's rank under torchrun or a launcher that sets the same variables, else None."""
    rank = os.environ.get("RANK", "")
    size = os.environ.get("WORLD_SIZE", "")
    if not rank.isdecimal() or not size.isdecimal() or int(rank) >= int(size):
        return None
    return int(rank)


def fail(
    message: str, *, code: int, every_rank: bool = False, because_of: Sequence[int] = ()
) -> typer.Exit:
    """Print one message, on rank 0 only unless `every_rank`, and return the exception to raise.

    A rank that `epmoe` itself started prints nothing: it leaves its message to the process that
    started it, with `because_of`, the ranks whose failure has led to this one.
    """
    rank = launched_rank()
    file = message_file()
    lines = message.splitlines()
    # A compiler may have many. The first ones are the cause.
    if len(lines) > MOST_LINES:
        message = "\n".join([*lines[:MOST_LINES], f"… and {len(lines) - MOST_LINES} more lines"])
    if file is not None:
        _leave(file, f"rank {rank}: {message}" if every_rank else message, code, because_of)
    elif not rank or every_rank:
        where = f" (rank {rank})" if every_rank and rank is not None else ""
        _stderr.print(f"[bold red]epmoe{where}:[/] {escape(message)}")
    return typer.Exit(code)


def quiet_exit() -> typer.Exit:
    """What to raise where there is nothing more to say, as after a check that failed:
    exit code 1.
    """
    file = message_file()
    if file is not None:
        _leave(file, "", 1)
    return typer.Exit(1)


def _leave(file: Path, message: str, code: int, because_of: Sequence[int] = ()) -> None:
    """Leave a message for the process that started this rank."""
    said = {
        "message": message,
        "code": code,
        "because_of": list(because_of),
        "timestamp": time.time(),
    }
    text = json.dumps(said)
    # In one step: the launcher may end this rank now.
    file.with_suffix(".new").write_text(text, encoding="utf-8")
    file.with_suffix(".new").replace(file)


def message_file() -> Path | None:
    """Where a rank that `epmoe` itself started leaves its message; None in any other process."""
    is_ours = os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID)
    if not is_ours or launched_rank() is None:
        return None
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"])


def check_output(option: str, path: Path | None, suffixes: Sequence[str]) -> None:
    """Raise UserError unless a file of this name can be written, before hours of work depend on it.

    The standard output, `-`, is a file of `--json`.
    """
    if path is None or (option == "--json" and path == STDOUT):
        return
    if path.suffix.lower() not in suffixes:
        raise UserError(f"`{option}` must end in {' or '.join(suffixes)}, got {path}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"`{option}` must be in an existing folder, got {path}")
    if path.is_dir():
        raise UserError(f"`{option}` must be a file, but {path} is a folder")
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"`{option}` cannot be written: {path}: {error.strerror}") from None


def log(line: str) -> None:
    """Write a line to the stderr of the command, not to that of a rank that it started."""
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(int(os.environ.get(STDERR, 2)), f"{line}\n".encode())


def print_table(table: Table) -> None:
    """Print all of a table where the output is no terminal: rich takes a file or a pipe for 80
    columns.
    """
    if not console.is_terminal:
        wide = console.options.update(max_width=_WIDEST)
        table.width = console.measure(table, options=wide).maximum
    print_whole(table)


def print_whole(item: str | Table) -> None:
    """Print a paragraph, or a table without cutting words or figures: on a terminal that is too
    narrow its lines wrap.
    """
    if isinstance(item, Table):
        wide = console.options.update(max_width=_WIDEST)
        # Columns of words may wrap between words, all others not at all.
        for column in item.columns:
            cells = [console.measure(cell, options=wide) for cell in (column.header, *column.cells)]
            if column.no_wrap:
                column.min_width = max(cell.maximum for cell in cells)
            else:
                column.min_width = max(cell.minimum for cell in cells)
        needed = console.measure(item, options=wide).minimum
        if needed > (item.width or console.width):
            item.width = needed
    console.print(item, crop=False)


def human_bytes(count: float) -> str:
    """1536 → '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float, zeros: bool = False) -> str:
    """0.0123 → '12.3 ms', 0.012 → '12 ms'; or with `zeros` '12.0 ms', so that a column lines up."""
    if not seconds:
        return "0 s"
    # The smallest unit in which it has three digits at most.
    scale, unit = (1.0, "s")
    for smaller_scale, smaller_unit in ((1e-3, "ms"), (1e-6, "µs")):
        if seconds < 999.5 * smaller_scale:
            scale, unit = (smaller_scale, smaller_unit)
    value = seconds / scale
    if value >= 999.5:
        return f"{value:,.0f} {unit}"
    # `#` keeps zeros at the end, and a point without digits behind it.
    digits = f"{value:#.3g}" if zeros else f"{value:.3g}"
    return f"{digits.rstrip('.')} {unit}"


def share(part: float) -> str:
    """0.123 → "12%"."""
    return f"{part:.0%}" if part >= 0.01 or not part else "<1%"


def plain_table(columns: Iterable[str], words: Container[str] = ()) -> Table:
    """A table without lines: figures on the right, and on the left the columns that
    `words` names.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    return table


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """One bar per value, scaled to the largest; with more than `width` values, neighbours are
    summed.
    """
    step = -(-len(values) // width) or 1
    sums = [sum(values[i : i + step]) for i in range(0, len(values), step)]
    top = max(sums, default=0) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * int(v) // int(top))] for v in sums)


def command(arguments: Sequence[str]) -> str:
    """The command to type for this run: variables that override the configuration, `epmoe`,
    `arguments`.
    """
    words = []
    for key, value in sorted(os.environ.items()):
        is_override = key.startswith("EPMOE_") and "__" in key
        if is_override:
            words.append(f"{key}={shlex.quote(without_folder(value))}")
    words.append("epmoe")
    for argument in arguments:
        # The value of an option may be a path, too.
        option, equals, value = ("", "", argument)
        if argument.startswith("-"):
            option, equals, value = argument.partition("=")
        words.append(shlex.quote(option + equals + without_folder(value)))
    return " ".join(words)


def without_folder(word: str) -> str:
    """`word`; if it is a path outside the working directory, its last part alone."""
    path = PurePath(word)
    is_outside = path.is_absolute() or path.parts[:1] in (("..",), ("~",))
    return path.name if is_outside else word
