"""A module's experts over the rows of a round: epmoe's experts stage in the memory of the module's
parameters.

    can_group ─ parameters_of ─▶ parameters ─ computation ─▶ experts(rows of a round)

The experts have gradients, or none.

It computes what the module's own `grouped_mm` does. That one sorts pairs of tokens and experts;
here the rows are sorted already, and `expert_offsets` say where each expert's segment starts. On
Hopper nothing looks at the host where the weights are bf16 or fp8.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.integrations import moe

from epmoe.integrations.batches import Arrived, Computation
from epmoe.integrations.transformers import fp8
from epmoe.local.gemm.gemm import Gating, Weights
from epmoe.local.gemm.gradients import train_bias, train_gemm
from epmoe.local.stage import Stage, without_autocast
from epmoe.native.arguments import FLOATS, wants_gradients

_SILU = Gating(interleaved=False, limit=math.inf, alpha=1.0, up_offset=0.0)
_SAME_RESULT = (None, "eager", "grouped_mm", "batched_mm")
# The stage of each module, with what it depends on.
_stages: WeakKeyDictionary[Any, tuple[list[object], Stage]] = WeakKeyDictionary()


def can_group(experts: Any) -> bool:
    """Whether `computation` computes what the module's own forward would: plain or fp8 weights, no
    special kernel.
    """
    is_decorated = hasattr(experts, "_apply_gate") and hasattr(experts, "has_bias")
    config = getattr(experts, "config", None)
    implementation = getattr(config, "_experts_implementation", None)
    if not is_decorated or implementation not in _SAME_RESULT:
        return False
    return experts.down_proj.dtype in FLOATS or fp8.is_quantized(experts)


def parameters_of(experts: Any) -> list[Tensor]:
    """The parameters that `computation` takes: the up and down projections, and scales or biases if
    there are any.
    """
    if fp8.is_quantized(experts) and experts.has_gate:
        return [getattr(experts, name) for name in fp8.PARAMETERS]
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    names = [up, "down_proj"]
    if experts.has_bias:
        names += [f"{up}_bias", "down_proj_bias"]
    return [getattr(experts, name) for name in names]


def trains(experts: Any, parameters: list[Tensor], x: Tensor, weights: Tensor) -> bool:
    """Whether autograd wants a backward pass. Ranks agree on it, since they run the same model.

    `parameters` are those that the call takes of the module: a parametrization, such as PEFT's,
    makes tensors that require grad of frozen parameters. Raises RuntimeError if the module is
    quantized.
    """
    if not wants_gradients(chain((x, weights), parameters, experts.parameters())):
        return False
    if fp8.is_quantized(experts):
        raise RuntimeError(
            "quantized experts have no gradients with epmoe: run under torch.inference_mode() or "
            "torch.no_grad(), or load the checkpoint with `FineGrainedFP8Config(dequantize=True)` "
            "to train it"
        )
    return True


def computation(
    experts: Any, parameters: list[Tensor], held: slice, trains: bool = False
) -> Computation:
    """Make the function that computes the experts `held` of a module over rows of a round, with
    gradients if it `trains`.

    The module's class has transformers' decorator `use_experts_implementation`, and `parameters`
    are those of `parameters_of`. A rank without rows stays in the graph: its parameters get
    gradients of 0, for which FSDP and DDP wait. Outputs of rows past the last segment are
    undefined. Raises ValueError for a module that is quantized in a way that epmoe does not take,
    and RuntimeError in a capture of a CUDA graph for which the experts would wait for the host.
    """
    # The weights of this rank's experts, as `GroupedExperts` have them.
    local = [part.to_local() if isinstance(part, DTensor) else part for part in parameters]
    up, down, *others = [part[held] for part in local]
    if experts.is_transposed:
        up = up.transpose(1, 2)
        down = down.transpose(1, 2)
    gating = _gating(experts)
    stage = _stage(experts, up, down, gating is None)
    stage.refuse_capture(down, trains=trains)
    weights = Weights(up, down, None, None, None, None, gating or _SILU)
    if experts.has_bias:
        weights = weights._replace(gate_up_bias=others[0], down_bias=others[1])
    elif others:
        up_scales, down_scales = others
        up_scales = fp8.by_block(up_scales, up)
        down_scales = fp8.by_block(down_scales, down)
        weights = weights._replace(gate_up_scales=up_scales, down_scales=down_scales)
    # Blocks of rows are for the GEMMs of serving.
    aligned = not trains and stage.alignment > 1

    of_rank = _ExpertsOfRank(experts, weights, stage, gating is not None, trains)
    return Computation(of_rank.compute, aligned, trains)


class _ExpertsOfRank(NamedTuple):
    """The experts of a module that this rank holds, in one call."""

    experts: Any
    """the module"""
    weights: Weights
    stage: Stage
    is_swiglu: bool
    """otherwise the module has a function of its own between the products"""
    trains: bool

    def compute(self, arrived: Arrived) -> Tensor:
        """Rows of a round → outputs."""
        weights = self.weights
        segments = arrived.segments
        if not self.is_swiglu:
            rows = arrived.plain()
            out = _by_parts(self.experts, weights, rows, segments.offsets, self.stage.trained)
        elif self.trains:
            out = self.stage.train(weights, arrived.rows.to(weights.dtype), None, segments)
        elif arrived.scales is None:
            out = self.stage.serve(weights, arrived.rows.to(weights.dtype), None, segments)
        else:
            # fp8 rows stay as they are.
            out = self.stage.serve(weights, arrived.rows, arrived.scales, segments)
        if getattr(self.experts, "has_post_expert_norm", False):
            out = self.experts.post_expert_norm(out)
        return out.to(arrived.dtype)


def _gating(experts: Any) -> Gating | None:
    """The SwiGLU between the two products of a module; None if it has another function."""
    if not experts.has_gate:
        return None
    if fp8.is_quantized(experts):
        return fp8.gating(experts)
    gate = getattr(experts._apply_gate, "__func__", None)
    if gate is moe._default_apply_gate and type(experts.act_fn).__name__ in fp8.SILU:
        return _SILU
    if getattr(gate, "__qualname__", "") == "GptOssExperts._apply_gate":
        return Gating(True, experts.limit, experts.alpha, up_offset=1.0)
    return None


def _by_parts(experts: Any, weights: Weights, rows: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    """Compute outputs [N, D] so that autograd records the module's own function between the
    products.
    """

    def product(rows: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = train_gemm(rows.to(weights.dtype).contiguous(), weights, offsets, gemm)
        if bias is None:
            return out
        return out + train_bias(bias, offsets, len(rows), gemm)

    with without_autocast(rows.device):
        hidden = product(rows, weights.gate_up, weights.gate_up_bias)
        hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
        return product(hidden, weights.down, weights.down_bias)


def _stage(experts: Any, up: Tensor, down: Tensor, has_function: bool) -> Stage:
    """Find the GEMMs for a module's weights, which may move from call to call, as FSDP moves them.

    Calls without gradients take that of calls with gradients in training mode, since reentrant
    checkpointing makes both and needs the same bits; and where the module has a function of its own
    between the products.
    """
    same_bits = has_function or experts.training and not fp8.is_quantized(experts)
    # The choice of a GEMM depends on these.
    layout: list[object] = [same_bits]
    for weight in (up, down):
        place = (weight.device, weight.stride(), weight.data_ptr() % 16)
        layout.append((weight.dtype, weight.shape, *place))
    known = _stages.get(experts)
    if known is None or known[0] != layout:
        if fp8.is_quantized(experts):
            fp8.check(experts)
        stage = Stage.choose("auto", up.detach(), down.detach())
        if same_bits:
            stage = stage._replace(gemms=(stage.trained,), alignment=1)
        known = (layout, stage)
        _stages[experts] = known
    return known[1]
