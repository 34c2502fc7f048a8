"""The HTML report of a run: one file, which loads nothing.

Charts are HTML and small SVGs, and a few lines of JavaScript show the values under the pointer: about 100 KB for four
models. A charting library would be 4 MB of code that nobody can read, for the same hover.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import jinja2

from epmoe.cli import charts
from epmoe.cli.about import About, without_folder
from epmoe.cli.console import human_bytes, human_seconds
from epmoe.cli.result import STAGES, Check, Result, imbalance
from epmoe.config.config import EPConfig


def write_report(results: Sequence[Result], path: Path, about: About) -> None:
    """Write `results` of the run that `about` describes to `path`. Raises OSError if `path` cannot be written."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("epmoe.cli", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "seconds": partial(human_seconds, zeros=True),
        "bytes": human_bytes,
        "count": lambda value: f"{value:,}",
        "error": lambda value: f"{value:.1e}",
        "share": lambda value: f"{value:.0%}" if value >= 0.01 or not value else "<1%",
        "times": lambda value: "–" if value is None else f"{value:.2f}×",
        "class": lambda stage: stage.replace(" ", "-"),
    }
    html = environment.get_template("report.html.j2").render(
        results=results,
        about=about,
        charts=charts,
        imbalance=imbalance,
        headline=headline(results),
        verdict="failed"
        if not all(one.passed for one in results)
        else "good"
        if any(one.checks for one in results)
        else "none",
        glance=glance(results),
        caution=caution(results, about),
        settings=settings,
        stages={name: text for name, text in STAGES.items() if any(_has(result, name) for result in results)},
    )
    path.write_text(html, encoding="utf-8")


def headline(results: Sequence[Result]) -> str:
    """The outcome in one line."""
    failed = [result for result in results if not result.passed]
    if failed:
        whats = [
            f"{one.name} ({'; '.join(_outcome(check) for check in one.checks if not check.passed)})" for one in failed
        ]
        return f"{len(failed)} of {len(results)} failed: {', '.join(whats)}"
    ranks, rounds = results[0].placement.ep_size, results[0].rounds
    baselines = [result.baseline for result in results if result.baseline]
    if len(baselines) == len(results):
        error = max((error for one in baselines for errors in one.logit_errors for error in errors), default=0.0)
        models = f"{len(results)} of {len(results)} models" if len(results) > 1 else results[0].name
        generate = f"{ranks} processes generate" if ranks > 1 else "1 process generates"
        return f"{models}: {generate} the same tokens as one; logits agree within {error:.1e}"
    outcomes = [_outcome(check) for result in results for check in result.checks]
    what = f"{results[0].name}, {rounds} round{'s' * (rounds != 1)} on {ranks} rank{'s' * (ranks != 1)}"
    return f"{what}: {', '.join(outcomes) or 'nothing was checked'}"


def glance(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """The figures at the top: (what, value, remark)."""
    configs = [result.config for result in results]
    model = [config.model for config in configs]
    ranks = results[0].placement.ep_size
    transport = "NVLink" if configs[0].exchange.transport == "nvlink" else "shared memory"
    moved, kept = sum(one.rows_moved for one in results), sum(one.rows_kept for one in results)
    wire = sum(one.bytes_dispatched + one.bytes_combined for one in results)
    return [
        ("Ranks", f"{ranks}", f"share {_span(one.num_experts for one in model)} experts a layer, over {transport}"),
        ("dtype", _words(one.dtype for one in model), f"rows of {_span(one.hidden_size for one in model)} values"),
        ("Experts per token", f"K = {_span(one.num_experts_per_tok for one in model)}", "chosen by the router"),
        ("Moved between ranks", human_bytes(wire), f"{moved:,} rows there, as many sums back"),
        ("Stayed on their rank", f"{kept:,} rows", "whose experts are on the token's own rank"),
    ]


def caution(results: Sequence[Result], about: About) -> str:
    """What a reader of the times must know."""
    if results[0].config.exchange.transport == "nvlink":
        return ""
    ranks = results[0].placement.ep_size
    turns = (
        f"{ranks} processes take turns on {about.cores} core{'s' * (about.cores > 1)}"
        if ranks > about.cores
        else "All of it runs on the CPU"
    )
    compared = ""
    if results[0].baseline and ranks > 1:
        compared = (
            f" One process is there to check the tokens, not to compare the times: it generates one text and has the "
            f"machine to itself, while the {ranks} generate {ranks} texts at once and wait for each other."
        )
    return f"{turns}: the times say where the time goes, not what a GPU would need.{compared}"


def _outcome(check: Check) -> str:
    """ "error ≤ 1e-05" and "7e-07" → "error 7e-07 (limit 1e-05)"."""
    what, _, limit = check.what.partition(" ≤ ")
    return f"{what} {check.measured} (limit {limit})" if limit else f"{what}: {check.measured}"


def settings(config: EPConfig) -> str:
    """The configuration in YAML, a line for each section."""
    lines = []
    for section, keys in config.model_dump(mode="json").items():
        values = [f"{key}: {without_folder(str(value))}" for key, value in keys.items() if value is not None]
        lines.append(f"{section}: {{{', '.join(values)}}}")
    return "\n".join(lines)


def _has(result: Result, stage: str) -> bool:
    ranks = [*result.stages, *(result.baseline.stages if result.baseline else ())]
    return any(stage in one for one in ranks)


def _span(values: Iterable[int]) -> str:
    """All equal → "24", otherwise "2 to 8"."""
    found = sorted(values)
    return f"{found[0]:,}" if found[0] == found[-1] else f"{found[0]:,} to {found[-1]:,}"


def _words(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
