"""`examples/train.py`: any number of ranks has the losses, norms and parameters of one process."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launched import ROOT, load_example, torchrun
from test_docs import blocks_of
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from epmoe import Routes

EXAMPLE = "examples/train.py"
PROGRAM = f"""
import runpy, sys
import torch.distributed as dist

sys.path.append("examples")
example = runpy.run_path("{EXAMPLE}")
device = example["meet"]()
for words in sys.argv[1:]:
    if dist.get_rank() == 0:
        print(words)
    example["main"](device, words.split())
dist.destroy_process_group()
"""
STEP = re.compile(r"step \d+: loss (\S+), norm (\S+), (\d+) tokens/s, (\S+) TFLOP/s")
TOLERANCE = 1e-5

Curve = list[tuple[float, float]]
"""The loss and the norm of the gradients of each step."""


def train(ranks: int, *runs: str, device: str = "cpu") -> list[Curve]:
    """Runs the example with each of these arguments, on GPUs where `device` is cuda."""
    visible = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    done = torchrun(ranks, "-c", PROGRAM, *runs, **visible)
    assert done.returncode == 0, done.stderr
    curves: list[Curve] = []
    first, *lines = done.stdout.splitlines()
    assert first.startswith(f"device: {device}")
    for line in lines:
        step = STEP.fullmatch(line)
        if step:
            curves[-1].append((float(step[1]), float(step[2])))
            assert float(step[3]) > 0 and float(step[4]) > 0
        else:
            curves.append([])
    assert len(curves) == len(runs)
    return curves


def assert_same(got: Curve, want: Curve, tolerance: float = TOLERANCE) -> None:
    assert torch.tensor(got).shape == torch.tensor(want).shape
    assert (torch.tensor(got) - torch.tensor(want)).abs().max() <= tolerance


def saved(folder: Path, file: Path) -> dict[str, Tensor]:
    """The parameters and buffers of a saved model, by name."""
    dcp_to_torch_save(folder, file)
    state: dict[str, Any] = torch.load(file)
    tensors = {}

    def flatten(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                flatten(f"{prefix}.{key}", part)
        else:
            tensors[prefix] = value

    flatten("", {key: value for key, value in state.items() if not key.startswith("optimizer")})
    return tensors


def unindented(code: str) -> str:
    return "\n".join(map(str.strip, code.splitlines()))


def test_the_page_shows_the_script():
    blocks = [
        block.code
        for block in blocks_of(ROOT / "docs" / "training-script.md")
        if block.language == "python"
    ]
    script = unindented((ROOT / EXAMPLE).read_text())
    assert blocks and all(unindented(code) in script for code in blocks)


def test_any_number_of_ranks_has_the_numbers_of_one_process(tmp_path):
    """Under DDP and FSDP, with recomputed activations, and where 3 ranks go on with what 4 have
    saved: their 8 sequences and experts are 3, 3 and 2. The same with replicas of the experts on 2
    × 2 ranks: saved there, resumed on 4 ranks with other replicas, and on 2.
    """
    sharded = "--parallel fsdp --checkpoint-activations"
    replicas = "--replicas 2"
    # One process: six steps, three with recomputation, and new weights without a step.
    alone, recomputed, _ = train(
        1, "--steps 6", f"--steps 3 {sharded}", f"--steps 0 --save {tmp_path}/new"
    )

    # Four ranks: three steps each, and the new weights again.
    first, of_four, _, _, *of_replicas, resumed_replicas, resharded_replicas = train(
        4,
        f"--steps 3 --save {tmp_path}/ddp",
        f"--steps 3 {sharded} --save {tmp_path}/fsdp",
        f"--steps 0 --save {tmp_path}/new_ddp",
        f"--steps 0 --save {tmp_path}/new_fsdp --parallel fsdp",
        f"--steps 3 {replicas} --save {tmp_path}/2_ddp",
        f"--steps 3 {replicas} --parallel fsdp --save {tmp_path}/2_fsdp",
        f"--steps 6 --resume {tmp_path}/2_ddp --parallel fsdp",
        f"--steps 6 {replicas} --resume {tmp_path}/2_fsdp",
    )

    # Three and two ranks go on with what four have saved.
    resumed, resharded, of_three = train(
        3,
        f"--steps 6 --resume {tmp_path}/ddp",
        f"--steps 6 --resume {tmp_path}/fsdp --parallel fsdp",
        "--steps 3 --parallel fsdp",
    )
    [of_two] = train(2, f"--steps 6 --resume {tmp_path}/2_fsdp")

    # All losses are those of one process, and so are the new weights.
    assert len(alone) == 6 and len(of_replicas) == 2
    for got in (recomputed, first, of_four, of_three, *of_replicas):
        assert_same(got, alone[:3])
    for got in (resumed, resharded, resumed_replicas, resharded_replicas, of_two):
        assert_same(got, alone[3:])
    new, *of_ranks = (
        saved(tmp_path / name, tmp_path / "file") for name in ("new", "new_ddp", "new_fsdp")
    )
    assert sum(".experts." in name for name in new) == 2 * 2
    for got in of_ranks:  # DDP and FSDP have left each expert as it was
        assert got.keys() == new.keys() and all(
            torch.equal(got[name], value) for name, value in new.items()
        )


@pytest.fixture
def of_one() -> Iterator[dict[str, Any]]:
    """The names of the example, in a group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield load_example("train")
    finally:
        dist.destroy_process_group()


