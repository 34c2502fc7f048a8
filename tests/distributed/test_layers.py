"""MoELayer over several ranks, many layers on one ExpertParallel, and their memory."""

from __future__ import annotations

import gc
from random import Random

import pytest
import torch
import torch.distributed as dist
from exchanges import make_config, node_of, nodes_of, poison
from expert_inputs import quantized as quantized_weights
from expert_inputs import random_mxfp4, random_nvfp4
from helpers import ON_GPUS, assert_close, captured, full_layer, poison_, randn

from epmoe import GroupedExperts, MoELayer, SleepingWeights
from epmoe.exchange.memory import MemoryPlan
from epmoe.local.reference import moe_reference, route_reference
from epmoe.local.weight_formats import bits_of, dequantize_weights

pytestmark = pytest.mark.usefixtures("serving")

E = 13
D = 64
K = 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_equals_the_dense_one(make_ep, rank, size, dtype, bias):
    ep = make_ep(
        experts=E,
        top_k=K,
        hidden=D,
        dtype=dtype,
        capacity={"alignment": 8},
        placement={"strategy": "round_robin"},
        routing={"selection_bias": bias},
    )
    layer, weights = full_layer(ep, bias=bias)
    for T, num_tokens in [(2 * rank, None), (16, 12), (0, None), (1, 1)]:
        x = randn(T, D, dtype=ep.config.model.torch_dtype, seed=rank)
        real = T if num_tokens is None else num_tokens
        y = layer(x.to(ep.device), num_tokens=num_tokens)
        ids, w = route_reference(
            x.float() @ layer.router_weight.cpu().T, K, bias=None if not bias else layer.bias.cpu()
        )
        assert y.shape == x.shape and y.dtype == x.dtype and y[real:].eq(0).all()
        assert_close(y[:real], moe_reference(x[:real], ids[:real], w[:real], weights), slack=4)


@pytest.mark.parametrize(("payload", "width"), [("auto", 128), ("fp8", 128), ("fp8", 160)])
def test_a_layer_in_mxfp4_is_that_of_its_values(make_ep, rank, size, payload, width):
    """Bitwise on CPUs, in calls of any size; padding is zeros, and a token of NaN
    changes no other. 160 columns have a block that is partly filled.
    """
    packed = mxfp4_weights(width)
    plain = {
        f"w_{name}": dequantize_weights(
            packed[f"w_{name}"], packed[f"{name}_scales"], torch.bfloat16
        )
        for name in ("gate_up", "down")
    }
    assert_layers_agree(make_ep, rank, size, payload, width, packed, plain)


def mxfp4_weights(width):
    """The arguments of a layer in MXFP4."""
    packed = {}
    for seed, (name, shape) in enumerate({"gate_up": (2 * D, width), "down": (width, D)}.items()):
        packed[f"w_{name}"], packed[f"{name}_scales"] = random_mxfp4(E, *shape, seed=seed)
    return packed


@pytest.mark.parametrize(("payload", "width"), [("auto", 128), ("fp8", 160)])
def test_a_layer_in_nvfp4_is_that_of_its_values(make_ep, rank, size, payload, width):
    """The same, where gate and up have two tensor scales."""
    parts, packed = nvfp4_weights(width)
    values = [
        dequantize_weights(codes, scales, torch.bfloat16, scale) for codes, scales, scale in parts
    ]
    plain = {"w_gate_up": torch.cat(values[:2], 1), "w_down": values[2]}
    assert_layers_agree(make_ep, rank, size, payload, width, packed, plain)


