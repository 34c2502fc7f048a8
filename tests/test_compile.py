"""MoELayer and the local stages under torch.compile; over several ranks:
tests/distributed/test_compile.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
import torch._dynamo as dynamo
from helpers import ON_GPUS, alone, full_layer, randn, slow
from torch import Tensor, nn

import epmoe
from epmoe import opaque

E = 12
D = 64
K = 3
M = 40
TOKENS = (7, 2, M, 3, 0, 1)
GRAPHS = 3  # for T ≥ 2, 0 and 1

pytestmark = pytest.mark.usefixtures("forget_graphs")


@pytest.fixture(params=[slow("eager"), slow("aot_eager"), "inductor"])
def backend(request, device):
    """aot_eager traces what eager traces, and then more of it; inductor compiles what aot_eager
    runs.
    """
    if request.param == "inductor" and device.type == "cpu" and not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler")
    return request.param


@pytest.fixture
def ep(device):
    with epmoe.ExpertParallel(config(), device=device) as ep:
        yield ep


def config(dtype: str = "float32", **capacity: object) -> epmoe.EPConfig:
    routing = {"renormalize": True, "selection_bias": True}
    return alone(E, K, D, dtype, M, routing=routing, capacity=capacity)


def make_layer(ep: epmoe.ExpertParallel, seed: int = 0, **options: object) -> epmoe.MoELayer:
    return full_layer(ep, seed, bias=True, **options)[0]


def compiled(function: Callable, backend: str, dynamic: bool | None = True) -> Callable:
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def compiles() -> int:
    """Graphs that dynamo has made; a graph break would be an error, because of `fullgraph`."""
    assert not dynamo.utils.counters["graph_break"]
    return dynamo.utils.counters["stats"]["unique_graphs"]


def assert_same_bits(got: Tensor | tuple[Tensor, ...], want: Tensor | tuple[Tensor, ...]) -> None:
    assert type(got) is type(want)
    for g, w in zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]:
        assert g.dtype == w.dtype and torch.equal(
            g.contiguous().view(torch.uint8), w.contiguous().view(torch.uint8)
        )


def real_tokens(kind: str, T: int, device: torch.device) -> int | Tensor:
    return T // 2 if kind == "int" else torch.tensor(T // 2, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("num_tokens", "dynamic"), [("int", True), ("tensor", True), ("tensor", None)]
)
def test_one_graph_serves_a_layer(ep, backend, num_tokens, dynamic):
    """Without `dynamic`, torch takes the first T as static, and makes the second graph for any T ≥
    2.
    """
    layer = make_layer(ep)
    step = compiled(layer, backend, dynamic)
    for seed, T in enumerate(TOKENS):
        x = randn(T, D, seed=seed).to(ep.device)
        real = real_tokens(num_tokens, T, ep.device)
        before = ep.health().rounds
        y = step(x, real)
        assert ep.health().rounds == before + 1
        assert_same_bits(y, layer(x, real))
    # Half of 2 and of 3 tokens is 1, for which dynamo makes another graph, as for any int.
    assert compiles() <= GRAPHS + (num_tokens == "int" or not dynamic)


def test_batches_autocast_and_grad_mode(ep, backend):
    """[B, T, D] is B·T tokens, in one graph for all; autocast and grad mode change no bit."""
    layer = make_layer(ep)
    step = compiled(layer, backend)
    # One graph for all sizes.
    for B, T in ((2, 3), (4, 10), (5, 2)):
        x = randn(B, T, D, seed=T).to(ep.device)
        assert_same_bits(step(x), layer(x))
    assert compiles() == 1
    # Grad mode and autocast.
    want = layer(x)
    layer.requires_grad_(False)
    with torch.enable_grad():
        assert_same_bits(step(x), want)
    with torch.autocast(ep.device.type, dtype=torch.bfloat16):
        assert_same_bits(step(x), want)


def stages(x: Tensor, logits: Tensor, n: int | Tensor | None) -> tuple[Tensor, ...]:
    """Every stage of one rank, with arithmetic between them that inductor does in place."""
    routing = epmoe.route(logits, K, renormalize=True, num_tokens=n)
    expert_map = torch.arange(E, dtype=torch.int32, device=x.device)
    permuted = epmoe.permute(x, routing.ids, expert_map, E, alignment=8)
    y = epmoe.finalize(permuted.rows * 2 + 1, permuted, routing.weights)
    wide = epmoe.route(logits, K, scoring="sigmoid", num_tokens=n, id_dtype=torch.int64)
    rest = epmoe.zero_padding_rows_(x.clone(), n), *epmoe.quantize_fp8(x, num_tokens=n)
    return (
        y * 0.5,
        permuted.expert_offsets,
        permuted.tokens_per_expert,
        permuted.row_of_pair,
        *wide,
        *rest,
    )


@pytest.mark.parametrize("num_tokens", ["int", "tensor"])
def test_one_graph_serves_the_local_stages(device, backend, num_tokens):
    step = compiled(stages, backend)
    for seed, T in enumerate(TOKENS):
        x = randn(T, D, seed=seed).to(device)
        logits = randn(T, E, seed=seed + 50).to(device)
        real = real_tokens(num_tokens, T, device)
        assert_same_bits(step(x, logits, real), stages(x, logits, real))
    assert compiles() <= GRAPHS + (num_tokens == "int")


class Recorder(nn.Module):
    """A layer whose experts note that they have run, and return the rows of the window
    themselves.
    """

    def __init__(self, ep: epmoe.ExpertParallel, names: str) -> None:
        super().__init__()
        self.ran: list[str] = []

        def experts_of(name: str) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
            return lambda rows, expert_offsets, scales: self.ran.append(name) or rows

        router = randn(E, D).to(ep.device)
        bias = torch.zeros(E, device=ep.device)
        self.layers = nn.ModuleDict(
            {name: epmoe.MoELayer(ep, router, experts_of(name), bias=bias) for name in names}
        )


def test_rounds_are_kept_and_keep_their_order(ep, backend):
    """Rounds whose outputs nobody needs, equal ones, and ones that do not depend on each other."""

    class Model(Recorder):
        def forward(self, x: Tensor) -> Tensor:
            a, b, c = self.layers.values()
            c(x)  # nobody reads it
            y = b(x + 1) + a(x) + b(x + 1)
            z = a(x)  # the same call again
            return (y + z).relu()

    model = Model(ep, "abc")
    x = randn(6, D).to(ep.device)
    # The order without a compiler.
    want = model(x)
    eager = list(model.ran)
    model.ran[:] = []
    # Twice through one graph.
    step = compiled(model, backend)
    for _ in range(2):
        assert_same_bits(step(x), want)
        assert model.ran == eager == list("cbaba")
        model.ran.clear()
    assert compiles() == 1


def test_y_is_no_memory_of_the_window(ep, backend):
    """inductor writes into a layer's y, which must change neither the window nor another y."""
    model = Recorder(ep, "a")
    layer = model.layers["a"]
    step = compiled(lambda x: (layer(x) * 2 + 1, layer(x + 1)), backend)
    want = [
        (layer(x) * 2 + 1, layer(x + 1))
        for x in (randn(4, D, seed=s).to(ep.device) for s in range(3))
    ]
    got = [step(x) for x in (randn(4, D, seed=s).to(ep.device) for s in range(3))]
    for g, w in zip(got, want, strict=True):
        assert_same_bits(g, w)


