"""Local checkpoints for `epmoe run --model PATH`: what they need, before anything is loaded, and their tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


class TextTokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""


class ByteTokenizer:
    """For a checkpoint without a tokenizer: the bytes of a text as ids, and ids as numbers."""

    def __init__(self, vocabulary: int) -> None:
        """`vocabulary` is the number of ids that the model knows."""
        self._vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        """A byte of `text` as one id each."""
        return [byte % self._vocabulary for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers, with spaces between."""
        return " ".join(map(str, ids))


@dataclass(frozen=True)
class Checkpoint:
    """A model in a local folder, without its weights."""

    architecture: str
    num_experts: int
    """of a layer"""
    fp32_bytes: int
    """of all weights"""
    shares_weights: bool
    """whether transformers can spread the weights over the ranks; else each rank holds all"""


def inspect(folder: Path, ranks: int) -> Checkpoint:
    """Read the folder's config.json.

    Args:
        folder: as `save_pretrained` writes it.
        ranks: over which the experts shall be spread.

    Returns:
        What the checkpoint holds.

    Raises:
        ValueError: it cannot run here; the message says why, in one sentence.
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
    experts = [module for name, module in model.named_modules() if _are_experts(name, module)]
    architecture = type(model).__name__
    if not experts:
        raise ValueError(f"{folder}: {architecture} has no experts that transformers can spread over ranks")
    numbers = {module.num_experts for module in experts}
    if len(numbers) > 1 or (number := numbers.pop()) % ranks:
        raise ValueError(f"{folder}: its experts must divide evenly over {ranks} ranks, got {numbers or number}")
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    return Checkpoint(architecture, number, size, bool(getattr(model, "ep_plan", None)))


def load_tokenizer(folder: Path, vocabulary: int) -> TextTokenizer:
    """The tokenizer in `folder`; one of bytes if there is none."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return ByteTokenizer(vocabulary)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _are_experts(name: str, module: nn.Module) -> bool:
    """Whether transformers lets another function compute this module, as `epmoe` does."""
    return name.rpartition(".")[2] == "experts" and hasattr(module, "has_gate") and hasattr(module, "num_experts")
