"""Local checkpoints for `epmoe run --model PATH`.

`check` finds out whether a checkpoint can run, before any weight is loaded. `tokenizer_of` loads
its tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from epmoe.cli.console import UserError, human_bytes
from epmoe.config.config import EPConfig
from epmoe.exchange.window import available_memory_bytes

Encode = Callable[[str], list[int]]
"""Turns a text into the ids of its tokens."""
Decode = Callable[[list[int]], str]
"""Turns the ids of tokens into a text."""


def check(folder: Path, config: EPConfig) -> None:
    """Raise UserError if the checkpoint in `folder` cannot run as `config` says. The message is one
    sentence.

    It reads `config.json` only. A model runs in fp32. Each rank holds its share of the experts'
    weights, or all weights of a model that transformers cannot spread.
    """
    # The folder must have a model and its weights.
    logging.set_verbosity_error()
    if not (folder / "config.json").is_file() or not [*folder.glob("*.safetensors")]:
        raise UserError(f"`--model` {folder}: has no config.json or no weights (*.safetensors)")
    # transformers must know the model. On the meta device it takes no memory.
    try:
        with torch.device("meta"):
            known = AutoConfig.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    except Exception as error:
        # A wrong value in config.json may lead to an exception of any type.
        text = " ".join(str(error).split())
        raise UserError(
            f"`--model` {folder}: transformers cannot make the model: {text[:200]}"
        ) from None
    # The experts must divide evenly over the ranks.
    ranks = config.topology.ep_size
    architecture = type(model).__name__
    numbers = set()
    for name, module in model.named_modules():
        if _are_experts(name, module):
            numbers.add(module.num_experts)
    if not numbers:
        raise UserError(
            f"`--model` {folder}: {architecture} has no experts that transformers can spread over "
            "ranks"
        )
    if len(numbers) > 1 or any(number % ranks for number in numbers):
        raise UserError(
            f"`--model` {folder}: its experts must divide evenly over {ranks} ranks, got "
            f"{sorted(numbers)}"
        )
    # This machine must have memory for the model: once, or once for each rank if transformers
    # cannot spread it. On GPUs the weights lie elsewhere.
    needed = 4 * sum(parameter.numel() for parameter in model.parameters())
    if not getattr(model, "ep_plan", None):
        needed *= ranks
    available = available_memory_bytes()
    if config.exchange.transport != "nvlink" and needed > available:
        raise UserError(
            f"`--model` {folder}: {architecture} needs {human_bytes(needed)} in fp32, and this "
            f"machine has {human_bytes(available)} available"
        )


def tokenizer_of(folder: Path, vocabulary: int) -> tuple[Encode, Decode]:
    """Load the tokenizer in `folder`. Returns two functions: one from text to ids, and one back.

    A folder without a tokenizer gets a substitute for a model with `vocabulary` tokens. It takes
    the bytes of a text as ids, and writes ids as numbers.
    """
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if any((folder / name).exists() for name in files):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer.encode, tokenizer.decode

    def encode(text: str) -> list[int]:
        return [byte % vocabulary for byte in text.encode()]

    def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    return encode, decode


def _are_experts(name: str, module: nn.Module) -> bool:
    """Whether a module is one whose computation transformers lets an integration such as ours
    replace. `name` is its name in the model.
    """
    return (
        name.rpartition(".")[2] == "experts"
        and hasattr(module, "has_gate")
        and hasattr(module, "num_experts")
    )
