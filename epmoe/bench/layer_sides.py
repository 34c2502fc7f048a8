"""The sides that `epmoe bench --layer` compares: a MoE layer from logits to y, its experts alone,
and the layer without its experts.

Letters in names and shapes: T counts the tokens of this rank, D is the hidden size, E counts the
experts of the model, e those of this rank, K the experts of a token, N the rows that arrive, S the
sampled tokens, F is the width of an expert, and n and k are the rows and columns of a weight.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.sides import Calls, Side, poison
from epmoe.bench.timing import elapsed_us, everywhere
from epmoe.config.config import EPConfig
from epmoe.exchange.handles import Dispatched
from epmoe.local.experts import GroupedExperts
from epmoe.local.gemm.deep_gemm import DeepGemm
from epmoe.local.gemm.fused_experts import FusedExperts
from epmoe.local.gemm.gemm import on_hopper
from epmoe.local.quantize import quantize_weights
from epmoe.local.reference import moe_reference, swiglu_reference
from epmoe.local.route import Routing
from epmoe.local.simulate import Kind, simulate_logits
from epmoe.local.weight_formats import (
    FP8_BLOCKS,
    MXFP4_GROUPS,
    NVFP4_GROUPS,
    WeightFormat,
    dequantize_weights,
    plain_shape,
)
from epmoe.native.arguments import FP8
from epmoe.service import ExpertParallel

# How many FLOP a GPU computes in a µs with dense matrices, by compute capability and bytes of an
# element. For 9.0, NVIDIA's data sheet of the H200 SXM says 1979 TFLOPS for bf16 and 3958 for fp8.
# These are rates with sparsity, which are twice the dense ones. The H100 SXM has the same rates.
DENSE_FLOP_PER_US = {((9, 0), 2): 989.5e6, ((9, 0), 1): 1979e6}
# Copies in a series that measures the speed of memory.
_COPIES = 5
# Tokens of each rank whose y is compared with a reference.
_SAMPLED = 4


class Precision(StrEnum):
    """The format of rows and of weights, and the library of the grouped GEMM."""

    PLAIN = "plain"
    """rows and weights in the model's dtype; torch's grouped_mm"""
    PLAIN_DEEP_GEMM = "plain, DeepGEMM"
    """the same on DeepGEMM"""
    FP8 = "fp8"
    """dispatch quantizes rows, weights are fp8; DeepGEMM on GPUs. combine carries the
    model's dtype
    """
    MXFP4 = "MXFP4"
    """rows in the model's dtype, weights are MXFP4"""
    MXFP4_BY_FP8 = "MXFP4, fp8 rows"
    """dispatch quantizes rows, weights are MXFP4. combine carries the model's dtype"""
    NVFP4 = "NVFP4"
    """rows in the model's dtype, weights are NVFP4"""


# The formats of weights with scales.
_FORMATS = {
    Precision.FP8: FP8_BLOCKS,
    Precision.MXFP4: MXFP4_GROUPS,
    Precision.MXFP4_BY_FP8: MXFP4_GROUPS,
    Precision.NVFP4: NVFP4_GROUPS,
}
# Those whose rows travel as fp8.
OF_FP8_ROWS = (Precision.FP8, Precision.MXFP4_BY_FP8)
# The mean of the scales that `_fill_codes` draws in NVFP4.
_MEAN_SCALE_OF_NVFP4 = 16.0


