"""Drawn graphs of training against fp64: layers in chains and branches, checkpoints, frozen parts,
parts of gradients.

Every rank draws the same program, and the data of all ranks, so that it computes what it must get
without the exchange. A failure names its seed: EPMOE_FUZZ_FIRST=<seed> EPMOE_FUZZ_CONFIGS=1 repeats
it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from factors import all_pairs
from helpers import assert_close, generator, poisoned_memory
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
D = 16
E = 9
MAX_TOKENS = 40
MAX_K = 8
NUM_ROWS = 1536
Call = Literal["plain", "checkpoint", "reentrant"]


@dataclass
class LayerDraw:
    """One layer. `num_tokens`: whether the last tokens are padding, and who says it. `detaches`:
    its input has no gradient through it.
    """

    weights_on: Literal["rows", "combine"]
    num_rows: int | Literal["exact"]
    id_dtype: torch.dtype
    num_tokens: Literal["all", "int", "tensor"]
    call: Call
    detaches: bool
    trains_weights: bool
    trains_experts: bool


@dataclass
class Program:
    """`order`: layers by number, in which they run; one may run twice. `asked`: leaves by name;
    None: backward().
    """

    seed: int
    wiring: Literal["chain", "residual", "product", "sum"]
    layers: list[LayerDraw]
    order: list[int]
    K: int
    tokens: list[int]
    trains_x: bool
    asked: list[str] | None
    repeats: bool


def draw_program(seed: int, size: int) -> Program:
    random = Random(seed)

    def draw_layer() -> LayerDraw:
        return LayerDraw(
            random.choice(["rows", "combine"]),
            random.choice(["exact", NUM_ROWS]),
            random.choice([torch.int32, torch.int64]),
            random.choice(["all", "all", "int", "tensor"]),
            random.choice(["plain", "plain", "checkpoint", "reentrant"]),
            random.random() < 0.15,
            random.random() < 0.7,
            random.random() < 0.7,
        )

    layers = [draw_layer() for _ in range(random.randint(1, 3))]
    order = [*range(len(layers)), *random.choices(range(len(layers)), k=random.choice([0, 0, 1]))]
    trains_x = random.random() < 0.8
    leaves = ["x"] * trains_x
    for i, layer in enumerate(layers):
        leaves += [f"weights {i}"] * layer.trains_weights + [f"experts {i}"] * layer.trains_experts
    asked = None
    # Torch refuses these.
    if leaves and random.random() < 0.6 and all(layer.call != "reentrant" for layer in layers):
        asked = random.sample(leaves, random.randint(1, len(leaves)))
    return Program(
        seed,
        random.choice(["chain", "residual", "product", "sum"]),
        layers,
        order,
        random.randint(1, MAX_K),
        [
            random.choice([0, random.randint(1, 6), random.randint(1, MAX_TOKENS)])
            for _ in range(size)
        ],
        trains_x,
        asked,
        random.random() < 0.4,
    )


class Leaves:
    """What a rank brings, by name, and the experts of all: leaves of a graph, in a dtype and on a
    device.
    """

    def __init__(
        self, program: Program, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        draw = generator(1000 * program.seed + rank)
        T = program.tokens[rank]
        self.layers = program.layers
        self.ids = []
        values = {"x": torch.randn(T, D, generator=draw)}
        # Ids may name no expert, and some weights are 0.
        for i in range(len(program.layers)):
            ids = torch.randint(-1, E + 1, (T, program.K), generator=draw)
            self.ids.append(ids.to(device, program.layers[i].id_dtype))
            kept = torch.rand(T, program.K, generator=draw) > 0.2
            values[f"weights {i}"] = torch.rand(T, program.K, generator=draw) * kept
        self.grad_y = torch.randn(T, D, generator=draw).to(device, dtype)
        for i in range(len(program.layers)):
            # Experts are the same on all ranks.
            values[f"experts {i}"] = 0.5 + torch.rand(E, generator=generator(program.seed * 10 + i))
        # In fp64 on the CPU for the reference, else in the dtype of the case.
        self.values = {name: value.to(device, dtype) for name, value in values.items()}
        self.values["x"].requires_grad_(program.trains_x)
        for i, layer in enumerate(program.layers):
            self.values[f"weights {i}"].requires_grad_(layer.trains_weights)
            self.values[f"experts {i}"].requires_grad_(layer.trains_experts)

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]


def output(program: Program, x: Tensor, layer) -> Tensor:
    """The graph, where `layer(number, h)` is one of its layers."""
    h = x
    results = []
    for number in program.order:
        # A layer that detaches has no part in the gradient of what is before it.
        given = h.detach() if program.layers[number].detaches else h
        y = layer(number, given)
        results.append(y)
        if program.wiring in ("chain", "residual"):
            h = y if program.wiring == "chain" else h + y
    if program.wiring == "product":
        return torch.stack(results).prod(0)
    return torch.stack(results).sum(0) if program.wiring == "sum" else h


def real_tokens(layer: LayerDraw, tokens: int) -> int:
    return tokens if layer.num_tokens == "all" else max(tokens - 3, 0)


def exchanged_layer(program: Program, exchange: TrainingExchange, leaves: Leaves):
    """The layers over an exchange. Experts are tanh(row) · scale; rows of no pair become NaN."""
    # The experts that this rank holds.
    held = exchange.ep.placement.logical_experts(exchange.ep.rank)

    def layer(number: int, h: Tensor) -> Tensor:
        drawn = program.layers[number]
        ids = leaves.ids[number]
        real = real_tokens(drawn, len(h))
        count = {
            "all": None,
            "int": real,
            "tensor": torch.tensor(real, dtype=torch.int32, device=h.device),
        }

        def run(h: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
            routed = exchange.dispatch(
                h,
                ids,
                weights,
                weights_on=drawn.weights_on,
                num_rows=drawn.num_rows,
                num_tokens=count[drawn.num_tokens],
                tag=number + 1,
            )
            # Each row finds its expert; rows in gaps belong to none.
            numbers = torch.arange(len(routed.rows), dtype=torch.int32, device=h.device)
            expert = torch.searchsorted(routed.expert_offsets, numbers, right=True) - 1
            ends = torch.cat(
                [routed.expert_offsets[:-1] + routed.tokens_per_expert, numbers.new_zeros(1)]
            )
            has_pair = numbers < ends[expert]
            scale = torch.cat([scales[held], scales.new_zeros(1)])[expert]
            # The expert; rows of no pair must reach nothing.
            rows = torch.tanh(routed.rows.where(has_pair[:, None], 0.0)) * scale[:, None]
            if routed.row_weights is not None:
                rows = (rows * routed.row_weights.where(has_pair, 0.0)[:, None]).to(rows.dtype)
            return exchange.combine(rows.where(has_pair[:, None], torch.nan), routed)

        # Through a checkpoint of either kind, or without one.
        arguments = h, leaves[f"weights {number}"], leaves[f"experts {number}"]
        if drawn.call == "plain":
            return run(*arguments)
        if drawn.call == "reentrant" and not any(t.requires_grad for t in arguments):
            return run(*arguments)  # torch would compute it without a graph
        return checkpoint(run, *arguments, use_reentrant=drawn.call == "reentrant")

    return layer


def dense_layer(leaves: Leaves):
    """The same layers on one rank's tokens, with all experts."""

    def layer(number: int, h: Tensor) -> Tensor:
        ids = leaves.ids[number]
        scales = leaves[f"experts {number}"]
        real = torch.arange(len(h), device=h.device)[:, None] < real_tokens(
            leaves.layers[number], len(h)
        )
        # Pairs that count.
        live = (ids >= 0) & (ids < E) & real
        factors = leaves[f"weights {number}"] * torch.where(live, scales[ids.clamp(0, E - 1)], 0.0)
        return torch.tanh(h) * factors.sum(1, keepdim=True)

    return layer


