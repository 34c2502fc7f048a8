"""Computes a module's experts over the rows of a round, with epmoe's GEMMs on the module's own
parameters. The experts may have gradients.

    can_group ─ parameters_of ─▶ parameters ─ computation ─▶ experts(rows of a round)

The results are those of the module's own `grouped_mm`. That function first sorts pairs of a token
and an expert. Here the rows are sorted already, and `expert_offsets` says where the segment of each
expert starts. On Hopper the host waits for no kernel where the weights are bf16 or fp8.
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
# transformers' own `experts_implementation`s, which all compute what epmoe's GEMMs compute.
_SAME_RESULT = (None, "eager", "grouped_mm", "batched_mm")
# The stage of each module, behind the layout of the weights that it was chosen for.
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
    """List the parameters of a module that `computation` takes, in this order: the up projection,
    the down projection, then the two scales or the two biases, if there are any.
    """
    if fp8.is_quantized(experts) and experts.has_gate:
        return [getattr(experts, name) for name in fp8.PARAMETERS]
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    names = [up, "down_proj"]
    if experts.has_bias:
        names += [f"{up}_bias", "down_proj_bias"]
    return [getattr(experts, name) for name in names]


def trains(experts: Any, parameters: list[Tensor], x: Tensor, weights: Tensor) -> bool:
    """Whether a call needs a backward pass. All ranks get the same answer, because they run the
    same model.

    `parameters` is the list of `parameters_of`. Its tensors may require gradients where the
    module's own parameters are frozen: a parametrization, such as PEFT's, computes them from other
    parameters. Raises RuntimeError if a quantized module would need gradients.
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
    """Make the function that computes a module's experts over the rows of a round.

    `held` is the slice of experts that this rank has, and `trains` says whether the outputs need
    gradients. The class of the module `experts` has transformers' decorator
    `use_experts_implementation`, and `parameters` is the list of `parameters_of`. On a rank without
    rows the parameters still get gradients, of 0, because FSDP and DDP wait for them. Outputs of
    rows behind the last segment are undefined.

    Raises ValueError for a module that is quantized in a way that epmoe does not take. Raises
    RuntimeError in a capture of a CUDA graph if the experts would have to wait on the host.
    """
    # Take the weights of this rank's experts. Behind the two projections come scales or biases.
    local = [part.to_local() if isinstance(part, DTensor) else part for part in parameters]
    up, down, *scales_or_biases = [part[held] for part in local]
    if experts.is_transposed:
        up = up.transpose(1, 2)
        down = down.transpose(1, 2)
    # Choose the GEMMs. The gating is None where the module has another function between the two
    # products: `_compute_by_parts` calls that function itself.
    gating = _gating(experts)
    stage = _stage(experts, up, down, has_own_function=gating is None)
    stage.refuse_capture(down, trains=trains)
    # Put the weights together, as the stage takes them.
    weights = Weights(up, down, None, None, None, None, gating or _SILU)
    if experts.has_bias:
        up_bias, down_bias = scales_or_biases
        weights = weights._replace(gate_up_bias=up_bias, down_bias=down_bias)
    elif scales_or_biases:
        up_scales, down_scales = scales_or_biases
        up_scales = fp8.by_block(up_scales, up)
        down_scales = fp8.by_block(down_scales, down)
        weights = weights._replace(gate_up_scales=up_scales, down_scales=down_scales)
    # Only the GEMMs of serving need segments that start at whole blocks of rows.
    aligned = not trains and stage.alignment > 1

    local_experts = _LocalExperts(
        experts, weights, stage, is_swiglu=gating is not None, trains=trains
    )
    return Computation(local_experts.compute, aligned=aligned, trains=trains)


class _LocalExperts(NamedTuple):
    """The experts of a module that this rank holds, with their weights for one call."""

    experts: Any
    """the module"""
    weights: Weights
    stage: Stage
    is_swiglu: bool
    """whether a SwiGLU stands between the two products; otherwise the module has a function of its
    own there
    """
    trains: bool

    def compute(self, arrived: Arrived) -> Tensor:
        """Compute the experts' outputs for the rows of a round, in the dtype that `arrived` asks
        for.
        """
        weights = self.weights
        segments = arrived.segments
        if not self.is_swiglu:
            rows = arrived.plain()
            out = _compute_by_parts(
                self.experts, weights, rows, segments.offsets, self.stage.trained
            )
        elif self.trains:
            out = self.stage.train(weights, arrived.rows.to(weights.dtype), None, segments)
        elif arrived.scales is None:
            out = self.stage.serve(weights, arrived.rows.to(weights.dtype), None, segments)
        else:
            # The GEMM takes fp8 rows with their scales as they are.
            out = self.stage.serve(weights, arrived.rows, arrived.scales, segments)
        if getattr(self.experts, "has_post_expert_norm", False):
            out = self.experts.post_expert_norm(out)
        return out.to(arrived.dtype)


def _gating(experts: Any) -> Gating | None:
    """The parameters of the SwiGLU between the two products of a module, or None if the module
    has another function there.
    """
    if not experts.has_gate:
        return None
    if fp8.is_quantized(experts):
        return fp8.gating(experts)
    # A module has transformers' default gate, gpt-oss's gate, or a gate that epmoe does not know.
    gate = getattr(experts._apply_gate, "__func__", None)
    if gate is moe._default_apply_gate and type(experts.act_fn).__name__ in fp8.SILU:
        return _SILU
    if getattr(gate, "__qualname__", "") == "GptOssExperts._apply_gate":
        return Gating(interleaved=True, limit=experts.limit, alpha=experts.alpha, up_offset=1.0)
    return None


def _compute_by_parts(
    experts: Any, weights: Weights, rows: Tensor, offsets: Tensor, gemm: str
) -> Tensor:
    """Compute the outputs [N, D] as two products with the module's own function between them.

    Autograd records each of the three parts. `gemm` names the GEMM of both products.
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


def _stage(experts: Any, up: Tensor, down: Tensor, has_own_function: bool) -> Stage:
    """Find the GEMMs for the weights of a module, and keep them until the weights' layout changes.

    The weights may lie elsewhere in each call, as FSDP moves them. `has_own_function` says whether
    the module has a function of its own between the two products.
    """
    # The GEMM of training also serves in two cases. In training mode, reentrant checkpointing runs
    # the same pass without and with gradients, and needs the same bits from both. A function of the
    # module's own runs between two products, which only the GEMM of training offers separately.
    can_train = experts.training and not fp8.is_quantized(experts)
    only_training_gemm = has_own_function or can_train
    # The choice of a GEMM depends on the layout of the weights.
    layout: list[object] = [only_training_gemm]
    for weight in (up, down):
        place = (weight.device, weight.stride(), weight.data_ptr() % 16)
        layout.append((weight.dtype, weight.shape, *place))
    known = _stages.get(experts)
    if known is None or known[0] != layout:
        if fp8.is_quantized(experts):
            fp8.check(experts)
        stage = Stage.choose("auto", up.detach(), down.detach())
        if only_training_gemm:
            stage = stage._replace(gemms=(stage.trained,), alignment=1)
        known = (layout, stage)
        _stages[experts] = known
    return known[1]
