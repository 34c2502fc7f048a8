"""The HTML report of a run: one file, which loads nothing.

Charts are HTML, and a few lines of JavaScript show the values under the pointer: about 100 KB for
four models. A charting library would be 4 MB of code that nobody can read, for the same hover.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

import jinja2

from epmoe.bench import facts
from epmoe.cli import charts, tables
from epmoe.cli.console import command, human_bytes, human_seconds, without_folder
from epmoe.cli.result import STAGES, Check, Result, imbalance, mean_stages
from epmoe.config.config import EPConfig


def write_report(results: Sequence[Result], path: Path, about: dict[str, str]) -> None:
    """Write `results` of the run that `about` describes to `path`. Raises OSError if `path` cannot
    be written.
    """
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
        "times": tables.times,
        "class": lambda stage: stage.replace(" ", "-"),
    }
    # The stages that any run has.
    shown = set[str]()
    for result in results:
        shown |= result.seconds.keys()
        if result.baseline:
            shown |= mean_stages(result.baseline.stages).keys()
    html = environment.get_template("report.html.j2").render(
        results=results,
        about=about,
        charts=charts,
        tables=tables,
        imbalance=imbalance,
        headline=headline(results),
        verdict=_verdict(results),
        glance=glance(results),
        caution=caution(results),
        settings=settings,
        stages={stage: text for stage, text in STAGES.items() if stage in shown},
    )
    path.write_text(html, encoding="utf-8")


def _verdict(results: Sequence[Result]) -> str:
    """good, failed, or none where nothing was checked."""
    if not all(result.passed for result in results):
        return "failed"
    return "good" if any(result.checks for result in results) else "none"


def about(configuration: Path, started: datetime) -> dict[str, str]:
    """Describe what this process ran, where, when (from `started`, which has a time zone, until
    now) and with which versions.

    No path outside the working directory is repeated.
    """
    took = human_seconds((datetime.now().astimezone() - started).total_seconds())
    return {
        "Command": command(sys.argv[1:]),
        "Configuration": without_folder(str(configuration)),
        "Machine": machine(),
        "When": f"{started:%d %B %Y, %H:%M %Z}".lstrip("0") + f", took {took}",
        "Versions": versions(),
    }


def machine() -> str:
    """Describe processor, memory, GPUs and system of this machine in a line."""
    found = facts.machine()
    cores = found["cores"]
    gpus = found["gpus"]
    parts = [
        found["cpu"],
        f"{cores} core{'s' * (cores != 1)}",
        f"{human_bytes(found['memory_bytes'])} memory",
    ]
    parts += [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
    return " · ".join([*parts, f"{platform.system()} {platform.machine()}"])


def versions() -> str:
    """Versions of epmoe and of what it needs, in a line."""
    found = facts.versions()
    commit = facts.commit()
    if commit:
        short, _, dirty = commit.partition("-")
        changes = " with changes" if dirty else ""
        found["epmoe"] = f"{found['epmoe']} at {short[:9]}{changes}"
    with suppress(importlib.metadata.PackageNotFoundError):
        found["transformers"] = importlib.metadata.version("transformers")
    return " · ".join(f"{name} {version}" for name, version in found.items() if version)


def headline(results: Sequence[Result]) -> str:
    """Say the outcome in one line."""
    failed = [result for result in results if not result.passed]
    if failed:
        whats = []
        for result in failed:
            outcomes = [_outcome(check) for check in result.checks if not check.passed]
            whats.append(f"{result.name} ({'; '.join(outcomes)})")
        return f"{len(failed)} of {len(results)} failed: {', '.join(whats)}"
    # All runs were of models, which one process has run, too.
    first = results[0]
    ranks = first.placement.ep_size
    baselines = [result.baseline for result in results if result.baseline]
    if len(baselines) == len(results):
        errors = list[float]()
        for baseline in baselines:
            for of_rank in baseline.logit_errors:
                errors += of_rank
        models = f"{len(results)} of {len(results)} models" if len(results) > 1 else first.name
        generate = f"{first.processes} generate{'s' * (ranks == 1)}"
        error = max(errors, default=0.0)
        return f"{models}: {generate} the same tokens as one; logits agree within {error:.1e}"
    # A run was of a layer.
    outcomes = [_outcome(check) for result in results for check in result.checks]
    rounds = f"{first.rounds} round{'s' * (first.rounds != 1)}"
    what = f"{first.name}, {rounds} on {ranks} rank{'s' * (ranks != 1)}"
    return f"{what}: {', '.join(outcomes) or 'nothing was checked'}"


def glance(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """The figures at the top of the report: what each is, its value, and a remark."""
    # Sums and spans over all runs.
    models = [result.config.model for result in results]
    transport = "NVLink" if results[0].config.exchange.transport == "nvlink" else "shared memory"
    moved = sum(one.rows_moved for one in results)
    kept = sum(one.rows_kept for one in results)
    wire = sum(one.bytes_dispatched + one.bytes_combined for one in results)
    experts = _span(model.num_experts for model in models)
    dtypes = ", ".join(dict.fromkeys(model.dtype for model in models))
    return [
        (
            "Ranks",
            f"{results[0].placement.ep_size}",
            f"share {experts} experts a layer, over {transport}",
        ),
        ("dtype", dtypes, f"rows of {_span(model.hidden_size for model in models)} values"),
        (
            "Experts per token",
            f"K = {_span(model.num_experts_per_tok for model in models)}",
            "chosen by the router",
        ),
        ("Moved between ranks", human_bytes(wire), f"{moved:,} rows there, as many sums back"),
        ("Stayed on their rank", f"{kept:,} rows", "whose experts are on the token's own rank"),
    ]


def caution(results: Sequence[Result]) -> str:
    """Say what a reader of the times must know."""
    if results[0].config.exchange.transport == "nvlink":
        return ""
    ranks = results[0].placement.ep_size
    cores = len(os.sched_getaffinity(0))
    shared = "All is on the CPU"
    if ranks > cores:
        shared = f"{ranks} processes take turns on {cores} core{'s' * (cores > 1)}"
    compared = ""
    if results[0].baseline and ranks > 1:
        compared = " One process, which generates one text, has the machine to itself."
    return f"{shared}: the times say where the time goes, not what a GPU would need.{compared}"


def settings(config: EPConfig) -> str:
    """The configuration, a line for each section, without keys that are unset."""
    lines = []
    for section, keys in config.model_dump(mode="json").items():
        values = []
        for key, value in keys.items():
            if value is not None:
                values.append(f"{key}: {without_folder(str(value))}")
        lines.append(f"{section}: {{{', '.join(values)}}}")
    return "\n".join(lines)


def _outcome(check: Check) -> str:
    """ "error ≤ 1e-05" and "7e-07" → "error 7e-07 (limit 1e-05)"."""
    what, _, limit = check.what.partition(" ≤ ")
    return f"{what} {check.measured} (limit {limit})" if limit else f"{what}: {check.measured}"


def _span(values: Iterable[int]) -> str:
    """All equal → "24", otherwise "2 to 8"."""
    found = sorted(values)
    return f"{found[0]:,}" if found[0] == found[-1] else f"{found[0]:,} to {found[-1]:,}"
