"""The grouped GEMM with gradients, and a bias for each expert, as operators: torch.compile and
checkpoints know them.

    rows [N,k] · weights [e,n,k]ᵀ ─ epmoe::train_gemm ─▶ [N,n]
    bias [e,n] ─────────────────── epmoe::train_bias ─▶ [N,n]

Rows lie expert by expert, as in gemm.py. Sums have one order, so gradients have the same bits on
every run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import bias_of_rows
from epmoe.local.gemm.table import GEMMS
from epmoe.native.named import named

# A matrix of one column has it so often, since torch's GEMM wants rows of 16 bytes.
_COLUMNS = 8


def choose_trained(
    wanted: str, gate_up: Tensor, down: Tensor, *, batch_invariant: bool = False
) -> str:
    """The name of the GEMM for calls with gradients, with weights [e, 2F, D] and [e, D, F]. If
    `wanted` is "torch", it is none that needs a GPU. With `batch_invariant` it is an invariant one
    if any of these trains the weights.
    """
    gemms = [gemm for gemm in GEMMS.values() if wanted != "torch" or not gemm.needs_gpu]
    gemms.sort(key=lambda gemm: batch_invariant and not gemm.batch_invariant)
    return next(gemm.name for gemm in gemms if gemm.trains(gate_up, down))


@named("epmoe::train_gemm")
def train_gemm(rows: Tensor, weights: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    """rows [N, k] · weights [e, n, k]ᵀ → [N, n], by expert, by a GEMM of `choose_trained`. All are
    fp32, fp16 or bf16. Opaque, since compilers trace torch's in bf16 only.

    `offsets` is int32 [e + 1], contiguous: expert i has rows[offsets[i] : offsets[i + 1]]. Rows
    past the last segment are not read, and their products are undefined. An expert without rows
    gets gradients of 0.
    """
    return product(rows, weights, offsets[1:], gemm)


def product(rows: Tensor, weights: Tensor, ends: Tensor, gemm: str) -> Tensor:
    """`train_gemm`, by the ends of the segments, for callers that need several products."""
    if not rows.shape[0] or not weights.shape[0]:
        return rows.new_empty(rows.shape[0], weights.shape[1])
    return GEMMS[gemm].multiply_plain(rows, weights, ends)


@train_gemm.register_fake
def _(rows: Tensor, weights: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@named("epmoe::train_gemm_weights")
def train_gemm_weights(grad: Tensor, rows: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    """grad [N, n]ᵀ · rows [N, k] → [e, n, k], by expert: gradients of weights, 0 for an expert
    without rows.
    """
    return product_for_weights(grad, rows, offsets[1:], gemm)


def product_for_weights(grad: Tensor, rows: Tensor, ends: Tensor, gemm: str) -> Tensor:
    """`train_gemm_weights`, by the ends of the segments."""
    e = ends.shape[0]
    if not rows.shape[0] or not e:
        return rows.new_zeros(e, grad.shape[1], rows.shape[1])
    return GEMMS[gemm].multiply_for_weights(grad, rows, ends)


@train_gemm_weights.register_fake
def _(grad: Tensor, rows: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    return rows.new_empty(offsets.shape[0] - 1, grad.shape[1], rows.shape[1])


def bias_gradients(grad: Tensor, factors: Tensor | None, offsets: Tensor, gemm: str) -> Tensor:
    """Sum grad [N, n] over each expert's rows, each times the factor of the row, fp32 [N], or 1.
    Returns [e, n].
    """
    # The gradient of weights [e, n, 1] for rows of one element, the factor.
    if factors is None:
        factors = torch.ones_like(grad[:, 0])
    column = factors.to(grad.dtype)
    columns = column[:, None].expand(-1, _COLUMNS).contiguous()
    return train_gemm_weights(grad, columns, offsets, gemm)[..., 0].contiguous()


@named("epmoe::train_bias")
def train_bias(bias: Tensor, offsets: Tensor, num_rows: int, gemm: str) -> Tensor:
    """`bias_of_rows` with gradients."""
    if not len(bias):
        return bias.new_empty(num_rows, bias.shape[1])
    return bias_of_rows(bias, offsets[1:], num_rows)


@train_bias.register_fake
def _(bias: Tensor, offsets: Tensor, num_rows: int, gemm: str) -> Tensor:
    return bias.new_empty(num_rows, bias.shape[1])


def _save_gemm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, offsets, ctx.gemm = inputs
    needs_rows, needs_weights, *_ = ctx.needs_input_grad
    # Keep nothing that only a frozen part would need.
    ctx.save_for_backward(rows if needs_weights else None, weights if needs_rows else None, offsets)


def _gemm_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    grad_rows = None
    if weights is not None:
        grad_rows = train_gemm(grad, weights.transpose(1, 2), offsets, ctx.gemm)
    grad_weights = None
    if rows is not None:
        grad_weights = train_gemm_weights(grad, rows, offsets, ctx.gemm)
    return grad_rows, grad_weights, None, None


def _save_bias(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, offsets, _, ctx.gemm = inputs
    ctx.save_for_backward(offsets)


def _bias_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    [offsets] = ctx.saved_tensors
    return bias_gradients(grad.contiguous(), None, offsets, ctx.gemm), None, None, None


train_gemm.register_autograd(_gemm_gradients, setup_context=_save_gemm)
train_bias.register_autograd(_bias_gradients, setup_context=_save_bias)
