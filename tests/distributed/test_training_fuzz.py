"""Drawn graphs of training against fp64: layers in chains and branches, checkpoints, frozen parts, parts of gradients.

A failure names its seed: EPMOE_FUZZ_FIRST=<seed> EPMOE_FUZZ_CONFIGS=1 repeats it.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from helpers import assert_close
from training_programs import (
    MAX_K,
    MAX_TOKENS,
    D,
    E,
    Leaves,
    Program,
    dense_layer,
    draw_program,
    exchanged_layer,
    gradients,
    output,
)

from epmoe.training import TrainingExchange

FIRST = int(os.environ.get("EPMOE_FUZZ_FIRST", 0))
PROGRAMS = 6 * int(os.environ.get("EPMOE_FUZZ_CONFIGS", 30))


def wanted(program: Program, rank: int, size: int) -> dict[str, torch.Tensor]:
    """fp64, on the CPU: gradients of this rank's leaves, and of experts by the tokens of all ranks."""
    total: dict[str, torch.Tensor] = {}
    for other in range(size):
        leaves = Leaves(program, other, torch.float64, torch.device("cpu"))
        y = output(program, leaves["x"], dense_layer(leaves))
        if not y.requires_grad:
            return {}
        for name, grad in gradients(program, leaves, y, keep=False).items():
            if name.startswith("experts"):
                total[name] = total.get(name, 0) + grad
            elif other == rank:
                total[name] = grad
    return total


def check(program: Program, exchange: TrainingExchange, rank: int, size: int) -> None:
    ep, want = exchange.ep, wanted(program, rank, size)
    leaves = Leaves(program, rank, torch.float32, ep.device)
    y = output(program, leaves["x"], exchanged_layer(program, exchange, leaves))
    if want and y.requires_grad:
        passes = [gradients(program, leaves, y, keep=program.repeats)]
        if program.repeats:
            passes.append(gradients(program, leaves, y, keep=False))
        held = ep.placement.logical_experts(ep.rank)
        for got in passes:
            assert got.keys() == want.keys()
            for name, grad in got.items():
                if name.startswith("experts"):
                    assert_close(grad[held].cpu(), want[name][held], slack=16)
                else:
                    assert_close(grad.cpu(), want[name], slack=16)
                assert torch.equal(grad, passes[0][name])
    ep.check()
    assert not ep.exchange.rounds.state


@pytest.mark.parametrize("windows", [1, 2])
def test_drawn_graphs(make_ep, size, rank, windows):
    options = {"experts": E, "top_k": MAX_K, "hidden": D, "max_tokens": MAX_TOKENS, "timeout_s": 10.0}
    ep = make_ep(**options)
    exchange = TrainingExchange(ep, backward=make_ep(**options) if windows == 2 else None)
    for seed in range(FIRST + windows - 1, FIRST + PROGRAMS, 2):
        program = draw_program(seed, size)
        try:
            check(program, exchange, rank, size)
        except BaseException as error:
            error.add_note(f"seed {seed} of {size} ranks: {program}")
            raise
    dist.barrier()
