"""Rounds of vLLM's layers over 2 ranks, in its own kernel: what the host does for one, and what
becomes of one in which a rank raises (docs/testing.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

if "RANK" not in os.environ:
    pytest.skip("needs vLLM and 2 ranks: make stacks", allow_module_level=True)
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from counted import functions_of
from helpers import Interrupted, assert_close, distinct_ids
from interrupted_steps import of_all, steps_until_whole
from torch import Tensor
from vllm_kernels import Model, moe_config, step

import epmoe
from epmoe.bench.host import started
from epmoe.integrations import served
from epmoe.integrations.vllm import layer as layers
from epmoe.integrations.vllm import prepare_finalize, sizes
from epmoe.integrations.vllm.choice import Choice, VllmLayout
from epmoe.integrations.vllm.experts import EpmoeExperts
from epmoe.local.experts import GroupedExperts
from epmoe.local.reference import moe_reference

MODEL = Model(E=8, K=2, D=64, F=32)
T = 12
LAYOUTS: tuple[VllmLayout, ...] = ("layer", "rank")
# In the seat and in vLLM's kernel around it. Other tests hold the rounds below.
FILES = {module.__file__ for module in (layers, mk, prepare_finalize, served, sizes)}
# At most so many functions of this package, and operators, for a round whose experts are those of
# the layout: `GroupedExperts`, or vLLM's own, which here return their rows.
MOST = {"layer": (74, 23), "rank": (50, 17)}


class Echo(EpmoeExperts):
    """In the place of vLLM's experts, whose kernels are for GPUs: outputs are the rows."""

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> tuple[tuple[int, ...], ...]:
        return (1,), (0,), (M, K)

    def apply(self, output: Tensor, hidden_states: Tensor, *_: Any, **__: Any) -> None:
        output.copy_(hidden_states)


class OfVllm:
    """What a method of vLLM's does with its kernel."""

    moe_kernel: mk.FusedMoEKernel

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        y: Tensor = self.moe_kernel.apply(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.moe_config.activation,
            global_num_experts=MODEL.E,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            expert_map=None,
        )
        return y


class Layer:
    """A layer of vLLM's in the seat, with this rank's experts of `weights`."""

    def __init__(self, layout: VllmLayout, made: sizes.Sizes, on_input: bool = False) -> None:
        rank = dist.get_rank()
        e = MODEL.E // dist.get_world_size()
        self.gate_up, self.down = weights()
        own = slice(rank * e, (rank + 1) * e)
        experts = GroupedExperts(self.gate_up[own], self.down[own]).requires_grad_(False)
        config = moe_config(MODEL, rank, dist.get_world_size(), T, torch.device("cpu"))
        self.exchange = prepare_finalize.EpmoePrepareAndFinalize(made, layout)
        kind = EpmoeExperts if layout == "layer" else Echo
        self.method: Any = layers._with_epmoe(OfVllm)()
        self.method.moe_kernel = mk.FusedMoEKernel(
            self.exchange, kind(config, experts, self.exchange)
        )
        self.layout = layout
        self.layer = SimpleNamespace(
            w13_weight=self.gate_up[own],
            w2_weight=self.down[own],
            moe_config=config,
            apply_router_weight_on_input=on_input,
        )

    def __call__(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x_TD, ids_TK, weights_TK = batch
        y: Tensor = self.method.epmoe_apply(self.layer, x_TD, weights_TK, ids_TK)
        return y

    def check(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        """y is that of one process."""
        y_TD = self(batch)
        x_TD, ids_TK, weights_TK = batch
        if self.layout == "layer":
            return assert_close(
                y_TD, moe_reference(x_TD, ids_TK, weights_TK, (self.gate_up, self.down))
            )
        # Each rank that has an expert of a token returns its row.
        e = MODEL.E // dist.get_world_size()
        ranks = [len(set(row)) for row in (ids_TK // e).tolist()]
        return assert_close(y_TD, x_TD * torch.tensor(ranks)[:, None])


def weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((MODEL.E, 2 * MODEL.F, MODEL.D), (MODEL.E, MODEL.D, MODEL.F))
    gate_up, down = (torch.randn(shape, generator=generator) * 0.1 for shape in shapes)
    return gate_up, down


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _in_a_step() -> Iterator[None]:
    """All ranks bring T tokens to it."""
    with torch.inference_mode(), step([T, T]):
        yield
    dist.barrier()


@pytest.fixture
def batch(_group: None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TD = torch.randn(T, MODEL.D, generator=generator)
    weights_TK = torch.rand(T, MODEL.K, generator=generator)
    return x_TD, distinct_ids(T, MODEL.E, MODEL.K, seed=dist.get_rank()).int(), weights_TK


@pytest.fixture
def made(_group: None, layout: VllmLayout) -> Iterator[sizes.Sizes]:
    """Exchanges of their own, which have had no round."""
    by = "rank" if layout == "rank" else "expert"
    shape = sizes.Shape(MODEL.E, MODEL.K, MODEL.D, torch.float32, T, "linear", "auto", by)
    made = sizes.Sizes.make(
        shape, dist.group.WORLD, torch.device("cpu"), Choice(exchange={"timeout_s": 60.0})
    )
    yield made
    made.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_host_does_for_a_round(
    layout: VllmLayout, made: sizes.Sizes, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    layer = Layer(layout, made)
    for _ in range(3):
        layer.check(batch)
    functions = functions_of(lambda: layer(batch))
    operators = started(lambda: layer(batch)).operators
    most_functions, most_operators = MOST[layout]
    assert functions <= most_functions
    assert operators <= most_operators


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_handler_raises_at_any_place(
    layout: VllmLayout, made: sizes.Sizes, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Whatever raises on one rank, the other one has its sums or hears of it, and both go on."""
    layer = Layer(layout, made)
    begin = layer.exchange.begin

    def a_round(arm: Any) -> None:
        def beginning() -> None:
            begin()
            arm()

        layer.exchange.begin = beginning
        layer.check(batch)

    outcomes = set[tuple[str, ...]]()
    for found in steps_until_whole(dist.get_rank(), a_round, files=FILES):
        outcomes.add(tuple(found))
        layer.exchange.begin = begin
        layer.check(batch)
    name = Interrupted.__name__
    # Behind its combine a rank may be interrupted in a round that is whole.
    possible = {("EPAbortedError", name), ("whole", name), ("whole", "whole")}
    assert possible - {("whole", name)} <= outcomes <= possible


@pytest.mark.parametrize(
    ("layout", "on_input"), [("layer", False), ("layer", True), ("rank", False)]
)
def test_a_rank_that_raises_first_brings_the_shape_of_the_others(
    layout: VllmLayout, on_input: bool, made: sizes.Sizes, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Also in the first round of an exchange, which on GPUs ends by a mismatch of layouts."""
    layer = Layer(layout, made, on_input)
    x_TD, ids_TK, weights_TK = batch
    if dist.get_rank() == 1:
        with pytest.raises(TypeError, match="`ids` must be"):
            layer((x_TD, weights_TK, weights_TK))
    else:
        with pytest.raises(epmoe.EPAbortedError, match=r"\[1\]"):
            layer(batch)
    ep, _ = made.for_this_step()
    shapes = of_all(tuple(map(str, ep.last_shape)))
    assert shapes[0] == shapes[1]
