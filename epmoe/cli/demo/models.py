"""The part of `epmoe run --model` that the command calls: it checks the models, runs one after the
other, and prints what each has shown.

This file imports transformers only where it needs it, so that the command can name it if it is
missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from epmoe.cli.console import UserError, console, require
from epmoe.cli.demo.tiny import MODELS
from epmoe.cli.result import Result
from epmoe.cli.tables import show, summarise
from epmoe.config.config import EPConfig

NAMES = (*MODELS, "all")
"""The values of `--model` that are no folders: the tiny models, and all of them."""


def check_models(config: EPConfig, names: Sequence[str]) -> None:
    """Raise UserError if one of the models cannot run.

    Each of `names` must be one of `NAMES`, or a folder with a checkpoint that fits into the memory
    of this machine.
    """
    require("transformers", "`--model`")
    for name in names:
        if name in NAMES:
            continue
        if not Path(name).is_dir():
            raise UserError(
                f"`--model` {name!r} is not one of {', '.join(NAMES)}, nor a folder with a "
                "checkpoint"
            )
        from epmoe.cli.demo import checkpoint

        checkpoint.check(Path(name), config)


def run_models(config: EPConfig, names: Sequence[str], steps: int, seed: int) -> list[Result]:
    """Run each model over all ranks, and print its result.

    `names` are values of `--model`, and each rank generates `steps` tokens. `seed` draws the
    weights of tiny models. Returns the Results, which are the same on every rank.
    """
    require("transformers", "`--model`")
    try:
        from epmoe.cli.demo.generate import run_model
        from epmoe.integrations.transformers import configure
    except ImportError as error:
        raise UserError(
            f"`--model` needs transformers: pip install 'epmoe[hf]' ({error})"
        ) from None
    # Tiny models come first and checkpoints second. A model that is named twice runs once.
    chosen = [name for name in MODELS if name in names or "all" in names]
    checkpoints = [name for name in dict.fromkeys(names) if name not in NAMES]
    # Give the settings of the configuration to the exchange that the models will use.
    exchange = config.exchange
    configure(
        max_num_tokens_per_rank=config.capacity.max_num_tokens_per_rank,
        timeout_s=exchange.timeout_s,
        warmup_timeout_s=exchange.warmup_timeout_s,
        transport=exchange.transport,
    )
    # Say what will happen.
    console.print(
        "Each model generates text twice: in one process, then with its experts spread over "
        f"{config.topology.ep_size} processes, which exchange tokens through epmoe. The check is "
        "that both runs generate the same tokens."
    )
    if chosen:
        console.print(
            f"[bold]{', '.join(chosen)}: the weights are random and the models tiny[/] (3 layers, "
            "hidden size 96, 24 experts). The words mean nothing; --model FOLDER runs a checkpoint "
            "of your own."
        )
    console.print()
    results = []
    # Run one model after the other, and show each outcome at once.
    for number, name in enumerate([*chosen, *checkpoints], start=1):
        console.rule(
            f"[bold]{Path(name).resolve().name}[/] ({number} of {len(chosen) + len(checkpoints)})"
        )
        with console.status(
            f"generating {steps} tokens in one process, then on {config.topology.ep_size} ranks"
        ):
            results.append(run_model(name, max_new_tokens=steps, seed=seed))
        show(results[-1])
    summarise(results)
    return results