def gradients(program: Program, leaves: Leaves, y: Tensor, *, keep: bool) -> dict[str, Tensor]:
    """By the drawn pass; zeros where a leaf has no part in y."""
    loss = (y * leaves.grad_y).sum()
    names = [name for name, value in leaves.values.items() if value.requires_grad]
    # torch.autograd.grad of some leaves, or a whole backward pass.
    if program.asked is not None:
        names = [name for name in names if name in program.asked]
        given = torch.autograd.grad(
            loss, [leaves[name] for name in names], retain_graph=keep, allow_unused=True
        )
    else:
        for name in names:
            leaves[name].grad = None
        loss.backward(retain_graph=keep)
        given = [leaves[name].grad for name in names]
    return {
        name: torch.zeros_like(leaves[name]) if grad is None else grad.clone()
        for name, grad in zip(names, given, strict=True)
    }


def wanted(program: Program, rank: int, size: int) -> dict[str, Tensor]:
    """fp64, on the CPU: gradients of this rank's leaves, and of experts by the tokens
    of all ranks.
    """
    total: dict[str, Tensor] = {}
    # Experts have gradients of the tokens of all ranks.
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


def check(
    program: Program, exchange: TrainingExchange, dtype: torch.dtype, rank: int, size: int
) -> None:
    ep = exchange.ep
    want = wanted(program, rank, size)
    leaves = Leaves(program, rank, dtype, ep.device)
    # Memory that nobody writes is NaN.
    with poisoned_memory():
        y = output(program, leaves["x"], exchanged_layer(program, exchange, leaves))
        if want and y.requires_grad:
            passes = [gradients(program, leaves, y, keep=program.repeats)]
            # A second pass over the same graph has the same bits.
            if program.repeats:
                passes.append(gradients(program, leaves, y, keep=False))
            assert all(got.keys() == want.keys() for got in passes)
            for name, grad in passes[0].items():
                assert all(torch.equal(got[name], grad) for got in passes)
                if name.startswith("experts"):  # copies of them, and those of other ranks
                    grad = grad.float().cpu()
                    dist.all_reduce(grad)
                assert_close(
                    grad.cpu(), want[name], dtype, slack=16 if dtype == torch.float32 else 6
                )
    ep.check()
    assert not ep.exchange.rounds.state


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(str(v).removeprefix("torch.") for v in case.values())
)
def test_drawn_graphs(make_ep, size, rank, case):
    dtype = case["dtype"]
    # Windows of the case: one pair for both directions, or two.
    options = {
        "experts": E,
        "top_k": MAX_K,
        "hidden": D,
        "max_tokens": MAX_TOKENS,
        "timeout_s": 10.0,
    }
    options |= {
        "dtype": str(dtype).removeprefix("torch."),
        "capacity": {"alignment": case["alignment"]},
    }
    if case["copies"]:
        options["placement"] = {
            "strategy": "round_robin",
            "num_redundant_experts": -E % size or size,
        }
    ep, *others = (make_ep(case["ll_max_tokens"], **options) for _ in range(case["windows"]))
    exchange = TrainingExchange(ep, backward=others[0] if others else None)
    # Cases share the seeds, so that each draws programs of its own.
    for seed in range(FIRST + CASES.index(case), FIRST + PROGRAMS, len(CASES)):
        program = draw_program(seed, size)
        try:
            check(program, exchange, dtype, rank, size)
        except BaseException as error:
            error.add_note(f"seed {seed} of {size} ranks: {program}")
            raise
    dist.barrier()