def train_in_plain_torch(
    model: nn.Module, example: dict[str, Any], num_experts: int, top_k: int
) -> Iterator[tuple[float, float]]:
    """Trains a model of transformers as the example trains it over ranks."""
    logits: list[Tensor] = []
    # Logits as the example has them, of the inputs of each gate.
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".mlp.router")):
            module.register_forward_pre_hook(
                lambda gate, args: logits.append(
                    F.linear(
                        args[0].flatten(0, -2), gate.weight, getattr(gate, "bias", None)
                    ).float()
                )
            )

    # Steps of some micro-batches, with the losses of the example.
    optimizer = torch.optim.AdamW(model.parameters(), lr=example["LEARNING_RATE"], eps=1e-6)
    for step in itertools.count():
        total = 0.0
        for micro in range(example["MICRO_BATCHES"]):
            tokens = example["sequences"](step * example["MICRO_BATCHES"] + micro)
            logits.clear()
            output = model(tokens[:, :-1]).logits.flatten(0, 1)
            counts = [
                x.topk(top_k).indices.flatten().bincount(minlength=num_experts).float()
                for x in logits
            ]
            auxiliary = example["auxiliary_loss"](
                [Routes(None, None, x, None) for x in logits], counts
            )
            loss = (F.cross_entropy(output, tokens[:, 1:].flatten()) + auxiliary) / example[
                "MICRO_BATCHES"
            ]
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), example["MAX_NORM"])
        optimizer.step()
        optimizer.zero_grad()
        yield total, norm.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type, dtype",
    [("qwen3_moe", torch.float32), ("gpt_oss", torch.float32), ("gpt_oss", torch.bfloat16)],
)
def test_fine_tuning_has_the_numbers_of_transformers_in_plain_torch(
    tmp_path, of_one, model_type, dtype
):
    transformers = pytest.importorskip("transformers")
    # A new checkpoint. Each architecture takes its own of these keys.
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(tmp_path)
    # Three steps in plain torch, and by the example over two ranks.
    want = list(itertools.islice(train_in_plain_torch(model, of_one, 8, 2), 3))
    options = f"--from-hf {tmp_path} --steps 3"
    for got in train(2, options, f"{options} --parallel fsdp --checkpoint-activations"):
        assert_same(got, want, TOLERANCE if dtype == torch.float32 else 0.05)
