"""Local checkpoints for `epmoe run --model PATH`: what they need, before anything is loaded, and their tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


class Checkpoint(NamedTuple):
    """A model in a local folder, without its weights."""

    architecture: str
    num_experts: int
    """of a layer"""
    fp32_bytes: int
    """of all weights"""
    shares_weights: bool
    """whether transformers can spread the weights over the ranks; else each rank holds all"""


def inspect(folder: Path, ranks: int) -> Checkpoint:
    """What the checkpoint in `folder` holds, whose experts shall be spread over `ranks`. Only config.json is read.

    Raises ValueError if it cannot run here; the message says why, in one sentence.
    """
    logging.set_verbosity_error()
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: has no config.json, as a checkpoint of transformers has")
    if not [*folder.glob("*.safetensors")]:
        raise ValueError(f"{folder}: has no weights (*.safetensors)")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # transformers raises whatever a wrong value leads to
        text = " ".join(str(error).split())
        raise ValueError(f"{folder}: transformers cannot make the model: {text[:200]}") from None
    architecture = type(model).__name__
    numbers = {module.num_experts for name, module in model.named_modules() if _are_experts(name, module)}
    if not numbers:
        raise ValueError(f"{folder}: {architecture} has no experts that transformers can spread over ranks")
    if len(numbers) > 1 or (number := numbers.pop()) % ranks:
        raise ValueError(f"{folder}: its experts must divide evenly over {ranks} ranks, got {numbers or number}")
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    return Checkpoint(architecture, number, size, bool(getattr(model, "ep_plan", None)))


def tokenizer_of(folder: Path, vocabulary: int) -> tuple[Encode, Decode]:
    """The functions of the tokenizer in `folder`. Without one, ids are bytes of the text, and are shown as numbers."""
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer.encode, tokenizer.decode
    return lambda text: [byte % vocabulary for byte in text.encode()], lambda ids: " ".join(map(str, ids))


def _are_experts(name: str, module: nn.Module) -> bool:
    """Whether transformers lets another function compute this module, as `epmoe` does."""
    return name.rpartition(".")[2] == "experts" and hasattr(module, "has_gate") and hasattr(module, "num_experts")
