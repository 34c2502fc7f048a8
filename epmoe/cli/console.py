"""Helpers that all commands share: printing to the terminal, failing with a message, and writing
numbers.
"""

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
# The most lines of a message, so that it fits on one screen with the lines of the shell.
MOST_LINES = 18
# The width in columns of tables that go to a file, where no line should wrap.
_WIDEST = 10_000
# The environment variable with the file descriptor of the command's stderr.
STDERR = "EPMOE_STDERR"
# The beginning of run ids, by which a rank knows that `epmoe` itself has started it.
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
    """Print one message, and return the exception to raise.

    Under torchrun only rank 0 prints, or every rank with `every_rank`. A rank that `epmoe` itself
    has started prints nothing. Instead it leaves its message to the process that has started it,
    together with `because_of`: the ranks whose failure has led to this one.
    """
    rank = launched_rank()
    file = message_file()
    lines = message.splitlines()
    # The message of a compiler may have very many lines. The cause is in the first ones.
    if len(lines) > MOST_LINES:
        message = "\n".join([*lines[:MOST_LINES], f"… and {len(lines) - MOST_LINES} more lines"])
    if file is not None:
        _leave(file, f"rank {rank}: {message}" if every_rank else message, code, because_of)
    elif every_rank or not rank:  # rank 0, or no rank at all
        where = f" (rank {rank})" if every_rank and rank is not None else ""
        _stderr.print(f"[bold red]epmoe{where}:[/] {escape(message)}")
    return typer.Exit(code)


def quiet_exit() -> typer.Exit:
    """Return the exception to raise where there is nothing more to print, as after a failed check.
    The exit code is 1.
    """
    file = message_file()
    if file is not None:
        _leave(file, "", 1)
    return typer.Exit(1)


def _leave(file: Path, message: str, code: int, because_of: Sequence[int] = ()) -> None:
    """Leave a message for the process that has started this rank, in the file that it reads."""
    content = {
        "message": message,
        "code": code,
        "because_of": list(because_of),
        "timestamp": time.time(),
    }
    text = json.dumps(content)
    # Put the file into place in one step, because the launcher may end this rank at any moment.
    file.with_suffix(".new").write_text(text, encoding="utf-8")
    file.with_suffix(".new").replace(file)


def message_file() -> Path | None:
    """The file in which this rank leaves its message, if `epmoe` itself has started the rank. None
    in any other process.
    """
    is_ours = os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID)
    if not is_ours or launched_rank() is None:
        return None
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"])


def check_output(option: str, path: Path | None, suffixes: Sequence[str]) -> None:
    """Raise UserError unless the file of an option can be written. Commands call this first, before
    hours of work depend on the file.

    The path must end in one of `suffixes`. With `--json` it may also be `-`, the standard output.
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
    """Write a line to the stderr of the command. A rank that the command has started has another
    stderr, which goes to a file.
    """
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(int(os.environ.get(STDERR, 2)), f"{line}\n".encode())


def print_table(table: Table) -> None:
    """Print a table. Where the output is no terminal, the table gets all the width that it needs:
    rich takes a file or a pipe for a terminal of 80 columns.
    """
    if not console.is_terminal:
        wide = console.options.update(max_width=_WIDEST)
        table.width = console.measure(table, options=wide).maximum
    print_whole(table)


def print_whole(item: str | Table) -> None:
    """Print a paragraph or a table without cutting words or figures. On a terminal that is too
    narrow, lines wrap instead.
    """
    if isinstance(item, Table):
        wide = console.options.update(max_width=_WIDEST)
        # Columns of text may wrap between words. All other columns must not wrap.
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
    """Write a number of bytes with a unit: 1536 becomes "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float, zeros: bool = False) -> str:
    """Write seconds with a unit: 0.0123 becomes "12.3 ms", and 0.012 becomes "12 ms". With `zeros`
    it becomes "12.0 ms", so that the figures of a column line up.
    """
    if not seconds:
        return "0 s"
    # Take the smallest unit in which the value has at most three digits before the point.
    scale, unit = (1.0, "s")
    for smaller_scale, smaller_unit in ((1e-3, "ms"), (1e-6, "µs")):
        if seconds < 999.5 * smaller_scale:
            scale, unit = (smaller_scale, smaller_unit)
    value = seconds / scale
    if value >= 999.5:
        return f"{value:,.0f} {unit}"
    # The flag `#` keeps zeros at the end, but also a point without digits behind it.
    digits = f"{value:#.3g}" if zeros else f"{value:.3g}"
    return f"{digits.rstrip('.')} {unit}"


def share(part: float) -> str:
    """Write a share as a percentage: 0.123 becomes "12%"."""
    return f"{part:.0%}" if part >= 0.01 or not part else "<1%"


def plain_table(columns: Iterable[str], words: Container[str] = ()) -> Table:
    """Make a table without lines. Columns are aligned on the right, but those that `words` names
    are aligned on the left.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    return table


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw a small bar for each value, as high as its share of the largest value. With more than
    `width` values, one bar stands for the sum of several neighbours.
    """
    step = -(-len(values) // width) or 1
    sums = [sum(values[i : i + step]) for i in range(0, len(values), step)]
    top = max(sums, default=0) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * int(v) // int(top))] for v in sums)


def command(arguments: Sequence[str]) -> str:
    """Write the command line that repeats this run: the environment variables that override the
    configuration, `epmoe`, and `arguments`.
    """
    words = []
    for key, value in sorted(os.environ.items()):
        is_override = key.startswith("EPMOE_") and "__" in key
        if is_override:
            words.append(f"{key}={shlex.quote(without_folder(value))}")
    words.append("epmoe")
    for argument in arguments:
        # The value of an option may be a path, as an argument may.
        option, equals, value = ("", "", argument)
        if argument.startswith("-"):
            option, equals, value = argument.partition("=")
        words.append(shlex.quote(option + equals + without_folder(value)))
    return " ".join(words)


def without_folder(word: str) -> str:
    """Shorten a path outside the working directory to its last part. Any other word stays as it
    is.
    """
    path = PurePath(word)
    is_outside = path.is_absolute() or path.parts[:1] in (("..",), ("~",))
    return path.name if is_outside else word