def nvfp4_weights(width):
    """Gate, up and down in NVFP4, each with codes, scales and a tensor scale, and the arguments of
    a layer that has them.
    """
    gate, up, down = (
        random_nvfp4(E, *shape, seed=seed, power=power)
        for seed, (shape, power) in enumerate([((D, width), 0), ((D, width), -1), ((width, D), 0)])
    )
    joined = [
        torch.cat([bits_of(a), bits_of(b)], 1).view(a.dtype)
        for a, b in zip(gate[:2], up[:2], strict=True)
    ]
    packed = {
        "w_gate_up": joined[0],
        "gate_up_scales": joined[1],
        "w_down": down[0],
        "down_scales": down[1],
        "tensor_scales": torch.stack([gate[2], up[2], down[2]]).repeat(E, 1),
    }
    return (gate, up, down), packed


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    ("form", "payload", "T"),
    # On GPUs rows in fp8 take a kernel for few rows, or that for many.
    [("NVFP4", "auto", 16), ("MXFP4", "fp8", 4), ("MXFP4", "fp8", 130)],
)
def test_a_layer_of_four_bits_sleeps(make_ep, rank, form, payload, T, level):
    """Codes, scales and tensor scales come back on all ranks, from the CPU or out of a state dict,
    and y has the same bits.
    """
    sizes = {"experts": E, "top_k": K, "hidden": 128, "max_tokens": 130}
    ep = make_ep(dtype="bfloat16", exchange={"payload": payload}, **sizes)
    packed = nvfp4_weights(128)[1] if form == "NVFP4" else mxfp4_weights(128)
    layer = MoELayer.from_full(ep, randn(E, 128, seed=9), **packed)
    kept = {name: value.cpu() for name, value in layer.state_dict().items()}
    x = randn(T, 128, dtype=torch.bfloat16, seed=rank).to(ep.device)
    want = layer(x).clone()
    weights = SleepingWeights(layer)
    ep.sleep(weights.offload if level == 1 else weights.discard)
    ep.wake(weights.restore)
    if level == 2:
        layer.load_state_dict(kept)
    assert torch.equal(layer(x), want)


def assert_layers_agree(make_ep, rank, size, payload, width, packed, plain):
    """A layer of experts in four bits, and one of their values."""
    if width % 128 and payload == "fp8" and nodes_of(size):
        pytest.skip("a block that is partly filled travels within a node")
    sizes = {"experts": E, "top_k": K, "hidden": width, "max_tokens": 130}
    ep = make_ep(dtype="bfloat16", exchange={"payload": payload}, **sizes)
    layer, values = (
        MoELayer.from_full(ep, randn(E, width, seed=9), **given) for given in (packed, plain)
    )
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    # Calls of any size, some with padding of NaN.
    for T, real in [(2 * rank, None), (16, 12), (0, None), (1, 1), (130, None)]:
        x = randn(T, width, dtype=torch.bfloat16, seed=rank).to(ep.device)
        x[real:] = torch.nan if real is not None else x[real:]
        got = layer(x, num_tokens=real)
        want = values(x, num_tokens=real)
        assert got.isfinite().all() and not got[T if real is None else real :].any()
        assert (
            torch.equal(got, want)
            if ep.device.type == "cpu"
            else assert_close(got, want, slack=4) is None
        )
    # A token of NaN changes no other.
    x = randn(16, width, dtype=torch.bfloat16, seed=rank).to(ep.device)
    want = layer(x)
    x[3] = torch.nan
    others = torch.arange(16) != 3
    assert torch.equal(layer(x)[others], want[others])


def test_61_layers_share_one_set_of_windows(make_ep, rank, size):
    """All layers share one set of windows: the plan's bytes are mapped before the first layer and
    after the last.
    """
    gc.collect()  # tracebacks of earlier tests hold their windows
    ep = make_ep(experts=E, top_k=K, hidden=D)
    before = mapped_windows()
    x = randn(7 + rank, D, seed=rank).to(ep.device)
    for n in range(61):
        layer, _ = full_layer(ep, seed=n)
        x = torch.nn.functional.rms_norm(x + layer(x), (D,))
    assert x.isfinite().all()
    assert mapped_windows() == before
    if ep.device.type == "cpu":
        assert before == [ep.memory_plan().window_bytes] * ep.config.topology.ranks_here


@pytest.mark.parametrize("payload", ["auto", "fp8"])
def test_allocation_equals_the_plan(make_ep, rank, size, device, payload):
    options = {"experts": E, "hidden": 256, "dtype": "bfloat16", "max_tokens": 100}
    options |= {
        "exchange": {"payload": payload, "combine_payload": payload},
        "placement": {"num_redundant_experts": 3},
    }
    want = MemoryPlan.build(make_config(size, **options), rank)  # before anything is allocated
    assert mapped_windows() == []
    ep = make_ep(**options)
    # What is mapped, and each buffer, has the bytes of the plan.
    plan = ep.memory_plan()
    if ep.device.type == "cpu":
        assert (
            plan == want and mapped_windows() == [plan.window_bytes] * ep.config.topology.ranks_here
        )
    assert node_of(ep).window.local.nbytes == plan.window_bytes
    assert node_of(ep).memory[1].nbytes == plan.scratch_bytes
    views = ep.exchange.views
    assert {name: view.nbytes for name, view in views.items()} == {
        b.name: b.nbytes for b in plan.buffers
    }
    # Nothing is left behind.
    ep.close()
    del ep, views
    assert mapped_windows() == []