def test_ids_and_weights_in_place_of_logits(ep, backend):
    """A model may have a router of its own."""
    layer = make_layer(ep)
    step = compiled(lambda x, ids, weights: opaque.moe(layer, x, ids, weights, None), backend)
    for T in TOKENS:
        x = randn(T, D, seed=T).to(ep.device)
        logits = randn(T, E, seed=T + 50).to(ep.device)
        routing = ep.route(logits, layer.bias)
        assert_same_bits(step(x, *routing), layer.run(x, *routing, None))
    assert compiles() <= GRAPHS


@dynamo.config.patch(allow_unspec_int_on_nn_module=True)
def test_one_graph_serves_all_layers(ep, backend):
    """Layers that are compiled one by one share a graph, if dynamo may take ints of modules as
    symbols.
    """
    for layer in [make_layer(ep, seed=n) for n in range(10)]:
        x = randn(5, D).to(ep.device)
        assert_same_bits(compiled(layer, backend)(x), layer(x))
    assert compiles() == 1


def test_weights_and_windows_change_below_the_graph(ep):
    """`load_state_dict` and `resume` need no new graph."""
    layer = make_layer(ep)
    other = make_layer(ep, seed=9)
    step = compiled(layer, "aot_eager")
    x = randn(5, D).to(ep.device)
    assert_same_bits(step(x), layer(x))
    # Other weights, and other windows.
    layer.load_state_dict(other.state_dict())
    assert_same_bits(step(x), other(x))
    ep.resume()
    assert_same_bits(step(x), other(x))
    assert ep.generation == 1 and ep.health().rounds == 2 and compiles() == 1


