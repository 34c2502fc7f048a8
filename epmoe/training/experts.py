"""The experts stage of training: SwiGLU experts over expert-major rows, with parameters that train."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epmoe.local.experts import without_autocast
from epmoe.local.grouped_gemm import choose, expert_of_rows
from epmoe.native import ops
from epmoe.native.arguments import FLOATS, check_tensor, dtype_name

_COLUMNS = 8  # of a matrix of one column, as often as torch's GEMM wants it: 16 bytes


class GroupedExperts(nn.Module):
    """This rank's experts, `down(weight · silu(gate(x)) · up(x))`, with gradients for rows, weights and parameters.

    The GEMMs of both directions are torch's `grouped_mm`, which looks at no count on the host on GPUs with bf16; where
    it does not take the parameters, a loop over the experts computes the same, and waits for the device. The activation
    and its gradients are a kernel each. Gradients have the same bits on every run. An expert without rows gets
    gradients of 0. Parameters that are frozen cost nothing. Gradients of gradients raise.

    Args:
        w_gate_up: fp32, fp16 or bf16 [e, 2F, D], in which each expert has F gate rows, then F up rows.
        w_down: [e, D, F], same dtype and device.
        gate_up_bias: [e, 2F] in the same dtype, or None.
        down_bias: [e, D] in the same dtype, or None. The weight of a row multiplies it, too.
        interleaved: gate and up rows alternate in `w_gate_up` and its bias.
        limit: gate is at most this, and up lies within ± this, before the activation; None: no limit.
        alpha: the activation is gate · sigmoid(alpha · gate); 1 is silu.
        up_offset: is added to up.

    Raises:
        TypeError: a weight is no tensor, or has another dtype; fp8 does not train.
        ValueError: the shapes or devices do not fit each other.
    """

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        w_gate_up: Tensor,
        w_down: Tensor,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        interleaved: bool = False,
        limit: float | None = None,
        alpha: float = 1.0,
        up_offset: float = 0.0,
    ) -> None:
        check_tensor("w_down", w_down, FLOATS, ("e", "D", "F"))
        e, D, f = w_down.shape
        check_tensor("w_gate_up", w_gate_up, (w_down.dtype,), (e, 2 * f, D), w_down.device)
        super().__init__()
        self.w_gate_up, self.w_down = nn.Parameter(w_gate_up), nn.Parameter(w_down)
        for name, bias, width in (("gate_up_bias", gate_up_bias, 2 * f), ("down_bias", down_bias, D)):
            if bias is not None:
                check_tensor(name, bias, (w_down.dtype,), (e, width), w_down.device)
            self.register_parameter(name, None if bias is None else nn.Parameter(bias))
        self.interleaved, self.limit, self.alpha, self.up_offset = interleaved, limit, alpha, up_offset
        self._gemm = self._choose()

    @property
    def dtype(self) -> torch.dtype:
        """Of rows, outputs and parameters."""
        return self.w_down.dtype

    def forward(
        self,
        rows_ND: Tensor,
        expert_offsets: Tensor,
        row_weights: Tensor | None = None,
        *,
        tokens_per_expert: Tensor | None = None,
    ) -> Tensor:
        """Apply each expert to its segment of rows.

        Args:
            rows_ND: [N, D] in `dtype`. Rows of gaps are zeros, as in `Routed.rows`, and so are the gradients of their
                outputs, as from `Exchange.combine`; rows past the last segment may hold anything, and so may their
                outputs and gradients.
            expert_offsets: int32 [e + 1]. Expert i's segment is rows[expert_offsets[i] : expert_offsets[i + 1]],
                alignment gaps included.
            row_weights: fp32 [N], factors of the outputs, 0 in gaps; None: 1.
            tokens_per_expert: int32 [e], rows of each segment without its gap, so that the activation computes nothing
                for gaps, and leaves zeros in them; by default segments count as full.

        Returns:
            Outputs [N, D] in `dtype`.

        Raises:
            TypeError: an argument has another dtype.
            ValueError: an argument has another shape or device.
        """
        (e, D, _), device = self.w_down.shape, self.w_down.device
        check_tensor("rows", rows_ND, (self.dtype,), ("N", D), device)
        check_tensor("expert_offsets", expert_offsets, (torch.int32,), (e + 1,), device)
        if row_weights is not None:
            check_tensor("row_weights", row_weights, (torch.float32,), (rows_ND.shape[0],), device)
            row_weights = row_weights.contiguous()
        if tokens_per_expert is not None:
            check_tensor("tokens_per_expert", tokens_per_expert, (torch.int32,), (e,), device)
            tokens_per_expert = tokens_per_expert.contiguous()
        offsets, N = expert_offsets.contiguous(), rows_ND.shape[0]
        gating = self.interleaved, math.inf if self.limit is None else self.limit, self.alpha, self.up_offset
        with without_autocast(device):
            gate_up = train_gemm(rows_ND.contiguous(), self.w_gate_up, offsets, self._gemm)
            if self.gate_up_bias is not None:
                gate_up = gate_up + train_bias(self.gate_up_bias, None, offsets, N, self._gemm)
            activated: Tensor = ops.weighted_gates(gate_up, row_weights, offsets, tokens_per_expert, *gating)
            out: Tensor = train_gemm(activated, self.w_down, offsets, self._gemm)
            if self.down_bias is not None:
                out = out + train_bias(self.down_bias, row_weights, offsets, N, self._gemm)
            return out

    def _choose(self) -> str:
        """torch's GEMM where it takes the products of both directions: all strides are multiples of 16 bytes."""
        (_, D, f), item = self.w_down.shape, self.w_down.element_size()
        aligned = D * item % 16 == 0 and f * item % 16 == 0
        return choose("torch", self.w_gate_up, self.w_down) if aligned else "loop"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._gemm = self._choose()
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._gemm = self._choose()

    def extra_repr(self) -> str:
        """What `repr` says of the parameters."""
        e, D, f = self.w_down.shape
        return f"e={e}, D={D}, F={f}, {dtype_name(self.dtype)}"


