"""Drawn programs of training: a few layers in some graph, parts of it frozen, and gradients of some of its leaves.

Every rank draws the same program, and the data of all ranks, so that it computes what it must get without the exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

import torch
from helpers import generator
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from epmoe.training import TrainingExchange

D, E, MAX_TOKENS, MAX_K, NUM_ROWS = 16, 7, 6, 4, 128
Call = Literal["plain", "checkpoint", "reentrant"]


@dataclass
class LayerDraw:
    """One layer. `detaches`: its input has no gradient through it."""

    weights_on: Literal["rows", "combine"]
    num_rows: int | Literal["exact"]
    call: Call
    detaches: bool
    trains_weights: bool
    trains_experts: bool


@dataclass
class Program:
    """`order`: layers by number, in which they run; one may run twice. `asked`: leaves by name; None: backward()."""

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
    if leaves and random.random() < 0.6 and all(layer.call != "reentrant" for layer in layers):  # torch refuses these
        asked = random.sample(leaves, random.randint(1, len(leaves)))
    return Program(
        seed,
        random.choice(["chain", "residual", "product", "sum"]),
        layers,
        order,
        random.randint(1, MAX_K),
        [random.choice([0, random.randint(1, MAX_TOKENS)]) for _ in range(size)],
        trains_x,
        asked,
        random.random() < 0.4,
    )


class Leaves:
    """What a rank brings, by name, and the experts of all: leaves of a graph, in a dtype and on a device."""

    def __init__(self, program: Program, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        draw, T = generator(1000 * program.seed + rank), program.tokens[rank]
        self.ids, values = [], {"x": torch.randn(T, D, generator=draw)}
        for i in range(len(program.layers)):
            self.ids.append(torch.randint(-1, E + 1, (T, program.K), generator=draw).to(device))
            kept = torch.rand(T, program.K, generator=draw) > 0.2
            values[f"weights {i}"] = torch.rand(T, program.K, generator=draw) * kept
        self.grad_y = torch.randn(T, D, generator=draw).to(device, dtype)
        for i in range(len(program.layers)):
            values[f"experts {i}"] = 0.5 + torch.rand(E, generator=generator(program.seed * 10 + i))
        self.values = {name: value.to(device, dtype) for name, value in values.items()}
        self.values["x"].requires_grad_(program.trains_x)
        for i, layer in enumerate(program.layers):
            self.values[f"weights {i}"].requires_grad_(layer.trains_weights)
            self.values[f"experts {i}"].requires_grad_(layer.trains_experts)

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]


def output(program: Program, x: Tensor, layer) -> Tensor:
    """The graph, where `layer(number, h)` is one of its layers."""
    h, results = x, []
    for number in program.order:
        given = h.detach() if program.layers[number].detaches else h
        y = layer(number, given)
        results.append(y)
        if program.wiring in ("chain", "residual"):
            h = y if program.wiring == "chain" else h + y
    if program.wiring == "product":
        return torch.stack(results).prod(0)
    return torch.stack(results).sum(0) if program.wiring == "sum" else h


def exchanged_layer(program: Program, exchange: TrainingExchange, leaves: Leaves):
    """The layers over an exchange. Experts are tanh(row) · scale."""
    held = exchange.ep.placement.logical_experts(exchange.ep.rank)

    def layer(number: int, h: Tensor) -> Tensor:
        drawn, ids = program.layers[number], leaves.ids[number]

        def run(h: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
            routed = exchange.dispatch(
                h, ids, weights, weights_on=drawn.weights_on, num_rows=drawn.num_rows, tag=number + 1
            )
            numbers = torch.arange(len(routed.rows), dtype=torch.int32, device=h.device)
            expert = torch.searchsorted(routed.expert_offsets, numbers, right=True) - 1
            real = (numbers < routed.expert_offsets[-1])[:, None]
            scale = torch.cat([scales[held], scales.new_zeros(1)])[expert.clamp(max=len(held))]
            rows = torch.tanh(routed.rows.where(real, 0.0)) * scale[:, None]
            if routed.row_weights is not None:
                rows = rows * routed.row_weights.where(real[:, 0], 0.0)[:, None]
            return exchange.combine(rows, routed)

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
        ids, scales = leaves.ids[number], leaves[f"experts {number}"]
        live = (ids >= 0) & (ids < E)
        factors = leaves[f"weights {number}"] * torch.where(live, scales[ids.clamp(0, E - 1)], 0.0)
        return torch.tanh(h) * factors.sum(1, keepdim=True)

    return layer


def gradients(program: Program, leaves: Leaves, y: Tensor, *, keep: bool) -> dict[str, Tensor]:
    """By the drawn pass; zeros where a leaf has no part in y."""
    loss = (y * leaves.grad_y).sum()
    names = [name for name, value in leaves.values.items() if value.requires_grad]
    if program.asked is not None:
        names = [name for name in names if name in program.asked]
        given = torch.autograd.grad(loss, [leaves[name] for name in names], retain_graph=keep, allow_unused=True)
    else:
        for name in names:
            leaves[name].grad = None
        loss.backward(retain_graph=keep)
        given = [leaves[name].grad for name in names]
    return {
        name: torch.zeros_like(leaves[name]) if grad is None else grad.clone()
        for name, grad in zip(names, given, strict=True)
    }