def problem_with(precision: Precision, config: EPConfig, device: torch.device) -> str | None:
    """Say why `precision` cannot be measured with this configuration on this device, or return
    None if it can.
    """
    model = config.model
    is_on_cpu = device.type == "cpu"
    if precision is Precision.PLAIN:
        if config.experts.batch_invariant and not is_on_cpu:
            return "torch's GEMM is not batch invariant on GPUs"
        return None
    # All other precisions compute in bf16, and their weights are made of whole blocks.
    if model.dtype != "bfloat16":
        return f"it computes in bfloat16, and `model.dtype` is {model.dtype}"
    D = model.hidden_size
    f = model.intermediate_size or 0
    weight_format = _FORMATS.get(precision)
    step = 1 if weight_format is None else weight_format.block[1]
    if D % step or f % step:
        return f"D and F must be multiples of {step}, got {D} and {f}"
    if weight_format is not None and weight_format.packed > 1:
        if is_on_cpu or on_hopper(device):
            return None
        return "it dequantizes weights on this GPU"
    if is_on_cpu:
        return "DeepGEMM is for GPUs" if precision is Precision.PLAIN_DEEP_GEMM else None
    # In bf16 it is DeepGEMM that is measured. In fp8 our kernel or DeepGEMM must take the weights.
    gemms = [DeepGemm()] if precision is Precision.PLAIN_DEEP_GEMM else [FusedExperts(), DeepGemm()]
    dtype = FP8 if precision is Precision.FP8 else torch.bfloat16
    shapes = [(1, n, k) for n, k in _shapes(config).values()]
    weights = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    problems = [gemm.problem_with(*weights) for gemm in gemms]
    return None if None in problems else str(problems[-1])