@torch.library.custom_op("epmoe::train_gemm", mutates_args=())
def train_gemm(rows: Tensor, weights: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    """rows [N, k] · weights [e, n, k]ᵀ → [N, n], by expert. Opaque, since compilers trace torch's in bf16 only."""
    if not len(rows) or not len(weights):
        return rows.new_empty(len(rows), weights.shape[1])
    if gemm == "torch":
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=offsets[1:])
    out, ends = rows.new_empty(len(rows), weights.shape[1]), offsets.tolist()
    for i in range(len(weights)):
        torch.mm(rows[ends[i] : ends[i + 1]], weights[i].T, out=out[ends[i] : ends[i + 1]])
    return out


@train_gemm.register_fake
def _(rows: Tensor, weights: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@torch.library.custom_op("epmoe::train_gemm_weights", mutates_args=())
def train_gemm_weights(grad: Tensor, rows: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    """grad [N, n]ᵀ · rows [N, k] → [e, n, k], by expert: gradients of weights, 0 for an expert without rows."""
    e = len(offsets) - 1
    if not len(rows) or not e:
        return rows.new_zeros(e, grad.shape[1], rows.shape[1])
    if gemm == "torch":
        return F.grouped_mm(grad.t(), rows, offs=offsets[1:])
    out, ends = rows.new_empty(e, grad.shape[1], rows.shape[1]), offsets.tolist()
    for i in range(e):
        torch.mm(grad[ends[i] : ends[i + 1]].T, rows[ends[i] : ends[i + 1]], out=out[i])
    return out


@train_gemm_weights.register_fake
def _(grad: Tensor, rows: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    return rows.new_empty(offsets.shape[0] - 1, grad.shape[1], rows.shape[1])


def _save_gemm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *saved, ctx.gemm = inputs
    ctx.save_for_backward(*saved)


def _gemm_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, offsets = ctx.saved_tensors
    grad, (of_rows, of_weights, *_) = grad.contiguous(), ctx.needs_input_grad
    by_rows = train_gemm(grad, weights.transpose(1, 2), offsets, ctx.gemm) if of_rows else None
    by_weights = train_gemm_weights(grad, rows, offsets, ctx.gemm) if of_weights else None
    return by_rows, by_weights, None, None


train_gemm.register_autograd(_gemm_gradients, setup_context=_save_gemm)


@torch.library.custom_op("epmoe::train_bias", mutates_args=())
def train_bias(bias: Tensor, factors: Tensor | None, offsets: Tensor, num_rows: int, gemm: str) -> Tensor:
    """[N, n]: for each row the bias [e, n] of its expert, times its factor fp32 [N], or 1."""
    if not len(bias):
        return bias.new_empty(num_rows, bias.shape[1])
    rows = bias[expert_of_rows(offsets[1:], num_rows)]
    return rows if factors is None else (rows * factors[:, None]).to(bias.dtype)


@train_bias.register_fake
def _(bias: Tensor, factors: Tensor | None, offsets: Tensor, num_rows: int, gemm: str) -> Tensor:
    return bias.new_empty(num_rows, bias.shape[1])


@torch.library.custom_op("epmoe::train_bias_backward", mutates_args=())
def train_bias_backward(
    grad: Tensor, bias: Tensor, factors: Tensor | None, offsets: Tensor, gemm: str
) -> tuple[Tensor, Tensor]:
    """Gradients of the bias [e, n] and of the factors fp32 [N], or [0] without them."""
    column = torch.ones_like(grad[:, 0]) if factors is None else factors.to(grad.dtype)
    columns = column[:, None].expand(-1, _COLUMNS).contiguous()
    by_bias = train_gemm_weights(grad, columns, offsets, gemm)[..., 0].contiguous()
    if factors is None:
        return by_bias, grad.new_empty(0, dtype=torch.float32)
    by_factors = ops.weighted_rows_backward_(
        train_bias(bias, None, offsets, len(grad), gemm), grad, None, offsets, None
    )
    return by_bias, by_factors


@train_bias_backward.register_fake
def _(grad: Tensor, bias: Tensor, factors: Tensor | None, offsets: Tensor, gemm: str) -> tuple[Tensor, Tensor]:
    num_factors = 0 if factors is None else grad.shape[0]
    return bias.new_empty(bias.shape), grad.new_empty(num_factors, dtype=torch.float32)


def _save_bias(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *saved, _, ctx.gemm = inputs
    ctx.save_for_backward(*saved)


def _bias_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    bias, factors, offsets = ctx.saved_tensors
    by_bias, by_factors = train_bias_backward(grad.contiguous(), bias, factors, offsets, ctx.gemm)
    return by_bias, None if factors is None else by_factors, None, None, None


train_bias.register_autograd(_bias_gradients, setup_context=_save_bias)


def _save_gates(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *saved, ctx.interleaved, ctx.limit, ctx.alpha, ctx.up_offset = inputs
    ctx.save_for_backward(*saved)


def _gates_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gating = ctx.interleaved, ctx.limit, ctx.alpha, ctx.up_offset
    saved = ctx.saved_tensors  # once: a checkpoint unpacks them
    by_gate_up, by_weights = ops.weighted_gates_backward(grad.contiguous(), *saved, *gating)
    return by_gate_up, None if saved[1] is None else by_weights, *(None,) * 6


def _no_second_gradients(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError("epmoe.training.GroupedExperts have no gradients of gradients")


torch.library.register_autograd("epmoe::weighted_gates", _gates_gradients, setup_context=_save_gates)
torch.library.register_autograd("epmoe::weighted_gates_backward", _no_second_gradients)