def test_failures_come_out_of_the_graph(device, backend):
    """The operator looks at the status, raises, and leaves no round open."""
    with epmoe.ExpertParallel(config(max_expert_rows=2 * K), device=device) as ep:
        faults: list[Exception] = []

        def experts(rows: Tensor, expert_offsets: Tensor, scales: Tensor | None) -> Tensor:
            if faults:
                raise faults.pop()
            return rows

        router = randn(E, D).to(device)
        bias = torch.zeros(E, device=device)
        step = compiled(epmoe.MoELayer(ep, router, experts, bias=bias), backend)
        x = randn(2, D).to(device)
        # A call that is right, three that fail, and the first one again.
        y = step(x)
        with pytest.raises(
            ValueError, match="x` has 41 tokens, but capacity.max_num_tokens_per_rank is 40"
        ):
            step(randn(M + 1, D).to(device))
        with pytest.raises(epmoe.EPOverflowError, match=f"needed {3 * K} expert-major rows"):
            step(randn(3, D).to(device))
            ep.check()  # on a GPU the host runs ahead
        faults.append(KeyError("of the experts"))
        with pytest.raises(KeyError, match="of the experts"):
            step(x)
        assert_same_bits(step(x), y)
    with pytest.raises(RuntimeError, match="this ExpertParallel is closed"):
        step(x)


def test_wrong_inputs_are_named_while_tracing(ep):
    step = compiled(make_layer(ep), "eager")
    words = r"`x` must be float32 \[T, 64\] or \[B, T, 64\], got"
    # as torch 2.11 has them
    parts = r"`x` must be '.*'float32'.*' \[T, '.*'64'.*'\] or \[B, T, '.*'64'.*'\], got '"
    for x in (randn(3, 32), randn(3, D).double()):
        with pytest.raises(dynamo.exc.Unsupported, match=f"{words}|{parts}"):
            step(x.to(ep.device))
    with torch.enable_grad(), pytest.raises(dynamo.exc.Unsupported, match="without fullgraph"):
        step(randn(3, D).to(ep.device).requires_grad_())


@ON_GPUS
def test_cuda_graph_trees(device):
    """`mode="reduce-overhead"`: for each T a recorded CUDA graph, which is replayed from the third
    call on.
    """
    with epmoe.ExpertParallel(config("bfloat16"), device=device) as ep:
        model = nn.Sequential(make_layer(ep), make_layer(ep, seed=9))
        assert model[0].experts.gemm != "loop", (
            "a loop over the experts reads the offsets on the host"
        )
        step = torch.compile(model, fullgraph=True, mode="reduce-overhead", dynamic=True)
        # Several T, each recorded and replayed.
        for n, T in enumerate((16, 16, 16, 5, 16, 5, 5, 16, 5, 1, 1, 1, 1)):
            x = randn(T, D, dtype=torch.bfloat16, seed=n).to(device)
            torch.compiler.cudagraph_mark_step_begin()
            y = step(x).clone()
            ep.check()  # a replay is no call
            assert_same_bits(y, model(x))
        assert compiles() <= 2
        assert dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
