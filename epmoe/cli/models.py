"""`epmoe run --model`: real architectures of transformers generate text, compared with a single process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from epmoe.cli.console import UserError, console
from epmoe.cli.result import Check, Result
from epmoe.cli.tables import show, summarise
from epmoe.config import EPConfig
from epmoe.placement import Placement

if TYPE_CHECKING:
    from epmoe.integrations.demo import ModelResult


class Model(StrEnum):
    """Names of architectures in transformers, and `all`."""

    QWEN3_MOE = "qwen3_moe"
    MIXTRAL = "mixtral"
    DEEPSEEK_V3 = "deepseek_v3"
    GPT_OSS = "gpt_oss"
    ALL = "all"


LOGIT_TOLERANCE = 1e-5  # absolute; the models run in fp32


def run_models(config: EPConfig, names: Sequence[Model], steps: int, seed: int) -> list[Result]:
    """Run each model over all ranks and print its result; the Results are the same on every rank."""
    try:
        from epmoe.integrations.demo import run_model
        from epmoe.integrations.transformers import configure
    except ImportError as error:
        raise UserError(f"`--model` needs transformers: pip install 'epmoe[hf]' ({error})") from None
    chosen = [name for name in Model if name is not Model.ALL and (name in names or Model.ALL in names)]
    exchange = config.exchange
    configure(
        max_num_tokens_per_rank=config.capacity.max_num_tokens_per_rank,
        timeout_s=exchange.timeout_s,
        warmup_timeout_s=exchange.warmup_timeout_s,
    )
    console.print(
        "Models of transformers with random weights, each run twice: in one process, then with its experts spread "
        f"over {config.topology.ep_size} processes, which exchange tokens through epmoe. The generated text has no "
        "meaning; the check is that both runs generate the same tokens.\n"
    )
    results = []
    for number, name in enumerate(chosen, start=1):
        console.rule(f"[bold]{name}[/] ({number} of {len(chosen)})")
        columns = (TextColumn("  {task.description:<36}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            stages = {
                "reference": progress.add_task("one process", total=steps),
                "distributed": progress.add_task(f"experts on {config.topology.ep_size} ranks", total=steps),
            }

            def report(
                stage: str, done: int, total: int, progress: Progress = progress, stages: dict[str, TaskID] = stages
            ) -> None:
                progress.update(stages[stage], completed=done, total=total)

            outcome = run_model(name, max_new_tokens=steps, seed=seed, progress=report)
        results.append(_result(outcome, config.topology.ep_size, steps))
        show(results[-1])
    summarise(results)
    return results


def _result(outcome: ModelResult, ranks: int, steps: int) -> Result:
    health = [dataclasses.asdict(one) for one in outcome.health]
    error = outcome.max_logit_error
    return Result(
        name=outcome.name,
        facts={
            "architecture": outcome.architecture,
            "experts": f"{len(outcome.tokens_per_expert)} on {ranks} ranks",
            "generated": f"{steps} tokens a rank",
        },
        checks=[
            Check(
                "same tokens as one process",
                "yes" if outcome.tokens_equal else "no",
                outcome.tokens_equal,
            ),
            Check(f"logit error ≤ {LOGIT_TOLERANCE:.0e}", f"{error:.1e}", error <= LOGIT_TOLERANCE),
        ],
        placement=Placement.build(len(outcome.tokens_per_expert), ranks),
        traffic=outcome.traffic,
        load=outcome.tokens_per_expert,
        seconds={stage: sum(one[stage] for one in outcome.seconds) / ranks for stage in outcome.seconds[0]},
        rounds=steps,
        unit="token",
        health={key: sum(one[key] for one in health) for key, value in health[0].items() if isinstance(value, int)},
        texts=list(zip(outcome.prompts, outcome.texts, strict=True)),
    )
