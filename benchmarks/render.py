"""Renders BENCHMARKS.md, its plots and the table of README.md from the JSON files: `make
benchmarks-report`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.results import FOLDER, Figure, Published, TableColumn, about, load, read
from benchmarks.results import write as write_result
from epmoe.bench import facts
from epmoe.bench.plot import draw

MARKDOWN = "BENCHMARKS.md"
README = "README.md"


class Plot(NamedTuple):
    """The results of a `Published.plot`, with a panel for each that has one. Rows with a `line` are
    its lines.
    """

    file: str
    title: str
    alt: str
    bold: str  # the line with its figures


PLOTS = {
    "rounds": Plot(
        "benchmarks/rounds.png",
        "One round (dispatch + combine) of bf16 rows: hidden size 7168, 256 experts, top-8",
        "The round by T on four and on two H200: epmoe, FlashInfer, DeepEP and the floor",
        "epmoe (expert-major rows)",
    ),
    "layer": Plot(
        "benchmarks/layer.png",
        "A whole layer: route, dispatch, experts and combine",
        (
            "The layer by T on two H100: epmoe in fp8 and bf16, DeepGEMM's MegaMoE, FlashInfer and "
            "the floor"
        ),
        "epmoe, fp8",
    ),
}

_HEADER = (
    "# Benchmarks",
    "",
    "The newest result of each machine and subject; a *round* is one dispatch and one combine, T "
    "the number of tokens a rank. [docs/experiments.md](docs/experiments.md) has what bounds the "
    "kernels, what helped and what was dropped. `make benchmarks-report` writes this page from "
    "[benchmarks/](benchmarks), whose files have more rows: edit those.",
    "",
    "- **Times** on GPUs come from replays of a CUDA graph: the median, of the slowest rank. On "
    "the CPU they are medians of samples of rounds back to back. Between runs and machines most "
    "figures differ by up to 3%.",
    "- **Outputs** of epmoe and of the floor are poisoned (filled with NaN) before the replays and "
    "compared after. The **floor** is one kernel each way that only stores the rows that must "
    "cross, raises flags and waits.",
    "- **Expert-major** rows go straight into a grouped GEMM. **Rank-major** rows still need a "
    "permute before the experts and a finalize after them, which their times do not include. This "
    "project measured every row, peers included, unless a table names somebody else.",
    "",
    " ".join(f"![{plot.alt}]({plot.file})" for plot in PLOTS.values()),
    "",
)

_README_TOKENS = (1, 16, 64, 128, 512, 4096)

SECTIONS = (
    ("h200x2_layer",),
    ("h100x2_layer_qwen3", "h100x2_layer_deepseek_v3", "h100x2_layer_gpt_oss"),
    ("h200x1_four_bits",),
    ("h200x4_exchange",),
    ("h200x2_exchange",),
    ("h100x2_models",),
    ("h200x2_training_layer",),
    ("h200x1_training_layer",),
    ("h100x2_transformers",),
    ("h100x2_vllm",),
    ("cpu_exchange",),
)
"""The tables of BENCHMARKS.md, a tuple of result files for each; several in one table are results
of one subject.
"""


def markdown(sections: Sequence[Sequence[Published]]) -> str:
    """The text of BENCHMARKS.md, a table for each sequence of results."""
    lines = [*_HEADER]
    # A table for each subject, then what missed its target.
    for results in sections:
        lines += [*_section(results), ""]
    shown = [result for results in sections for result in results]
    lines += _missed(shown)
    return "\n".join(lines) + "\n"


def sections() -> list[list[Published]]:
    """The results of `SECTIONS`."""
    return [[read(FOLDER / f"{name}.json") for name in names] for names in SECTIONS]


def readme() -> str:
    """The text of README.md, whose table has layers of two models on two H200; the
    fastest is bold.
    """
    lines = list(map(dict, read(FOLDER / "h200x2_layer.json").lines.values()))
    models = lines[:2], lines[2:]  # ours and MegaMoE of each
    # The least of each model is bold.
    rows = []
    for T in _README_TOKENS:
        cells = [f"{T}"]
        for of_model in models:
            least = min(line[T] for line in of_model)
            cells += [f"**{line[T]}**" if line[T] == least else f"{line[T]}" for line in of_model]
        rows.append(_line(cells) + "\n")
    # The lines of numbers are replaced, the words around them stay.
    text = (FOLDER.parent / README).read_text(encoding="utf-8")
    return re.sub(r"(^\| \d+ \| [*\d].*\n)+", "".join(rows), text, count=1, flags=re.MULTILINE)


def write(root: Path) -> None:
    """Write BENCHMARKS.md, README.md and the plots under `root`."""
    (root / "benchmarks").mkdir(parents=True, exist_ok=True)
    (root / MARKDOWN).write_text(markdown(sections()), encoding="utf-8")
    (root / README).write_text(readme(), encoding="utf-8")
    # A plot has a panel for each result that names one.
    for name, plot in PLOTS.items():
        panels = {
            result.panel: result.lines for result in load() if result.panel and result.plot == name
        }
        draw(root / plot.file, plot.title, "µs (lower is better)", panels, plot.bold)


def publish(
    script: str,
    subject: str,
    caption: str,
    columns: Sequence[object],
    rows: Sequence[Sequence[object]],
    file: Path | None,
) -> None:
    """Print what a run of `torchrun … script` has measured, and write it to `file`, if one is
    named.

    columns: as in the JSON file; rows: their cells. Raises pydantic.ValidationError, a ValueError,
    if they do not fit.
    """
    ranks = dist.get_world_size()
    # What every file says of its run, and then what this one has measured.
    content = about(
        facts.this_run(), ranks, f"torchrun --standalone --nproc-per-node {ranks} {script}"
    )
    content |= {"title": f"{content['where']}: {subject}", "caption": caption}
    content |= {"columns": columns, "rows": [{"cells": cells} for cells in rows]}
    # The table is shown also where no file is named.
    print("\n".join(_section([Published.model_validate(content)])))
    if file:
        write_result(file, content)


def _section(results: Sequence[Published]) -> Iterator[str]:
    """A heading, where the figures come from, and the table of results that share it."""
    first = results[0]
    # Results of one subject share a table: its columns are those of all of them.
    columns = tuple(dict.fromkeys(column for result in results for column in result.columns))
    units = {column.unit for column in columns if column.unit}
    # The heading, and below it where the figures come from.
    yield f"## {first.title}"
    texts = [text for result in results for text in (result.caption, *result.notes)]
    machine = f"{first.machine}, torch {first.torch}."
    yield " ".join([machine, *map(_provenance, results), *dict.fromkeys(texts)]) + "\n"
    # A first column names the model where the results have several.
    models = any(result.model for result in results)
    yield _line(["model"] * models + [_heading(column, units) for column in columns])
    yield _line(["---"] * models + ["--:" if column.unit else "---" for column in columns])
    # Details stay in the file.
    for result in results:
        for row in result.rows:
            if not row.detail:
                cells = dict(zip(result.columns, row.cells, strict=True))
                yield _line(
                    [result.model] * models + [_cell(cells.get(column)) for column in columns]
                )


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
    yield (
        f"Of {len(asked)} targets of these results {len(asked) - len(missed)} were reached. "
        "Missed were:\n"
    )
    yield _line(["where", "asked", "measured", "what bounds it"])
    yield _line(["---"] * 4)
    # Equal figures are said once.
    for result, target in missed:
        wanted, got = (
            " / ".join(map(_cell, figures)) for figures in (target.asked, target.measured)
        )
        if len(set(target.asked)) == 1:
            wanted = _cell(target.asked[0])
        subject = f"{result.model}: " if result.model else ""
        what = f"{subject}{target.what}: {target.limit} {wanted} {target.unit}"
        yield _line([result.where, what, got, target.bound_by or "–"])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write all of them into the repository, or into another folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--into",
        type=Path,
        default=FOLDER.parent,
        help="folder to write to (default: the repository)",
    )
    write(parser.parse_args().into)


if __name__ == "__main__":
    main()
