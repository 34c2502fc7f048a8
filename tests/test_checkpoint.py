"""`epmoe run --model PATH`: a local checkpoint of any architecture whose experts transformers can
hand to `epmoe`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from helpers import ROOT, tiny_model
from transformers import AutoModelForCausalLM, OlmoeForCausalLM, PreTrainedTokenizerFast

from epmoe.cli.console import UserError, human_bytes
from epmoe.cli.demo import checkpoint, models
from epmoe.cli.demo import generate as demo
from epmoe.config.config import EPConfig

ARCHITECTURES = "olmoe", "granitemoe", "glm4_moe"
"""Those that the demonstration does not have. They name the number of experts in three ways."""


def saved(architecture: str, folder: Path) -> Path:
    """A new checkpoint in `folder`, in bf16 as most are, without a tokenizer."""
    tiny_model(
        architecture, folder, torch.bfloat16, vocab_size=240, initializer_range=0.1, eos_token_id=7
    )
    return folder


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("olmoe", tmp_path_factory.mktemp("models") / "my-olmoe")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checkpoint_of_any_architecture_generates_the_tokens_of_one_process(
    architecture, tmp_path
):
    result = demo.run_model(str(saved(architecture, tmp_path / architecture)), max_new_tokens=4)
    assert result.name == architecture
    assert result.passed
    assert len(result.load) == 8
    # Without a tokenizer, ids; also after an end of text.
    assert [len(text.split()) for _, text in result.texts] == [4]


def test_a_checkpoint_brings_its_tokenizer(olmoe, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(olmoe, folder)
    PreTrainedTokenizerFast(tokenizer_object=demo.make_tokenizer()).save_pretrained(folder)
    result = demo.run_model(str(folder), max_new_tokens=4)
    assert result.passed and not result.texts[0][1].replace(" ", "").isdecimal()


def test_too_large_a_checkpoint_is_refused_before_it_is_loaded(olmoe, monkeypatch):
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(olmoe).parameters())
    config = EPConfig.load(ROOT / "configs" / "cpu_demo.yaml")
    models.check_models(config, [str(olmoe)])
    monkeypatch.setattr(checkpoint, "available_memory_bytes", lambda: 2**10)
    # Ranks have all weights each.
    for plan, times in (
        ({"layers.*": "ep_router"}, 1),
        (None, config.topology.ep_size),
    ):
        monkeypatch.setattr(OlmoeForCausalLM, "ep_plan", plan, raising=False)
        needs = (
            f"my-olmoe: OlmoeForCausalLM needs {human_bytes(4 * weights * times)} in fp32, .* 1.0 "
            "KiB available"
        )
        with pytest.raises(UserError, match=needs):
            models.check_models(config, [str(olmoe)])


@pytest.mark.long
@pytest.mark.slow
def test_run_takes_a_folder_beside_names(olmoe, tmp_path):
    """A user types it: two ranks with a share of the weights each; the demonstration says that it
    means nothing.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, "-m", "epmoe", "run", "cpu_demo", "--nproc", "2", "--steps", "3"]
    options = [
        "--model",
        "./my-olmoe",
        "--model",
        "mixtral",
        "--report",
        str(tmp_path / "report.html"),
    ]
    # The folder is named as one beside it would be.
    run = subprocess.run(
        [*command, *options], cwd=olmoe.parent, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # Both models are right, and only the tiny one means nothing.
    said = " ".join(run.stdout.split())
    assert "mixtral: the weights are random and the models tiny" in said
    assert "The words mean nothing" in said
    assert said.count("✓ same tokens as one process: yes") == 2
    # The report names the checkpoint's architecture, and the checkpoint is as it was.
    assert "OlmoeForCausalLM" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert json.loads((olmoe / "config.json").read_text())["model_type"] == "olmoe"
