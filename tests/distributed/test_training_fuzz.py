"""Drawn graphs of training against fp64: layers in chains and branches, checkpoints, frozen parts, parts of gradients.

A failure names its seed: EPMOE_FUZZ_FIRST=<seed> EPMOE_FUZZ_CONFIGS=1 repeats it.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from factors import all_pairs
from helpers import assert_close, poisoned_memory
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

CASES = all_pairs(
    {
        "dtype": [torch.float32, torch.bfloat16],
        "alignment": [None, 8],
        "copies": [0, 1],
        "windows": [1, 2],
        "ll_max_tokens": [16, 256],  # Simple and LL protocol; both in one round
    }
)
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


def check(program: Program, exchange: TrainingExchange, dtype: torch.dtype, rank: int, size: int) -> None:
    ep, want = exchange.ep, wanted(program, rank, size)
    leaves = Leaves(program, rank, dtype, ep.device)
    with poisoned_memory():
        y = output(program, leaves["x"], exchanged_layer(program, exchange, leaves))
        if want and y.requires_grad:
            passes = [gradients(program, leaves, y, keep=program.repeats)]
            if program.repeats:
                passes.append(gradients(program, leaves, y, keep=False))
            assert all(got.keys() == want.keys() for got in passes)
            for name, grad in passes[0].items():
                assert all(torch.equal(got[name], grad) for got in passes)
                if name.startswith("experts"):  # copies of them, and those of other ranks
                    grad = grad.float().cpu()
                    dist.all_reduce(grad)
                assert_close(grad.cpu(), want[name], dtype, slack=16 if dtype == torch.float32 else 6)
    ep.check()
    assert not ep.exchange.rounds.state


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(v).removeprefix("torch.") for v in case.values()))
def test_drawn_graphs(make_ep, size, rank, case):
    dtype = case["dtype"]
    options = {"experts": E, "top_k": MAX_K, "hidden": D, "max_tokens": MAX_TOKENS, "timeout_s": 10.0}
    options |= {"dtype": str(dtype).removeprefix("torch."), "capacity": {"alignment": case["alignment"]}}
    if case["copies"]:
        options["placement"] = {"strategy": "round_robin", "num_redundant_experts": -E % size or size}
    ep, *others = (make_ep(case["ll_max_tokens"], **options) for _ in range(case["windows"]))
    exchange = TrainingExchange(ep, backward=others[0] if others else None)
    for seed in range(FIRST + CASES.index(case), FIRST + PROGRAMS, len(CASES)):
        program = draw_program(seed, size)
        try:
            check(program, exchange, dtype, rank, size)
        except BaseException as error:
            error.add_note(f"seed {seed} of {size} ranks: {program}")
            raise
    dist.barrier()
