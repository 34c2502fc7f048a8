"""Writes the HTML report of a run: one file, which loads no other file.

Charts are plain HTML, and a few lines of JavaScript show the values under the pointer. The report
of four models has about 100 KB. A charting library would add 4 MB of code that nobody can read, and
do the same.
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
    """Write the report of `results` to `path`. `about` describes the run, as the function `about`
    does. Raises OSError if `path` cannot be written.
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
    # Explain only the stages that any of the runs has.
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
    """The class of the headline's colour: "good", "failed", or "none" where nothing was checked."""
    if not all(result.passed for result in results):
        return "failed"
    return "good" if any(result.checks for result in results) else "none"


def about(configuration: Path, started: datetime) -> dict[str, str]:
    """Describe what this process has run, where, when, and with which versions.

    The run began at `started`, which has a time zone, and ends now. Paths outside the working
    directory are shortened to their last part.
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
    """Describe the processor, memory, GPUs and system of this machine in one line."""
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
    """List the versions of epmoe and of the libraries that it needs in one line."""
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
        failures = []
        for result in failed:
            outcomes = [_outcome(check) for check in result.checks if not check.passed]
            failures.append(f"{result.name} ({'; '.join(outcomes)})")
        return f"{len(failed)} of {len(results)} failed: {', '.join(failures)}"
    # If all runs have a baseline, they are runs of models, compared with a single process.
    first = results[0]
    ranks = first.placement.ep_size
    baselines = [result.baseline for result in results if result.baseline]
    if len(baselines) == len(results):
        errors = list[float]()
        for baseline in baselines:
            for rank_errors in baseline.logit_errors:
                errors += rank_errors
        models = f"{len(results)} of {len(results)} models" if len(results) > 1 else first.name
        generate = f"{first.processes} generate{'s' * (ranks == 1)}"
        error = max(errors, default=0.0)
        return f"{models}: {generate} the same tokens as one; logits agree within {error:.1e}"
    # Otherwise this was the run of a layer.
    outcomes = [_outcome(check) for result in results for check in result.checks]
    rounds = f"{first.rounds} round{'s' * (first.rounds != 1)}"
    what = f"{first.name}, {rounds} on {ranks} rank{'s' * (ranks != 1)}"
    return f"{what}: {', '.join(outcomes) or 'nothing was checked'}"


def glance(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """List the figures at the top of the report: the name of each, its value, and a remark."""
    # Add up counts over all runs, and find the range of sizes.
    models = [result.config.model for result in results]
    transport = "NVLink" if results[0].config.exchange.transport == "nvlink" else "shared memory"
    moved = sum(result.rows_moved for result in results)
    kept = sum(result.rows_kept for result in results)
    nbytes = sum(result.bytes_dispatched + result.bytes_combined for result in results)
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
        (
            "Moved between ranks",
            human_bytes(nbytes),
            f"{moved:,} rows there, as many sums back",
        ),
        ("Stayed on their rank", f"{kept:,} rows", "whose experts are on the token's own rank"),
    ]


def caution(results: Sequence[Result]) -> str:
    """Say what a reader must know before he compares the times. On GPUs there is nothing to say."""
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
    """Write the configuration with a line for each section. Keys without a value are left out."""
    lines = []
    for section, keys in config.model_dump(mode="json").items():
        values = []
        for key, value in keys.items():
            if value is not None:
                values.append(f"{key}: {without_folder(str(value))}")
        lines.append(f"{section}: {{{', '.join(values)}}}")
    return "\n".join(lines)


def _outcome(check: Check) -> str:
    """Write the outcome of a check: "error ≤ 1e-05" with the measured "7e-07" becomes "error 7e-07
    (limit 1e-05)".
    """
    what, _, limit = check.what.partition(" ≤ ")
    return f"{what} {check.measured} (limit {limit})" if limit else f"{what}: {check.measured}"


def _span(values: Iterable[int]) -> str:
    """Write the range of some numbers, as in "2 to 8". If all are equal, it is one number."""
    ordered = sorted(values)
    lowest = ordered[0]
    highest = ordered[-1]
    return f"{lowest:,}" if lowest == highest else f"{lowest:,} to {highest:,}"
