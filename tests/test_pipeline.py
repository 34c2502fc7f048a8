"""torch's pipelines over two stages of two ranks of EP: micro-batches in flight have the gradients
of one process.

The tests start their own processes, since one of them is killed.
"""

from __future__ import annotations

import itertools
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from exchanges import make_config
from helpers import ON_THE_CPU, randn, slow
from host import Host, die
from tool_models import D, E, K, Kind, T, block_of
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel
from waits import SOON_S

import epmoe
from epmoe.training import fully_shard, ignore_experts

MICRO_BATCHES = 4
TIMEOUT_S = 10.0
NAMES = [0, 1, 2, 3]


class Case(NamedTuple):
    """`split`: the zero-bubble schedule, which computes the gradients of weights after those of
    tokens, by FSDP alone. Its ranks have two stages each, which share one `ExpertParallel`.
    """

    kind: Kind = "grouped"
    fsdp: bool = False
    recomputes: bool = False
    split: bool = False


def started(host: Host) -> Host:
    host.spawn(*NAMES)
    host.form(NAMES)
    host.succeed(NAMES, begin)
    return host


def begin(state) -> None:
    state.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    sizes = {
        "experts": E,
        "top_k": K,
        "hidden": D,
        "max_tokens": T,
        "routing": {"renormalize": True},
    }
    config = make_config(2, timeout_s=TIMEOUT_S, exchange={"warmup_timeout_s": 60.0}, **sizes)
    state.ep = epmoe.ExpertParallel(config, state.mesh["ep"])


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with Host(tmp_path_factory.mktemp("pipeline"), torch.device("cpu")) as host:
        yield started(host)


class Pipeline(NamedTuple):
    """This rank's part of it."""

    schedule: Schedule1F1B | ScheduleInterleavedZeroBubble
    blocks: dict[int, nn.Module]  # by their places in the model
    arguments: dict  # of a step

    def step(self) -> None:
        self.schedule.step(*self.arguments.pop("x", ()), **self.arguments)


def pipeline(state, case: Case) -> Pipeline:
    mesh = state.mesh["ep"]
    group = state.mesh["ep"].get_group()
    total = 4 if case.split else 2
    blocks = {}
    stages = []
    arguments = {}
    # Every second block is of this stage.
    for number in range(state.mesh["pp"].get_local_rank(), total, 2):
        block: nn.Module = block_of(case.kind, number, state.ep)
        block = checkpoint_wrapper(block) if case.recomputes else block
        if case.fsdp:
            block = fully_shard(block, mesh=mesh)
        else:
            block = DistributedDataParallel(ignore_experts(block, group), process_group=group)
        blocks[number] = block
        stages.append(
            PipelineStage(block, number, total, state.device, group=state.mesh["pp"].get_group())
        )
    # The first stage gets x, and the last one what it must give.
    if 0 in blocks:
        arguments["x"] = [tokens(state.ep.rank)]
    if total - 1 in blocks:
        arguments |= {"target": tokens(state.ep.rank), "losses": []}
    if case.split:
        return Pipeline(
            ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=loss_of), blocks, arguments
        )
    return Pipeline(Schedule1F1B(stages[0], MICRO_BATCHES, loss_fn=loss_of), blocks, arguments)


def tokens(rank: int) -> Tensor:
    """Those of a rank of EP, in all micro-batches."""
    return randn(MICRO_BATCHES * T, D, seed=rank)


def loss_of(y: Tensor, x: Tensor) -> Tensor:
    return (y - x).square().mean()


def step(state, case: Case) -> None:
    """Losses and gradients are those of one process."""
    ours = pipeline(state, case)
    ours.step()
    # The same blocks in one process.
    alone = nn.Sequential(
        *(block_of(case.kind, number) for number in range(4 if case.split else 2))
    )
    inputs = torch.cat([tokens(rank) for rank in range(2)])
    outputs = alone(inputs)
    loss_of(outputs, inputs).backward()
    # Losses of each micro-batch,
    if "losses" in ours.arguments:
        parts = (
            each.detach().chunk(2)[state.ep.rank].chunk(MICRO_BATCHES) for each in (outputs, inputs)
        )
        want = [loss_of(y, x) for y, x in zip(*parts, strict=True)]
        torch.testing.assert_close(torch.stack(ours.arguments["losses"]), torch.stack(want))
    # and gradients of each parameter.
    for number, block in ours.blocks.items():
        for name, parameter in block.named_parameters():
            name = name.removeprefix("module.").removeprefix("_checkpoint_wrapped_module.")
            want = alone[number].get_parameter(name).grad
            got = parameter.grad
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
            torch.testing.assert_close(
                got, want, rtol=0.0, atol=1e-5 * float(want.abs().max()), msg=name
            )


CASES = [
    Case(),
    Case(recomputes=True),
    slow(Case(fsdp=True)),
    slow(Case(fsdp=True, recomputes=True)),
    slow(Case("own")),
    Case(fsdp=True, split=True),
    slow(Case("own", fsdp=True, split=True)),
    slow(Case(fsdp=True, recomputes=True, split=True)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_one_process(stages, case):
    stages.succeed(NAMES, step, case)


MOMENTS = {
    "before a round": lambda moe, hook: moe.register_forward_pre_hook(hook),
    "in a round": lambda moe, hook: moe.experts.register_forward_pre_hook(hook),
    "in a backward round": lambda moe, hook: moe.experts.register_full_backward_hook(hook),
}


@ON_THE_CPU
@pytest.mark.parametrize(
    "moment", [slow("before a round"), slow("in a round"), "in a backward round"]
)
def test_a_rank_dies_in_the_schedule(host, moment):
    """The other rank of its stage names it. The other stage learns of it from torch, as these
    processes end.
    """
    *others, victim = NAMES
    started(host)
    # The victim dies in its schedule, and then all end.
    host.start(NAMES, run_until_a_rank_dies, host.folder, victim, moment)
    host.processes[victim].join()
    deadline = time.monotonic() + TIMEOUT_S + SOON_S
    for name in others:
        host.processes[name].join(deadline - time.monotonic())
    # Its partner knows the rank.
    *other_stage, partner = [(host.folder / str(name)).read_text() for name in others]
    assert f"(global rank(s) [{victim}]), whose process has ended" in partner
    assert all("closed by peer" in error or "reset by peer" in error for error in other_stage)


def run_until_a_rank_dies(state, folder: Path, victim: int, moment: str) -> None:
    """The process ends, and a file has its exceptions: torch raises one of its own from that of a
    backward pass.
    """
    ours = pipeline(state, Case())
    if state.name == victim:
        calls = itertools.count()
        [block] = ours.blocks.values()
        MOMENTS[moment](block.module.moe, lambda *_: die() if next(calls) == 2 else None)
    try:
        ours.step()
    except Exception:
        (folder / str(state.name)).write_text(traceback.format_exc())
    os._exit(1)