def mapped_windows() -> list[int]:
    """Bytes of each window in shared memory that this process maps: its own and those
    of its peers.
    """
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if "memfd:epmoe" in line]
    return [int(end, 16) - int(start, 16) for start, end in spans]


@pytest.fixture
def deep_layer(make_ep, device, request):
    """A layer on DeepGEMM, with shared experts. Parameters: payload, and whether all calls take
    DeepGEMM. If not, all rows take epmoe's own kernels.
    """
    pytest.importorskip("deep_gemm")
    E = 16
    D = 512
    F = 256
    payload, invariant = request.param
    options = {"gemm": "deep_gemm" if invariant else "auto", "batch_invariant": invariant}
    ep = make_ep(
        experts=E,
        top_k=K,
        hidden=D,
        dtype="bfloat16",
        max_tokens=300,
        capacity={"gap_rows": "undefined"},
        exchange={"payload": payload},
    )
    # Weights of this rank, in fp8 or bf16.
    local = ep.placement.logical_experts(ep.rank)
    plain = [
        (randn(E, *shape, seed=i)[local] / shape[1] ** 0.5).to(device)
        for i, shape in enumerate([(2 * F, D), (D, F)])
    ]
    if payload == "fp8":
        (gate_up, gate_up_scales), (down, down_scales) = map(quantized_weights, plain)
        experts = GroupedExperts(
            gate_up, down, gate_up_scales=gate_up_scales, down_scales=down_scales, **options
        )
    else:
        experts = GroupedExperts(*(w.bfloat16() for w in plain), **options)
    assert experts.gemm == ("deep_gemm" if invariant else "fused_experts")
    assert experts.batch_invariant is invariant
    # With shared experts.
    shared = torch.nn.Linear(D, D, bias=False, dtype=torch.bfloat16, device=device).requires_grad_(
        False
    )
    return MoELayer(ep, randn(E, D, seed=3).bfloat16().to(device), experts, shared=shared)


INVARIANT = [("auto", True), ("fp8", True)]
BOTH = pytest.mark.parametrize("deep_layer", INVARIANT, indirect=True)
ALL = pytest.mark.parametrize(
    "deep_layer", [*INVARIANT, ("auto", False), ("fp8", False)], indirect=True
)


@ON_GPUS
@ALL
def test_deep_gemm_agrees_with_torch(deep_layer, rank):
    for T in (0, 1, 17, 300):
        x = randn(T, 512, seed=rank).bfloat16().to(deep_layer.ep.device)
        poison(deep_layer.ep)
        got = deep_layer(x)
        gemms = deep_layer.experts.gemms
        deep_layer.experts.gemms = ("torch",)
        want = deep_layer(x)
        deep_layer.experts.gemms = gemms
        error, norm = ((a.float()).norm(dim=1) for a in (got - want, want))
        assert (error <= (0.06 if deep_layer.experts.is_fp8 else 0.01) * norm).all()


@ON_GPUS
@BOTH
def test_y_of_a_token_depends_on_no_other_token(deep_layer, rank, size):
    """Bitwise the same in any batch, by either protocol, and from any rank."""
    tokens = randn(300, 512, seed=9).bfloat16().to(deep_layer.ep.device)
    deep_layer.shared = None  # torch's GEMM promises nothing
    whole = deep_layer(tokens)
    for T in (1, 7, 100):
        first = (11 * rank + T) % 200
        assert torch.equal(deep_layer(tokens[first : first + T]), whole[first : first + T])
    wanted = [torch.empty_like(whole, device="cpu") for _ in range(size)]
    dist.all_gather(wanted, whole.cpu())
    assert all(torch.equal(y, whole.cpu()) for y in wanted)


@ON_GPUS
@ALL
def test_captured_layers_with_nan_in_gaps(deep_layer, rank):
    """Many layers of random T in one graph, replayed over memory that was NaN: bitwise what eager
    calls return.
    """
    ep = deep_layer.ep
    random = Random(rank)
    xs = [randn(random.randint(0, 300), 512, seed=i).bfloat16().to(ep.device) for i in range(50)]
    # What eager calls return, and a graph of all of them.
    deep_layer(xs[0].new_zeros(300, 512))
    eager = [deep_layer(x).clone() for x in xs]
    with torch.inference_mode():
        replay, ys = captured(lambda: [deep_layer(x) for x in xs])
    # Replays over memory of NaN return the same.
    for _ in range(20):
        poison(ep)
        replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, want) for y, want in zip(ys, eager, strict=True))
        for y in ys:
            poison_(y)
