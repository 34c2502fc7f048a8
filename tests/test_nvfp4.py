"""Experts in NVFP4: what they compute, by a decoder that shares nothing with epmoe's, over rows in
bf16 and in fp8; what casts, state dicts and adapters do to them; and what is refused.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from expert_inputs import BF16, GPT_OSS, MXFP4
from helpers import ON_GPUS, alone, captured, generator, poison_, poisoned_memory, randn
from test_mxfp4_by_fp8 import (
    COUNTS,
    MAGNITUDES,
    E,
    Rows,
    as_fp8,
    assert_same_as_dequantized,
    errors,
)
from torch import Tensor

import epmoe
from epmoe.local.gemm.gemm import Added, Factors, plain_weights
from epmoe.local.gemm.hopper import Hopper
from epmoe.local.gemm.table import GEMMS
from epmoe.local.weight_formats import dequantize_weights
from epmoe.native import ops

pytestmark = pytest.mark.usefixtures("serving")

E4M3 = torch.float8_e4m3fn
GROUP = 16
# D and F: those of all kernels, of those for few rows, and of none.
SIZES = [(256, 128), (160, 96), (192, 320), (48, 80)]
# Error of a row, over its norm: h is bf16.
LIMIT = 0.02


def e4m3(byte: int) -> float:
    """The value of a byte: a sign, four bits of exponent and three of fraction."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent = byte >> 3 & 15
    fraction = byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (8 + fraction) * 2.0 ** (exponent - 10)


SCALES = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64)


