"""Renders BENCHMARKS.md, its plots and the table of README.md from the JSON files: `make benchmarks-report`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.plot import PLOTS, draw
from benchmarks.results import FOLDER, Figure, Published, TableColumn, load, read
from benchmarks.results import write as write_result

MARKDOWN, README = "BENCHMARKS.md", "README.md"

_HEADER = (
    "# Benchmarks",
    "",
    "The newest result of each machine and subject; a *round* is one dispatch and one combine, T the number of tokens "
    "a rank. [docs/experiments.md](docs/experiments.md) has what bounds the kernels, what helped and what was dropped. "
    "`make benchmarks-report` writes this page from [benchmarks/](benchmarks), whose files have more rows: edit those.",
    "",
    "- **Times** on GPUs come from replays of a CUDA graph: the median, of the slowest rank. On the CPU they are "
    "medians of samples of rounds back to back. Between runs and machines most figures differ by up to 3%.",
    "- **Outputs** of epmoe and of the floor are poisoned (filled with NaN) before the replays and compared after. The "
    "**floor** is one kernel each way that only stores the rows that must cross, raises flags and waits.",
    "- **Expert-major** rows go straight into a grouped GEMM. **Rank-major** rows still need a permute before the "
    "experts and a finalize after them, which their times do not include. This project measured every row, peers "
    "included, unless a table names somebody else.",
    "",
    " ".join(f"![{plot.alt}]({plot.file})" for plot in PLOTS.values()),
    "",
)

_README_TOKENS = (1, 4, 16, 64, 128, 512, 1024, 4096)

SECTIONS = (
    ("h200x2_layer",),
    ("h100x2_layer_qwen3", "h100x2_layer_deepseek_v3", "h100x2_layer_gpt_oss"),
    ("h200x4_exchange",),
    ("h200x2_exchange",),
    ("h100x2_models",),
    ("h200x2_training_layer",),
    ("h100x2_training",),
    ("h100x2_transformers",),
    ("h100x2_vllm",),
    ("cpu_exchange",),
)
"""The tables of BENCHMARKS.md, a tuple of result files for each; several in one table are results of one subject."""


def markdown(sections: Sequence[Sequence[Published]]) -> str:
    """The text of BENCHMARKS.md, a table for each sequence of results."""
    lines = [*_HEADER]
    for results in sections:
        lines += [*_section(results), ""]
    shown = [result for results in sections for result in results]
    lines += [*_missed(shown), "", *_more(shown)]
    return "\n".join(lines) + "\n"


def sections() -> list[list[Published]]:
    """The results of `SECTIONS`."""
    return [[read(FOLDER / f"{name}.json") for name in names] for names in SECTIONS]


def readme() -> str:
    """The text of README.md, whose table has layers of two models on two H100; the faster one is bold."""
    layers = [read(FOLDER / f"h100x2_layer_{model}.json") for model in ("qwen3", "deepseek_v3")]
    models = [[dict(layer.line(name)) for name in ("epmoe", "mega_moe")] for layer in layers]
    rows = []
    for T in _README_TOKENS:
        cells = [f"{T}"]
        for lines in models:
            least = min(line[T] for line in lines)
            cells += [f"**{line[T]}**" if line[T] == least else f"{line[T]}" for line in lines]
        rows.append(_line(cells) + "\n")
    text = (FOLDER.parent / README).read_text(encoding="utf-8")
    return re.sub(r"(^\| \d+ \| [*\d].*\n)+", "".join(rows), text, count=1, flags=re.MULTILINE)


def write(root: Path) -> None:
    """Write BENCHMARKS.md, README.md and the plots under `root`."""
    (root / "benchmarks").mkdir(parents=True, exist_ok=True)
    (root / MARKDOWN).write_text(markdown(sections()), encoding="utf-8")
    (root / README).write_text(readme(), encoding="utf-8")
    for plot in PLOTS.values():
        draw(plot, load(), root / plot.file)


def publish(content: dict[str, object]) -> None:
    """Print what a benchmark has measured as its section, and write it to the file that the command line names, if any.

    Raises pydantic.ValidationError, a ValueError, if `content` does not fit the schema.
    """
    print("\n".join(_section([Published.model_validate(content)])))
    if len(sys.argv) > 1:
        write_result(Path(sys.argv[1]), content)


def _section(results: Sequence[Published]) -> Iterator[str]:
    """A heading, where the figures come from, and the table of results that share it."""
    first = results[0]
    columns = tuple(dict.fromkeys(column for result in results for column in result.columns))
    units = {unit for result in results for unit in result.units}
    yield f"## {first.title}"
    texts = [text for result in results for text in (result.caption, *result.notes)]
    machine = f"{first.machine}, torch {first.torch}."
    yield " ".join([machine, *map(_provenance, results), *dict.fromkeys(texts)]) + "\n"
    models = any(result.model for result in results)
    yield _line(["model"] * models + [_heading(column, units) for column in columns])
    yield _line(["---"] * models + ["--:" if column.unit else "---" for column in columns])
    for result in results:
        for row in result.rows:
            if not row.detail:
                cells = dict(zip(result.columns, row.cells, strict=True))
                yield _line([result.model] * models + [_cell(cells.get(column)) for column in columns])


def _provenance(result: Published) -> str:
    of_model = f"{result.model}: " if result.model else ""
    return f"{of_model}{result.date}, commit `{result.commit}`: `{result.command}`."


def _heading(column: TableColumn, units: set[str]) -> str:
    """The name, and the unit unless the caption's is the only one."""
    return f"{column.name}, {column.unit}" if column.unit and len(units) > 1 else column.name


def _cell(cell: Figure | str | None) -> str:
    if cell is None:
        return "–"
    return cell if isinstance(cell, str) else f"{cell:,}" if cell >= 10_000 else f"{cell}"


def _missed(results: Sequence[Published]) -> Iterator[str]:
    """The figures that were to be reached and were not, and what bounds them."""
    asked = [(result, asked) for result in results for asked in result.asked]
    missed = [(result, asked) for result, asked in asked if not asked.reached]
    yield "## Missed targets"
    yield f"Of {len(asked)} targets of these results {len(asked) - len(missed)} were reached. Missed were:\n"
    yield _line(["where", "asked", "measured", "what bounds it"])
    yield _line(["---"] * 4)
    for result, target in missed:
        wanted, got = (" / ".join(map(_cell, figures)) for figures in (target.asked, target.measured))
        if len(set(target.asked)) == 1:
            wanted = _cell(target.asked[0])
        subject = f"{result.model}: " if result.model else ""
        what = f"{subject}{target.what}: {target.limit} {wanted} {target.unit}"
        yield _line([result.where, what, got, target.bound_by or "–"])


def _more(shown: Sequence[Published]) -> Iterator[str]:
    """Links to the results that have no table here."""
    results = {path.name: read(path) for path in sorted(FOLDER.glob("*.json"))}
    links = [
        f"[{result.title}]({FOLDER.name}/{name}) ({result.date})"
        for name, result in results.items()
        if result not in shown
    ]
    yield f"Older results, and subjects that other pages tell: {', '.join(links)}."


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write all of them into the repository, or into another folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=FOLDER.parent, help="folder to write to (default: the repository)")
    write(parser.parse_args().into)


if __name__ == "__main__":
    main()
