"""Local checkpoints for `epmoe run --model PATH`: whether they can run, before anything is loaded;
their tokenizer.
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
Decode = Callable[[list[int]], str]


def check(folder: Path, config: EPConfig) -> None:
    """Raise UserError, in one sentence, if the checkpoint in `folder` cannot run as `config` says;
    reads config.json.

    Every rank holds its share of the weights, in fp32; or all of them where transformers cannot
    spread them.
    """
    logging.set_verbosity_error()
    if not (folder / "config.json").is_file() or not [*folder.glob("*.safetensors")]:
        raise UserError(f"`--model` {folder}: has no config.json or no weights (*.safetensors)")
    try:
        with torch.device("meta"):
            known = AutoConfig.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    except Exception as error:
        # transformers raises whatever a wrong value leads to.
        text = " ".join(str(error).split())
        raise UserError(
            f"`--model` {folder}: transformers cannot make the model: {text[:200]}"
        ) from None
    # Its experts divide over the ranks.
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
    # Memory holds it: once, or on each rank where transformers cannot spread it.
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
    """Load the functions of the tokenizer in `folder`. Without one, ids are bytes of the text, and
    are shown as numbers.
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
    """Whether transformers lets another function compute this module, as `epmoe` does."""
    return (
        name.rpartition(".")[2] == "experts"
        and hasattr(module, "has_gate")
        and hasattr(module, "num_experts")
    )