def random_experts(
    config: EPConfig, rank: int, device: torch.device, precision: Precision
) -> GroupedExperts:
    """Make this rank's experts with random weights. Copies of a logical expert have the same
    weights on all ranks.
    """
    placement = config.place_experts()
    generator = torch.Generator(device)
    weight_format = _FORMATS.get(precision)
    e = placement.num_local_experts(rank)
    dtype = config.model.torch_dtype
    packed = 1
    if weight_format is not None:
        dtype = weight_format.codes
        packed = weight_format.packed
    # Allocate the weights and scales of all experts.
    shapes = _shapes(config)
    weights = {}
    scales = {}
    for name, (n, k) in shapes.items():
        weights[name] = torch.empty(e, n, k // packed, dtype=dtype, device=device)
        if weight_format is not None:
            shape = weight_format.scales_shape(e, n, k)
            scales[name] = torch.empty(shape, dtype=weight_format.scale, device=device)
    tensor_scales = _tensor_scales(shapes, e, device)
    # Fill one expert after the other. The logical expert is the seed, and outputs have a variance
    # of about 1.
    for i, logical in enumerate(placement.logical_experts(rank)):
        generator.manual_seed(logical)
        for name, (n, k) in shapes.items():
            if weight_format is not None and weight_format.packed > 1:
                _fill_codes(weight_format, weights[name][i], scales[name][i], k, generator)
                continue
            plain = torch.randn(n, k, generator=generator, device=device) / k**0.5
            if weight_format is FP8_BLOCKS:
                weights[name][i], scales[name][i] = quantize_weights(plain)
            else:
                weights[name][i] = plain
        # Gate and up have different ones. Other formats take none.
        tensor_scales[i] *= 1 + torch.rand(3, generator=generator, device=device)
    gemm = "torch" if precision is Precision.PLAIN else "auto"
    options: dict[str, Any] = {f"{name}_scales": value for name, value in scales.items()}
    if weight_format is NVFP4_GROUPS:
        options["tensor_scales"] = tensor_scales
    options |= {"gemm": gemm, "batch_invariant": config.experts.batch_invariant}
    experts = GroupedExperts(weights["gate_up"], weights["down"], **options)
    return experts.requires_grad_(False)


def _fill_codes(
    weight_format: WeightFormat,
    codes: Tensor,
    scales: Tensor,
    k: int,
    generator: torch.Generator,
) -> None:
    """Draw the codes and scales of one matrix [n, k] in MXFP4 or NVFP4."""
    codes.view(torch.uint8).random_(256, generator=generator)
    if weight_format is MXFP4_GROUPS:
        # A scale is an exponent of 2. The largest one stands for about 1 / √k.
        middle = 127 - round(math.log2(k) / 2)
        scales.view(torch.uint8).random_(middle - 3, middle, generator=generator)
        return
    # From 8 to 30, by steps of an eighth of a power of two.
    scales.view(torch.uint8).random_(80, 96, generator=generator)


def _tensor_scales(shapes: dict[str, tuple[int, int]], e: int, device: torch.device) -> Tensor:
    """The tensor scales of e experts, with which weights are about 1 / √k, fp32 [e, 3]."""
    gate_up, down = (1 / (_MEAN_SCALE_OF_NVFP4 * 4 * k**0.5) for _, k in shapes.values())
    return torch.tensor([gate_up, gate_up, down], device=device).repeat(e, 1)


Handle = tuple[Dispatched, Tensor]
"""The open round, and the experts' outputs for its rows."""


class WholeLayer(Side):
    """The side that runs a whole layer for T tokens of this rank: route, dispatch, experts and
    combine. The logits are made before.

    `check` compares y of a few sampled tokens with a reference, for which all ranks compute these
    tokens without the exchange, each with its own experts.
    """

    def __init__(
        self,
        ep: ExpertParallel,
        experts: GroupedExperts,
        tokens: int,
        routing: Kind,
        group: dist.ProcessGroup,
    ) -> None:
        self.name = "the layer"
        self.ep = ep
        self.experts = experts
        self.group = group
        model = ep.config.model
        R = ep.size
        rank = ep.rank
        own_tokens = slice(rank * tokens, (rank + 1) * tokens)
        logits = simulate_logits(routing, R * tokens, model.num_experts, ep_size=R)
        x_TD = torch.randn(tokens, model.hidden_size, generator=torch.Generator().manual_seed(rank))
        self.logits_TE = logits[own_tokens].to(ep.device)
        self.x_TD = x_TD.to(ep.device, model.torch_dtype)
        self.bias_E: Tensor | None = None
        if ep.config.routing.selection_bias:
            self.bias_E = torch.zeros(model.num_experts, device=ep.device)
        # Choose a few tokens, spread over the batch, to compare with a reference.
        self.sampled = torch.linspace(0, tokens - 1, min(tokens, _SAMPLED)).long().to(ep.device)
        self.expected_SD = self._expected()
        self.check()

    def routed(self) -> Routing:
        """Run route. Returns ids int32 [T, K] and weights fp32 [T, K]."""
        return self.ep.route(self.logits_TE, self.bias_E)

    def sent(self) -> Dispatched:
        """Run route and dispatch. Returns the open round."""
        routing = self.routed()
        aligned = self.experts.alignment > 1
        tag = int(self.ep.config.placement.live)
        return self.ep.dispatch(self.x_TD, routing.ids, routing.weights, aligned=aligned, tag=tag)

    def out(self) -> Handle:
        d = self.sent()
        return d, self.experts(d.rows, d.expert_offsets, d.scales, **d.segments)

    def back(self, handle: Handle) -> Tensor:
        dispatched, outputs_ND = handle
        return self.ep.combine(outputs_ND, dispatched)

    def arrived(self, handle: Handle) -> list[Tensor]:
        dispatched, outputs_ND = handle
        return [*self.received(dispatched), *self.real_rows(outputs_ND)]

    def received(self, d: Dispatched) -> list[Tensor]:
        """The rows that arrived in a round, and the scales of fp8 rows."""
        rows = self.real_rows(d.rows)
        if d.scales is not None:
            rows += self.real_rows(d.scales)
        return rows

    def real_rows(self, tensor_ND: Tensor) -> list[Tensor]:
        """Cut the segment of each expert out of `tensor_ND`, without the gaps between segments:
        the kernels write nothing there.
        """
        segments = zip(self.starts_e, self.counts_e, strict=True)
        return [tensor_ND[start : start + count] for start, count in segments if count]

    def check(self) -> None:
        """Run two rounds, and raise RuntimeError on all ranks unless y is right in both.

        The rows that arrived in the first round become NaN, so the second round must write them
        again. This also sets `num_rows` and where the rows of each expert lie: `starts_e` and
        `counts_e`.
        """
        for _ in range(2):
            handle = self.out()
            dispatched, _outputs = handle
            *self.starts_e, self.num_rows = dispatched.expert_offsets.tolist()
            self.counts_e = dispatched.tokens_per_expert.tolist()
            poison(self.received(dispatched))
            # A rank that raised alone would break the next round of the others.
            is_right = self._is_right(self.back(handle))
            if not everywhere(is_right, self.group):
                raise self._error_of(self.name)

    def floor_us(self, copy: float) -> float:
        """Compute the least time that this rank's experts can take, in µs: the time to read their
        weights or the time to compute, whichever is longer.

        `copy` is the speed of memory: how many bytes a copy reads and writes in a µs. Where the
        speed of computing is not known, the time to read counts alone.
        """
        # Reading takes the weights and scales of all experts that have rows.
        expert_bytes = 0
        for name in ("w_gate_up", "w_down", "gate_up_scales", "down_scales"):
            weight = getattr(self.experts, name)
            if weight is not None and len(weight):
                expert_bytes += weight[0].numel() * weight.element_size()
        num_busy = sum(count > 0 for count in self.counts_e)
        read_us = num_busy * expert_bytes / copy
        # Computing takes three products for each row, with a multiplication and an addition for
        # each of the D · F elements of a weight.
        w_down = self.experts.w_down
        _, D, f = plain_shape(w_down)
        flop = 6 * D * f * sum(self.counts_e)
        capability = torch.cuda.get_device_capability(w_down.device) if w_down.is_cuda else (0, 0)
        itemsize = 1 if self.experts.is_fp8 else self.experts.dtype.itemsize
        rate = DENSE_FLOP_PER_US.get((capability, itemsize), math.inf)
        return max(read_us, flop / rate)

    def check_output(self, name: str, y_TD: Tensor) -> None:
        """Raise RuntimeError, which names the layer `name`, unless y is right for the sampled
        tokens. Errors may be as large as the precision of the experts allows.
        """
        if not self._is_right(y_TD):
            raise self._error_of(name)

    def _is_right(self, y_TD: Tensor) -> bool:
        """Whether y of the sampled tokens agrees with the reference."""
        y_SD = y_TD[self.sampled].float()
        error_S = (y_SD - self.expected_SD).norm(dim=1)
        norm_S = self.expected_SD.norm(dim=1)
        is_coarse = self.experts.is_fp8 or self.ep.config.exchange.quantizes
        limit = 0.1 if is_coarse else max(4 * torch.finfo(self.x_TD.dtype).eps, 1e-4)
        # A comparison with NaN is False, so NaN in y counts as an error.
        return bool((error_S <= limit * norm_S).all())

    def _error_of(self, name: str) -> RuntimeError:
        return RuntimeError(f"{name}: y is not the weighted sum over the token's experts")

    def _expected(self) -> Tensor:
        """Compute y of this rank's sampled tokens without the exchange: fp32 [S, D]. Collective.

        All ranks gather the sampled tokens of all ranks. Each rank computes the share of its own
        experts for all of them, and the shares are added up.
        """
        ep = self.ep
        E = ep.config.model.num_experts
        # Find the local index of each logical expert, −1 on other ranks. Copies are left out, so
        # that each expert counts once over all ranks.
        local_E = torch.full((E,), -1, device=ep.device)
        for i, physical in enumerate(ep.placement.local_experts(ep.rank)):
            if physical < E:
                local_E[physical] = i
        routing = ep.route(self.logits_TE[self.sampled], self.bias_E)
        x, ids, weights = (self._gathered(t) for t in (self.x_TD[self.sampled].float(), *routing))
        total = moe_reference(x, local_E[ids.long()], weights, self._expert).float().cpu()
        dist.all_reduce(total, group=self.group)
        return total.tensor_split(ep.size)[ep.rank].to(ep.device)

    def _expert(self, rows_nD: Tensor, index: int) -> Tensor:
        """Compute one local expert by the reference, for n rows of D values. `index` is its local
        index.
        """

        def weights(name: str) -> Tensor:
            weight = getattr(self.experts, f"w_{name}")[index]
            scales = getattr(self.experts, f"{name}_scales")
            if scales is not None:
                weight = dequantize_weights(weight, scales[index], torch.float32)
            return weight[None]

        gate_up = weights("gate_up")
        down = weights("down")
        tensor_scales = self.experts.tensor_scales
        if tensor_scales is not None:
            gate, up, of_down = tensor_scales[index]
            halves = gate_up.chunk(2, 1)
            gate_up = torch.cat([halves[0] * gate, halves[1] * up], 1)
            down = down * of_down
        return swiglu_reference(gate_up, down)(rows_nD, 0)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Gather a tensor of all ranks, one behind the other in rank order. Collective."""
        parts = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(self.ep.size)]
        dist.all_gather(parts, tensor.cpu().contiguous(), group=self.group)
        return torch.cat(parts).to(self.ep.device)


def experts_alone(layer: WholeLayer) -> Side:
    """Make a side that runs the experts on copies of the rows that a round has brought. Rows behind
    the last segment are NaN, since experts must not depend on them.
    """
    dispatched = layer.sent()
    rows_ND = dispatched.rows.clone()
    offsets = dispatched.expert_offsets.clone()
    scales = None if dispatched.scales is None else dispatched.scales.clone()
    tokens_per_expert = dispatched.tokens_per_expert.clone()
    segments = dispatched.segments | {"tokens_per_expert": tokens_per_expert}
    # The open round is combined as usual, so that the next one can open.
    outputs_ND = layer.experts(
        dispatched.rows, dispatched.expert_offsets, dispatched.scales, **dispatched.segments
    )
    layer.back((dispatched, outputs_ND))
    poison([rows_ND[layer.num_rows :]])
    return Calls(
        name="the experts",
        out=lambda: layer.experts(rows_ND, offsets, scales, **segments),
        back=lambda y_ND: y_ND[:0],  # launches no kernel
        arrived=layer.real_rows,
    )


def without_experts(layer: WholeLayer) -> Side:
    """Make a side that runs route, dispatch and combine. The experts' outputs are computed before
    the timing.
    """
    handle = layer.out()
    outputs_ND = handle[1].clone()
    layer.back(handle)
    return Calls(
        name="the layer without experts",
        out=lambda: (layer.sent(), outputs_ND),
        back=layer.back,
        arrived=lambda handle: layer.received(handle[0]),
    )


def _shapes(config: EPConfig) -> dict[str, tuple[int, int]]:
    """The numbers of rows and columns of an expert's two weights, by their names."""
    D = config.model.hidden_size
    f = config.model.intermediate_size
    assert f is not None, "`run` has checked it"
    return {"gate_up": (2 * f, D), "down": (D, f)}


def copy_bytes_per_us(device: torch.device) -> float:
    """Measure the speed of memory: how many bytes copies within `device` read and write in a µs.
    The fastest of three series counts.
    """
    on_gpu = device.type == "cuda"
    size = 1 << (30 if on_gpu else 25)

    def fastest_us() -> float:
        source = torch.empty(size, dtype=torch.uint8, device=device).random_()
        target = source.clone()

        def copies() -> None:
            for _ in range(_COPIES):
                target.copy_(source)

        return min(elapsed_us(copies, on_gpu) for _ in range(3)) / _COPIES

    us = fastest_us()
    # Free the memory of the copies, which windows need later.
    if on_gpu:
        torch.cuda.empty_cache()
    return 2 * size / us
