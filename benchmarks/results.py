"""The schema of `benchmarks/*.json`: one current result for each machine and measurement.

    python -m benchmarks.results FIGURES.json benchmarks/RESULT.json [KEY ...]

makes a result of the file that `epmoe bench --json FIGURES.json` wrote, with the figures of these
keys. By default they are those that `--plot` draws. If the result exists, its words stay.
"""

from __future__ import annotations

import datetime
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FOLDER = Path(__file__).resolve().parent

Figure = int | float


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TableColumn(_Record):
    """A column of a table."""

    name: str
    unit: str = ""
    tokens: int | None = None
    """T, the tokens a rank, if the column holds times for one T; the plot takes its x from it"""


class TableRow(_Record):
    """A row of a table; `cells` has one entry for each column, null where nothing was measured."""

    cells: tuple[Figure | str | None, ...]
    line: str | None = None
    """the label of this row in the plot"""
    detail: bool = False
    """whether BENCHMARKS.md leaves the row out"""


class Asked(_Record):
    """Figures that were to be reached. A result is missed if one of its figures is."""

    what: str
    limit: Literal["at most", "at least"]
    asked: tuple[Figure, ...]
    measured: tuple[Figure, ...]
    unit: str
    bound_by: str = ""
    """what keeps the figure from being better, in one line"""

    @property
    def reached(self) -> bool:
        """Whether every measured figure is within its limit."""
        figures = zip(self.measured, self.asked, strict=True)
        return all(
            got <= wanted if self.limit == "at most" else got >= wanted for got, wanted in figures
        )

    @model_validator(mode="after")
    def _check(self) -> Asked:
        if len(self.asked) != len(self.measured):
            raise ValueError(
                f"`asked` has {len(self.asked)} figures, but `measured` has {len(self.measured)}"
            )
        return self


class Published(_Record):
    """One measurement on one machine."""

    title: str
    where: str
    """the machine in a few words"""
    model: str = ""
    """the model, where results of several models have one title and share a table"""
    machine: str
    gpus: int = Field(ge=0)
    date: datetime.date
    commit: str = Field(pattern="^[0-9a-f]{7,40}$")
    torch: str
    command: str = Field(min_length=1)
    caption: str
    """what the table's figures are"""
    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]
    asked: tuple[Asked, ...] = ()
    notes: tuple[str, ...] = ()
    plot: Literal["rounds", "layer"] = "rounds"
    panel: str | None = None
    """title of the panel of `plot` that shows the rows with a `line`"""

    @model_validator(mode="after")
    def _check(self) -> Published:
        if len(set(self.columns)) < len(self.columns):
            raise ValueError("two columns have the same name")
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(
                    f"row {row.cells[0]!r} has {len(row.cells)} cells for {len(self.columns)} "
                    "columns"
                )
        return self

    @property
    def lines(self) -> dict[str, list[tuple[int, float]]]:
        """(T, figure) of each row with a `line`."""
        return {
            row.line: [
                (column.tokens, figure)
                for column, figure in zip(self.columns, row.cells, strict=True)
                if column.tokens is not None and isinstance(figure, int | float)
            ]
            for row in self.rows
            if row.line
        }


def about(run: Mapping[str, Any], ranks: int, command: str) -> dict[str, object]:
    """What a result says of a run with the facts `epmoe.bench.facts.this_run()`."""
    gpus = run["machine"]["gpus"]
    where = f"{ranks} × {gpus[0] if gpus else 'CPU'}"
    return {
        "where": where,
        "machine": where,
        "gpus": ranks if gpus else 0,
        "date": run["time"][:10],
        "commit": (run["commit"] or "0" * 7).removesuffix("-dirty"),
        "torch": run["versions"]["torch"],
        "command": command,
    }


def of_report(content: Mapping[str, Any], keys: Sequence[str] = ()) -> dict[str, object]:
    """The result of a file that `epmoe bench --json` wrote: a row for each side, case and key, a
    column for each T.

    Its title and caption are for a person to write.
    """
    found = content["results"]
    # Keys without a unit are words: who was measured, and how.
    texts = [key for key in found[0] if key not in content["units"]]
    tokens = sorted({result["tokens"] for result in found})
    # A row for all T of the same words and key.
    rows: dict[tuple[str, ...], dict[int, float]] = {}
    for key, result in itertools.product(keys or content["plotted"], found):
        if result.get(key) is not None:
            words = tuple(result[text] for text in texts)
            rows.setdefault((*words, key), {})[result["tokens"]] = figure(result[key])
    # Machine, date and commit come from the run.
    run = about(content, content["ranks"], content["command"])
    return run | {
        "title": f"{run['where']}: {content['benchmark']}",
        "caption": f"µs on the slowest rank, median; {content['routing']} routing.",
        "columns": [*({"name": text} for text in texts), {"name": "what"}, *columns(tokens)],
        "rows": [
            {"cells": [*words, *(times.get(T) for T in tokens)]} for words, times in rows.items()
        ],
        "notes": [
            f"{name} was left out: {reason}." for name, reason in content["left_out"].items()
        ],
    }


def columns(tokens: Sequence[int]) -> list[dict[str, object]]:
    """A column of times for each T."""
    return [
        {"name": f"{'' if i else 'T = '}{T}", "unit": "µs", "tokens": T}
        for i, T in enumerate(tokens)
    ]


def figure(us: float) -> float:
    """A time with the digits that are worth printing."""
    return round(us, 1) if us < 100 else round(us)


def write(path: Path, content: dict[str, object]) -> None:
    """Write a result. Raises pydantic.ValidationError, a ValueError, if it does not
    fit the schema.
    """
    Published.model_validate(content)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: Path = FOLDER) -> list[Published]:
    """The results of all JSON files in `folder`, most GPUs first, then by file name.

    Raises pydantic.ValidationError, a ValueError, if a file does not fit the schema.
    """
    results = [read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(results, key=lambda result: -result.gpus)


def read(path: Path) -> Published:
    """The result in one file."""
    return Published.model_validate(json.loads(path.read_text(encoding="utf-8")))


def main() -> None:
    """Write a result from the figures of `epmoe bench`."""
    figures, path = map(Path, sys.argv[1:3])
    # The figures are new,
    content = of_report(json.loads(figures.read_text(encoding="utf-8")), sys.argv[3:])
    # and the words that a person has written stay.
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        content |= {
            key: old[key]
            for key in ("title", "model", "caption", "notes", "asked", "plot", "panel")
            if key in old
        }
    write(path, content)


if __name__ == "__main__":
    main()