def decoded(codes: Tensor, scales: Tensor, tensor_scale: float) -> Tensor:
    """fp64 [n, k] of bytes [n, k/2], the low four bits first, bytes of e4m3 [n, k/16], and the
    scale of the matrix.
    """
    n, half = codes.shape
    values = torch.empty(n, 2 * half, dtype=torch.float64)
    signed = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)
    values[:, ::2] = signed[(codes % 16).long()]
    values[:, 1::2] = signed[(codes // 16).long()]
    by_group = values.view(n, -1, GROUP) * SCALES[scales.long()][..., None]
    return by_group.view(n, -1) * tensor_scale


class Drawn:
    """Codes, scales, tensor scales and biases of experts, on the CPU."""

    def __init__(self, sizes: tuple[int, int], gpt_oss: bool = False, e: int = E) -> None:
        D, F = sizes
        drawn = generator(0)
        self.gpt_oss = gpt_oss
        self.codes, self.scales = [], []
        for n, k in ((2 * F, D), (D, F)):
            self.codes.append(
                torch.randint(256, (e, n, k // 2), generator=drawn, dtype=torch.uint8)
            )
            # From 2 to 448, and some subnormal ones and zeros.
            scales = torch.randint(64, 127, (e, n, k // GROUP), generator=drawn, dtype=torch.uint8)
            small = torch.randint(10, scales.shape, generator=drawn) == 0
            scales[small] %= 8
            self.scales.append(scales)
        # Such that outputs are about as large as rows. Those of gate and up differ.
        self.tensor_scales = torch.rand(e, 3, generator=drawn) + 0.5
        self.tensor_scales[:, :2] /= 300 * D**0.5
        self.tensor_scales[:, 2] /= 300 * F**0.5
        self.biases = []
        if gpt_oss:
            self.biases = [torch.randn(e, n, generator=drawn).to(BF16) for n in (2 * F, D)]

    def arguments(self, device: torch.device) -> dict[str, Tensor]:
        """Those of GroupedExperts that are tensors."""
        given = {
            "w_gate_up": self.codes[0].view(MXFP4),
            "w_down": self.codes[1].view(MXFP4),
            "gate_up_scales": self.scales[0].view(E4M3),
            "down_scales": self.scales[1].view(E4M3),
            "tensor_scales": self.tensor_scales,
        }
        if self.gpt_oss:
            given |= {"gate_up_bias": self.biases[0], "down_bias": self.biases[1]}
        return {name: tensor.to(device) for name, tensor in given.items()}

    def experts(self, device: torch.device, **options: object) -> epmoe.GroupedExperts:
        if self.gpt_oss:
            options |= GPT_OSS
        return epmoe.GroupedExperts(**self.arguments(device), **options)

    def weights(self, x: int) -> tuple[Tensor, Tensor]:
        """Gate and up, and down, of an expert in fp64."""
        gate, up, down = self.tensor_scales[x].tolist()
        gate_up = decoded(self.codes[0][x], self.scales[0][x], 1.0)
        if self.gpt_oss:
            gate_up[::2] *= gate
            gate_up[1::2] *= up
        else:
            F = len(gate_up) // 2
            gate_up[:F] *= gate
            gate_up[F:] *= up
        return gate_up, decoded(self.codes[1][x], self.scales[1][x], down)

    def outputs(self, rows: Tensor, x: int) -> Tensor:
        """In fp64, of rows that have these values."""
        gate_up, down = self.weights(x)
        sums = rows @ gate_up.T
        if not self.gpt_oss:
            gate, up = sums.chunk(2, 1)
            return (gate * torch.sigmoid(gate) * up) @ down.T
        sums = sums + self.biases[0][x].double()
        gate = sums[:, ::2].clamp(max=7.0)
        up = sums[:, 1::2].clamp(-7.0, 7.0)
        h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        return h @ down.T + self.biases[1][x].double()


def every_code_and_scale() -> tuple[Tensor, Tensor]:
    """A row for each scale, with every code: bytes [256, 8] and bytes of e4m3 [256, 1]."""
    codes = torch.arange(16, dtype=torch.uint8)
    pairs = codes[::2] | codes[1::2] << 4
    return pairs.repeat(256, 1), torch.arange(256, dtype=torch.uint8).view(256, 1)


@pytest.mark.parametrize("tensor_scale", [None, 1.0, 3.7e-4, 2.0**-30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16])
def test_every_code_and_every_scale(dtype, tensor_scale):
    """Rounded once. Without a tensor scale bf16 has all values."""
    codes, scales = every_code_and_scale()
    given = None
    if tensor_scale is not None:
        given = torch.tensor(tensor_scale)
        tensor_scale = given.item()
    got = dequantize_weights(codes.view(MXFP4), scales.view(E4M3), dtype, given)
    want = decoded(codes, scales, 1.0 if tensor_scale is None else tensor_scale)
    assert torch.equal(got.isnan(), want.isnan()) and want.isnan().sum() == 2 * 16
    real = ~want.isnan()
    assert torch.equal(got[real], want[real].to(dtype))
    assert torch.equal(got[real].signbit(), want[real].signbit())
    if tensor_scale is None:
        assert torch.equal(got[real].double(), want[real])


@ON_GPUS
def test_every_code_and_every_scale_on_gpus(device):
    """Bitwise those of the CPU."""
    codes, scales = every_code_and_scale()
    given = codes.view(MXFP4)[None], scales.view(E4M3)[None]
    want = dequantize_weights(*given, BF16)
    got = ops.dequantize_mxfp4(*(each.to(device) for each in given)).cpu()
    real = ~want.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int16)[real], want.view(torch.int16)[real])


# Rows of an expert for each of the kernels, and unknown.
ROWS_PER_EXPERT = [None, 1.0, 8.0, 24.0]


@pytest.mark.parametrize("rows_per_expert", ROWS_PER_EXPERT)
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_are_those_of_the_codes(device, sizes, gpt_oss, in_fp8, rows_per_expert):
    drawn = Drawn(sizes, gpt_oss)
    rows = Rows(sizes[0], device, in_fp8)
    got = rows.outputs(drawn.experts(device), rows_per_expert)
    assert (errors(got, rows.wanted(drawn)) <= LIMIT).all()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("rows_per_expert", ROWS_PER_EXPERT)
def test_a_row_depends_on_no_other_row(device, rows_per_expert, batch_invariant):
    """NaN of a row stays in it, that of a scale in its expert; also bitwise on each kernel."""
    drawn = Drawn((192, 320), gpt_oss=True)
    experts = drawn.experts(device, batch_invariant=batch_invariant)
    rows = Rows(192, device, in_fp8=False)
    got = rows.outputs(experts, rows_per_expert)
    bad = rows.real[::7]
    rows.rows[bad, 5] = torch.nan
    is_bad = torch.isin(rows.real, bad)
    again = rows.outputs(experts, rows_per_expert)
    assert again[is_bad].isnan().all()
    assert torch.equal(again[~is_bad], got[~is_bad])
    # Expert 2 has the rows behind that of expert 0.
    of_expert = torch.zeros_like(is_bad)
    of_expert[1:9] = True
    experts.down_scales.view(torch.uint8)[2, 3, 2] = 0x7F
    again = rows.outputs(experts, rows_per_expert)
    assert again[of_expert, 3].isnan().all()
    assert torch.equal(again[~of_expert & ~is_bad], got[~of_expert & ~is_bad])
    experts.tensor_scales[2, 1] = torch.nan
    again = rows.outputs(experts, rows_per_expert)
    assert again[of_expert].isnan().all()
    assert torch.equal(again[~of_expert & ~is_bad], got[~of_expert & ~is_bad])


@ON_GPUS
@pytest.mark.parametrize("counts", [[64], [3, 0, 13], [1, 0, 17, 33, 64, 285, 0], [0, 0, 700]])
@pytest.mark.parametrize("sizes", [(128, 64), (64, 128), (1088, 320)])
def test_many_rows_have_the_bits_of_bf16(device, sizes, counts):
    """The product of our GEMM without the tensor scale, with drawn bytes as scales."""
    if Hopper().problem_with(
        torch.empty(1, 128, 64, dtype=BF16, device=device),
        torch.empty(1, 64, 64, dtype=BF16, device=device),
    ):
        pytest.skip("no Hopper")
    k, n = sizes
    e = len(counts)
    codes = torch.randint(256, (e, n, k // 2), generator=generator(1), dtype=torch.uint8)
    scales = torch.randint(127, (e, n, k // GROUP), generator=generator(2), dtype=torch.uint8)
    weights = codes.view(MXFP4).to(device), scales.view(E4M3).to(device)
    ends = torch.tensor(counts).cumsum(0).int().to(device)
    rows = randn(sum(counts) + 9, k, seed=3, dtype=BF16).to(device)
    rows[sum(counts) :] = torch.nan
    with poisoned_memory():
        got = Hopper().multiply((rows, None), weights, ends, 1)
        want = Hopper().multiply((rows, None), (plain_weights(weights), None), ends, 1)
    assert torch.equal(got[: sum(counts)].view(torch.int16), want[: sum(counts)].view(torch.int16))
    assert not got[: sum(counts)].isnan().any()


@ON_GPUS
@pytest.mark.parametrize("rows_per_expert", [1.0, 8.0, 20.0])
@pytest.mark.parametrize("sizes", [(256, 128), (192, 320)])
def test_few_rows_in_fp8_are_those_dequantized(device, sizes, rows_per_expert):
    experts = Drawn(sizes, gpt_oss=True).experts(device)
    assert_same_as_dequantized(experts, Rows(sizes[0], device), rows_per_expert)


@ON_GPUS
def test_the_kernels_take_them(device):
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("no Hopper")
    assert Drawn((256, 128)).experts(device).gemms[:2] == ("few_rows_mxfp4", "hopper")
    assert Drawn((48, 80)).experts(device).gemm == "torch"
    with pytest.raises((ValueError, ImportError), match="DeepGEMM takes weights in|not installed"):
        Drawn((256, 128)).experts(device, gemm="deep_gemm")


@ON_GPUS
@pytest.mark.parametrize("rows_per_expert", ROWS_PER_EXPERT)
def test_a_graph_takes_other_segments(device, rows_per_expert):
    experts = Drawn((256, 128), gpt_oss=True).experts(device)
    if not experts.is_capturable:
        pytest.skip("the host waits")
    rows = Rows(256, device, in_fp8=False)
    other = Rows(256, device, in_fp8=False, counts=COUNTS[::-1])
    given = {"tokens_per_expert": rows.tokens, "rows_per_expert": rows_per_expert}
    replay, out = captured(lambda: experts(rows.rows, rows.offsets, None, **given))
    want = other.outputs(experts, rows_per_expert)
    for mine, its in zip(
        (rows.offsets, rows.tokens, rows.rows),
        (other.offsets, other.tokens, other.rows),
        strict=True,
    ):
        mine.view(torch.uint8).copy_(its.view(torch.uint8))
    poison_(out)
    replay()
    assert torch.equal(out[other.real], want)


def test_casts_and_state_dicts_leave_them_alone(device):
    drawn = Drawn((64, 48), gpt_oss=True)
    rows = Rows(64, device, in_fp8=False)
    experts = drawn.experts(device)
    want = rows.outputs(experts, None)
    assert experts.dtype == BF16 and experts.is_quantized and not experts.is_fp8
    assert "NVFP4" in repr(experts) and not any(p.requires_grad for p in experts.parameters())
    for cast in (torch.nn.Module.half, torch.nn.Module.double, torch.nn.Module.bfloat16):
        again = cast(copy.deepcopy(experts))
        again.gate_up_bias.data = experts.gate_up_bias.data
        again.down_bias.data = experts.down_bias.data
        assert again.tensor_scales.dtype == torch.float32
        assert torch.equal(rows.outputs(again, None), want)
    # A state dict has all of it.
    empty = drawn.arguments(torch.device("cpu"))
    loaded = epmoe.GroupedExperts(
        **{name: torch.zeros_like(tensor).to(device) for name, tensor in empty.items()}, **GPT_OSS
    )
    loaded.load_state_dict(experts.state_dict())
    assert torch.equal(rows.outputs(loaded, None), want)


@pytest.mark.parametrize("level", [1, 2])
def test_they_sleep(device, level):
    """Codes, scales and tensor scales come back, from the CPU or out of a state dict."""
    D, F = 64, 48
    drawn = Drawn((D, F), gpt_oss=True)
    with epmoe.ExpertParallel(alone(E, 2, D, "bfloat16", 16), device=device) as ep:
        given = drawn.arguments(ep.device) | GPT_OSS
        layer = epmoe.MoELayer.from_full(ep, randn(E, D), **given)
        kept = {name: value.cpu() for name, value in layer.state_dict().items()}
        x = randn(8, D, dtype=BF16).to(ep.device)
        want = layer(x).clone()
        weights = epmoe.SleepingWeights(layer)
        ep.sleep(weights.offload if level == 1 else weights.discard)
        ep.wake(weights.restore)
        if level == 2:
            layer.load_state_dict(kept)
        assert torch.equal(layer(x), want)


@pytest.mark.parametrize("gpt_oss", [False, True])
def test_adapters_add_to_products_that_have_tensor_scales(device, gpt_oss):
    """Outputs are those of experts in fp64 whose weights have the adapter's product added."""
    D, F, rank = 64, 48, 4
    drawn = Drawn((D, F), gpt_oss)
    rows = Rows(D, device, in_fp8=False)
    factors = {
        "gate_up": (randn(E, rank, D, seed=7) / D**0.5, randn(E, 2 * F, rank, seed=8)),
        "down": (randn(E, rank, F, seed=9) / F**0.5, randn(E, D, rank, seed=10)),
    }
    on_device = {
        name: Factors(*(each.to(device, BF16) for each in pair)) for name, pair in factors.items()
    }
    masked = torch.zeros(len(rows.rows), rank, dtype=torch.bool, device=device)
    added = Added(GEMMS["loop"], on_device["gate_up"], on_device["down"], masked)
    experts = drawn.experts(device)
    with torch.inference_mode():
        got = experts(rows.rows, rows.offsets, None, tokens_per_expert=rows.tokens, added=added)

    class Changed(Drawn):
        def weights(self, x: int) -> tuple[Tensor, Tensor]:
            sums = zip(super().weights(x), on_device.values(), strict=True)
            return tuple(w + b[x].double().cpu() @ a[x].double().cpu() for w, (a, b) in sums)

    changed = Changed((D, F), gpt_oss)
    assert (errors(got[rows.real], rows.wanted(changed)) <= 0.03).all()


def test_compiles_without_a_graph_break():
    """One graph for every number of rows, and the bits of the real rows."""
    device = torch.device("cpu")
    experts = Drawn((64, 48), gpt_oss=True).experts(device)
    rows = Rows(64, device, in_fp8=False)
    torch.compiler.reset()
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    want = rows.outputs(experts, None)
    for behind in (0, 32):
        shorter = rows.rows[: len(rows.rows) - behind]
        got = compiled(shorter, rows.offsets, tokens_per_expert=rows.tokens)
        assert torch.equal(got[rows.real], want)


def refused(**changes: object) -> dict[str, object]:
    return Drawn((64, 48)).arguments(torch.device("cpu")) | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tensor_scales": None}, TypeError, r"`tensor_scales` must be float32 \[8, 3\], got None"),
        (
            {"tensor_scales": torch.ones(8)},
            ValueError,
            r"`tensor_scales` must be float32 \[8, 3\], got float32 \[8\]",
        ),
        (
            {"gate_up_scales": torch.ones(8, 96, 2).to(E4M3)},
            ValueError,
            r"`gate_up_scales` must be float8_e4m3fn \[8, 96, 4\]",
        ),
        (
            {"gate_up_scales": torch.ones(8, 96, 4)},
            TypeError,
            r"`gate_up_scales` must be float8_e4m3fn \[8, 96, 4\], got float32",
        ),
        (
            {"w_down": torch.zeros(8, 64, 20, dtype=torch.uint8).view(MXFP4)},
            ValueError,
            "D and F of NVFP4 must be multiples of 16, got 64 and 40",
        ),
        (
            {
                "w_gate_up": torch.zeros(8, 64, 32, dtype=torch.uint8).view(MXFP4),
                "gate_up_scales": torch.ones(8, 64, 2).to(torch.float8_e8m0fnu),
                "w_down": torch.zeros(8, 64, 16, dtype=torch.uint8).view(MXFP4),
                "down_scales": torch.ones(8, 64, 1).to(torch.float8_e8m0fnu),
            },
            ValueError,
            "`tensor_scales` must be None where the weights are MXFP4",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        epmoe.GroupedExperts(**refused(**changes))


def test_they_have_no_gradients():
    experts = Drawn((64, 48)).experts(torch.device("cpu"))
    rows = randn(4, 64, dtype=BF16).requires_grad_()
    offsets = torch.full((E + 1,), 4, dtype=torch.int32)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="have no gradients"):
        experts(rows, offsets)


@pytest.mark.parametrize("payload", ["auto", "fp8"])
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_a_layer(device, gpt_oss, payload):
    """Over rows that travel in the model's dtype and as fp8."""
    D, F = sizes = (192, 320)
    T = 16
    drawn = Drawn(sizes, gpt_oss)
    config = alone(E, 2, D, "bfloat16", T, exchange={"payload": payload})
    # Two experts for each token, which differ.
    ids = torch.stack([torch.arange(T) % E, (torch.arange(T) * 3 + 1) % E], 1)
    ids[ids[:, 0] == ids[:, 1], 1] += 1
    ids %= E
    weights = torch.rand(T, 2, generator=generator(3))
    x = randn(T, D, seed=4, dtype=BF16)
    with epmoe.ExpertParallel(config, device=device) as ep:
        experts = drawn.experts(ep.device)
        d = ep.dispatch(x.to(ep.device), ids.int().to(ep.device), weights.to(ep.device))
        y = ep.combine(experts(d.rows, d.expert_offsets, d.scales), d).cpu()
    values = as_fp8(x)[2] if payload == "fp8" else x.double()
    want = torch.zeros(T, D, dtype=torch.float64)
    for t in range(T):
        for expert, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            want[t] += weight * drawn.outputs(values[t : t + 1], expert)[0]
    assert (errors(y, want) <= LIMIT).all()
