"""Training: compiled layers against eager ones, and shapes. tests/distributed/test_training_fsdp.py
has steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import long, randn, slow
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from epmoe import GroupedExperts, MoELayer
from epmoe.local.spread import local_view
from epmoe.training import TrainingExchange, fully_shard, route

E = 6
K = 2
D = 32
WIDTH = 24
T = 9


def weights_of(layer: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (E, D), (E, 2 * WIDTH, D), (E, D, WIDTH)
    return tuple(randn(*shape, seed=10 * layer + i) / 4 for i, shape in enumerate(shapes))


def make_layers(ep, num_layers: int = 2, num_rows="exact", dtype=torch.float32) -> list[MoELayer]:
    held = ep.placement.logical_experts(ep.rank)
    device = ep.device
    layers = []
    for i in range(num_layers):
        router, gate_up, down = (w.to(device) for w in weights_of(i))
        experts = GroupedExperts(gate_up[held].to(dtype), down[held].to(dtype))
        layers.append(MoELayer(ep, router, experts, num_rows=num_rows))
    return layers


@pytest.fixture
def budgeted(request) -> Iterator[None]:
    """Compilers may keep this share of what a backward pass needs, and compute the rest again."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=request.param):
        yield


class Graph(torch.nn.Module):
    """Layers that follow each other, that do not, and some whose y nobody reads."""

    def __init__(self, layers: list[MoELayer], kind: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        if self.kind == "beside":
            y = first(x)
            second(x)
            return y.square().sum()
        if self.kind == "parallel":
            return (first(x) * second(x)).sum()
        y = x + second(x + first(x))
        if self.kind == "unused":
            first(y)
        return y.square().sum()


class OwnLayer(torch.nn.Module):
    """A user's own, around the exchange."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer
        self.exchange = TrainingExchange(layer.ep)

    def forward(self, x: Tensor) -> Tensor:
        # The stages of a layer, as users write them.
        routing = route(self.layer.logits(x), K)
        routed = self.exchange.dispatch(
            x, *routing, num_rows=self.layer.num_rows, weights_on="both", tag=self.layer.tag
        )
        rows = self.layer.experts(
            routed.rows, routed.expert_offsets, row_weights=routed.row_weights
        )
        return self.exchange.combine(rows, routed)


# Num_rows, fullgraph, memory budget.
WAYS = [
    (256, True, 1),
    (256, False, 0.3),
    ("exact", False, 1),
]
QUICK = [
    ("unused", *WAYS[0], False),
    ("parallel", *WAYS[1], False),
    ("parallel", *WAYS[2], True),
]
BESIDE = ("beside", *WAYS[0], False)  # another y that nobody reads, as in "unused"
ALL = [
    (kind, *way, own)
    for kind in ("chain", "parallel", "beside", "unused")
    for way in WAYS
    for own in (False, True)
]


@pytest.mark.parametrize(
    "backend, kind, num_rows, fullgraph, budgeted, own",
    [
        *(pytest.param("aot_eager", *case) for case in QUICK),
        *(slow(backend, *BESIDE) for backend in ("aot_eager", "inductor")),
        *(slow("inductor", *case) for case in QUICK),
        *(long("aot_eager", *case) for case in ALL if case not in [*QUICK, BESIDE]),
    ],
    indirect=["budgeted"],
)
def test_compiled_layers(make_ep, rank, budgeted, backend, kind, num_rows, fullgraph, own):
    """Compilers neither remove a round, nor move it over another one, nor run it twice."""
    # Ranks wait while another one compiles.
    ep = make_ep(experts=E, top_k=K, hidden=D, timeout_s=120.0)
    layers = make_layers(ep, num_rows=num_rows)
    model = Graph([OwnLayer(layer) for layer in layers] if own else layers, kind)
    # What eager layers give, and how many rounds they play.
    inputs = [randn(T, D, seed=rank).to(ep.device).requires_grad_(), *model.parameters()]
    want = torch.autograd.grad(model(inputs[0]), inputs, materialize_grads=True)
    rounds = ep.health().rounds
    step = torch.compile(model, backend=backend, fullgraph=fullgraph)
    # A second call takes the graph of the first.
    for _ in range(2):
        got = torch.autograd.grad(step(inputs[0]), inputs, materialize_grads=True)
        before = ep.health().rounds
        for a, b in zip(map(local_view, got), map(local_view, want), strict=True):
            # Inductor adds in another order.
            limit = 0.0 if backend == "aot_eager" else 1e-5 * b.abs().max().item()
            torch.testing.assert_close(a, b, rtol=0.0, atol=limit)
    # One eager step and two compiled ones have played the same rounds.
    assert before == 3 * rounds
    ep.check()


@pytest.mark.parametrize("num_rows, budgeted", [("exact", 1), (256, 0.3)], indirect=["budgeted"])
def test_what_no_graph_can_hold_is_refused(make_ep, rank, budgeted, num_rows):
    [layer] = make_layers(make_ep(experts=E, top_k=K, hidden=D), 1, num_rows=num_rows)
    for model in (layer, OwnLayer(layer))[: 1 if num_rows == "exact" else 2]:
        with pytest.raises(
            torch._dynamo.exc.Unsupported,
            match="compile without fullgraph, or give a number of rows",
        ):
            torch.compile(model, backend="aot_eager", fullgraph=True)(
                randn(T, D, seed=rank).to(layer.ep.device)
            )


@pytest.mark.parametrize("shape", [(T, D), (3, 4, D), (0, D)])
def test_shapes_and_shared_experts(make_ep, rank, shape):
    ep = make_ep(experts=E, top_k=K, hidden=D)
    [layer] = make_layers(ep, 1)
    x = randn(*shape, seed=rank).to(ep.device).requires_grad_()
    # A shared expert adds to y, in tokens of any shape or in none.
    alone = layer(x)
    layer.shared = lambda x_TD: 2 * x_TD
    y = layer(x)
    torch.testing.assert_close(y, alone + 2 * x)
    y.sum().backward()
    assert y.shape == x.shape and x.grad.shape == x.shape
    ep.check()


def gradients_of(call, model: torch.nn.Module, x: Tensor) -> list[Tensor]:
    inputs = [x, *model.parameters()]
    return torch.autograd.grad(call(x).square().sum(), inputs)


@pytest.mark.parametrize("wholly", [False, True])
def test_checkpoints_in_what_is_compiled(make_ep, rank, wholly):
    """Rounds that a checkpoint runs again stand between graphs."""
    ep = make_ep(experts=E, top_k=K, hidden=D, timeout_s=120.0)
    first, second = layers = torch.nn.ModuleList(make_layers(ep, num_rows=256))
    x = randn(T, D, seed=rank).to(ep.device).requires_grad_()

    def run(x: Tensor) -> Tensor:
        if wholly:
            return 2 * checkpoint(lambda z: second(first(z)).tanh(), x, use_reentrant=False)
        return checkpoint(second, checkpoint(first, x, use_reentrant=False), use_reentrant=False)

    # Eager first, then compiled: the same bits.
    want = gradients_of(run, layers, x)
    torch._dynamo.reset()
    got = gradients_of(torch.compile(run, backend="aot_eager"), layers, x)
    assert all(map(torch.equal, got, want))
    ep.check()


def test_compilers_may_make_numbers_of_layers_symbolic(make_ep, rank):
    """As they do under FSDP2, and where docs/compile.md says that layers share a graph."""
    ep = make_ep(experts=E, top_k=K, hidden=D, timeout_s=120.0)
    layers = torch.nn.Sequential(*make_layers(ep, 3, num_rows=256))
    x = randn(T, D, seed=rank).to(ep.device).requires_grad_()
    want = gradients_of(layers, layers, x)
    torch._dynamo.reset()
    # Layers differ in numbers alone, which then become inputs of one graph.
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        compiled = torch.nn.Sequential(
            *(torch.compile(layer, backend="aot_eager") for layer in layers)
        )
        got = gradients_of(compiled, layers, x)
    assert all(map(torch.equal, got, want))
    ep.check()


@pytest.mark.parametrize("each", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_layers_that_are_sharded(make_ep, size, rank, each):
    """FSDP2's hooks break graphs, so that the second layer makes the numbers of the first ones
    symbolic. Its gradients are those without a compiler.
    """
    ep = make_ep(experts=E, top_k=K, hidden=D, timeout_s=120.0)
    model = torch.nn.Sequential(*make_layers(ep, num_rows=256))
    mesh = init_device_mesh(ep.device.type, (size,))
    for module in (*model, model) if each else (model,):
        fully_shard(module, mesh=mesh)
    x = randn(T, D, seed=rank).to(ep.device)
    torch._dynamo.reset()
    # Gradients without a compiler and with one.
    found = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        call(x).square().sum().backward()
        found.append([local_view(value.grad).clone() for value in model.parameters()])
    assert all(map(torch.equal, *found))
    ep.check()
