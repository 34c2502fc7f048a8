"""transformers' Trainer and accelerate fine-tune a Qwen3-MoE, clip, save and resume, by
configuration alone.

The recipes of docs/training.md, "In transformers". Over all ranks of torchrun.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator, DistributedDataParallelKwargs
from spread_models import DEVICE, needs_ep, own_gpus, random_ids
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import epmoe.integrations.transformers  # noqa: F401 - which registers the name
from epmoe.cli.demo import generate as demo

pytestmark = [own_gpus, pytest.mark.slow, pytest.mark.usefixtures("default_settings")]
STEPS = 4
SAVED = 2
LENGTH = 12
MAX_NORM = 0.5
PER_RANK = 2
FUNCTION = {"experts_implementation": "epmoe"}


@pytest.fixture
def checkpoint() -> Iterator[str]:
    with demo.saved_model("qwen3_moe") as path:
        yield path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folders: list[Any] = [tmp_path]
    dist.broadcast_object_list(folders)
    return folders[0]


def parts(size: int) -> dict[str, Any]:
    return {
        "distributed_config": DistributedConfig(
            tp_size=1, fsdp_size=size, ep_size=size, ep_implementation="epmoe"
        )
    }


def load(path: str | Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


def batches(size: int, steps: range) -> list[dict[str, Tensor]]:
    """The examples of these steps, those of all ranks."""
    step = PER_RANK * size
    examples = (
        random_ids(STEPS * step * LENGTH, seed=0)
        .view(-1, LENGTH)
        .cpu()[steps.start * step : steps.stop * step]
    )
    return [{"input_ids": ids, "labels": ids} for ids in examples]


def trained(
    model: PreTrainedModel,
    folder: Path,
    data: list[dict[str, Tensor]],
    resume: Path | None = None,
    **options: Any,
) -> list[tuple[float, float]]:
    """The loss and the norm of the gradients of each step."""
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=PER_RANK,
        num_train_epochs=1,
        learning_rate=1e-3,
        max_grad_norm=MAX_NORM,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to=[],
        save_strategy="steps",
        save_steps=SAVED,
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return [
        (entry["loss"], entry["grad_norm"])
        for entry in trainer.state.log_history
        if "grad_norm" in entry
    ]


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    named = {name.removeprefix("module."): value for name, value in model.named_parameters()}
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu()
        for name, p in named.items()
    }


def assert_same(got: torch.nn.Module, want: torch.nn.Module) -> None:
    others = weights(want)
    for name, value in weights(got).items():
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize("original", [True, False], ids=["names of the hub", "of the model"])
def test_the_experts_function_under_ddp(checkpoint, folder, size, original):
    """The Trainer loads no experts of a checkpoint with the names of the hub, which names each:
    `from_pretrained` does. With the names of the model the Trainer loads them itself, and so does
    `from_pretrained`.
    """
    model = load(checkpoint, **FUNCTION)
    model.save_pretrained = partial(model.save_pretrained, save_original_format=original)
    log = trained(model, folder, data := batches(size, range(STEPS)))
    # Another goes on from the middle, to the same end.
    saved = folder / f"checkpoint-{SAVED}"
    again = load(saved if original else checkpoint, **FUNCTION)
    assert trained(again, folder, data, resume=saved) == log
    assert_same(again, model)
    assert_same(load(folder / f"checkpoint-{STEPS}"), model)


@needs_ep
def test_the_ep_implementation_under_fsdp2(checkpoint, folder, size):
    """The Trainer saves such models without the optimizer, and says so: SGD, which has no state,
    goes on exactly.
    """
    model = load(checkpoint, **parts(size))
    with pytest.raises(
        ValueError, match="Resuming is not supported for models sharded at load time"
    ):
        trained(model, folder, batches(size, range(STEPS)))
    options = {"save_only_model": True, "optim": "sgd"}
    log = trained(model, folder, batches(size, range(STEPS)), **options)
    again = load(folder / f"checkpoint-{SAVED}", **parts(size))
    assert (
        trained(again, folder / "again", batches(size, range(SAVED, STEPS)), **options)
        == log[SAVED:]
    )
    assert_same(again, model)
    assert_same(load(folder / f"checkpoint-{STEPS}"), model)


def test_a_loop_of_accelerate(checkpoint, folder, rank, size):
    def steps(
        accelerator: Accelerator, model: Any, optimizer: Any, numbers: range
    ) -> list[tuple[float, float]]:
        log = []
        for number in numbers:
            examples = batches(size, range(number, number + 1))[
                rank * PER_RANK : (rank + 1) * PER_RANK
            ]
            ids = torch.stack([one["input_ids"] for one in examples]).to(accelerator.device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            log.append((loss.item(), float(norm)))
        return log

    def make() -> tuple[Accelerator, Any, Any]:
        return prepared(load(checkpoint, **FUNCTION))

    # Steps, a save in their middle, and the rest.
    accelerator, model, optimizer = make()
    steps(accelerator, model, optimizer, range(SAVED))
    accelerator.save_state(str(folder / "state"))
    log = steps(accelerator, model, optimizer, range(SAVED, STEPS))
    # Another model goes on from there.
    accelerator, again, optimizer = make()
    accelerator.load_state(str(folder / "state"))
    assert steps(accelerator, again, optimizer, range(SAVED, STEPS)) == log
    assert_same(again, model)


def prepared(model: PreTrainedModel) -> tuple[Accelerator, Any, Any]:
    # DDP then keeps its buckets. gloo adds three ranks in an order that goes by places in a bucket.
    buckets = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=DEVICE == "cpu", kwargs_handlers=[buckets])
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
