"""A grouped GEMM with gradients, and a bias for each expert with gradients.

Both are operators of torch, so that torch.compile and activation checkpointing handle them.

    rows [N,k] · weights [e,n,k]ᵀ ─ epmoe::train_gemm ─▶ [N,n]
    bias [e,n] ─────────────────── epmoe::train_bias ─▶ [N,n]

The rows of each expert form a segment, as gemm.py explains. Sums always have the same order, so
that gradients have the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import of_rows
from epmoe.local.gemm.table import GEMMS
from epmoe.native.named import named

# How often a column is repeated to make a matrix of it. torch's GEMM needs rows of multiples of 16
# bytes, which eight numbers of two bytes are.
_COLUMNS = 8


def choose_trained(
    wanted: str, gate_up: Tensor, down: Tensor, *, batch_invariant: bool = False
) -> str:
    """Choose the GEMM for calls with gradients, and return its name.

    The weights are `gate_up` [e, 2F, D] and `down` [e, D, F]. If `wanted` is "torch", a GEMM that
    needs a GPU is not chosen. With `batch_invariant`, GEMMs with this property come first, but
    another one is chosen if none of them can train the weights.
    """
    gemms = [gemm for gemm in GEMMS.values() if wanted != "torch" or not gemm.needs_gpu]
    gemms.sort(key=lambda gemm: batch_invariant and not gemm.batch_invariant)
    return next(gemm.name for gemm in gemms if gemm.trains(gate_up, down))


@named("epmoe::train_gemm")
def train_gemm(rows: Tensor, weights: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    """Multiply the rows of each expert by its weight: rows [N, k] · weights [e, n, k]ᵀ → [N, n].

    `gemm` is the name of a GEMM that `choose_trained` has chosen. Rows and weights are fp32, fp16
    or bf16. `offsets` is int32 [e + 1], contiguous: expert i has rows[offsets[i] : offsets[i + 1]].
    Rows behind the last segment are not read, and their products are undefined. An expert without
    rows gets gradients of 0. It is an opaque operator because compilers can trace torch's grouped
    GEMM in bf16 only.
    """
    return product(rows, weights, offsets[1:], gemm)


def product(rows: Tensor, weights: Tensor, ends: Tensor, gemm: str) -> Tensor:
    """Do the work of `train_gemm`, without gradients. `ends` is int32 [e], the row behind each
    segment.
    """
    if not rows.shape[0] or not weights.shape[0]:
        return rows.new_empty(rows.shape[0], weights.shape[1])
    return GEMMS[gemm].multiply_plain(rows, weights, ends)


@train_gemm.register_fake
def _(rows: Tensor, weights: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@named("epmoe::train_gemm_weights")
def train_gemm_weights(grad: Tensor, rows: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    """Compute the gradients of weights: grad [N, n]ᵀ · rows [N, k] → [e, n, k], by expert.

    The gradient of an expert without rows is 0. `offsets` and `gemm` are those of `train_gemm`.
    """
    return product_for_weights(grad, rows, offsets[1:], gemm)


def product_for_weights(grad: Tensor, rows: Tensor, ends: Tensor, gemm: str) -> Tensor:
    """Do the work of `train_gemm_weights`. `ends` is int32 [e], the row behind each segment."""
    e = ends.shape[0]
    if not rows.shape[0] or not e:
        return rows.new_zeros(e, grad.shape[1], rows.shape[1])
    return GEMMS[gemm].multiply_for_weights(grad, rows, ends)


@train_gemm_weights.register_fake
def _(grad: Tensor, rows: Tensor, offsets: Tensor, gemm: str) -> Tensor:
    return rows.new_empty(offsets.shape[0] - 1, grad.shape[1], rows.shape[1])


def bias_gradients(grad: Tensor, factors: Tensor | None, offsets: Tensor, gemm: str) -> Tensor:
    """Compute the gradients of biases [e, n]: the sums of grad [N, n] over each expert's rows.

    Each row of `grad` is multiplied by the row's factor, fp32 [N]. None stands for factors of 1.
    """
    # The sum is the gradient of weights [e, n, 1] for rows of one element, which is the factor. So
    # the GEMM computes it, with its fixed order of sums.
    if factors is None:
        factors = torch.ones_like(grad[:, 0])
    column = factors.to(grad.dtype)
    columns = column[:, None].expand(-1, _COLUMNS).contiguous()
    return train_gemm_weights(grad, columns, offsets, gemm)[..., 0].contiguous()


@named("epmoe::train_bias")
def train_bias(bias: Tensor, offsets: Tensor, num_rows: int, gemm: str) -> Tensor:
    """Return the bias of each row's expert, [N, n], with gradients. `num_rows` is N.

    `gemm` is the GEMM of the gradients, and `offsets` are those of `train_gemm`.
    """
    if not len(bias):
        return bias.new_empty(num_rows, bias.shape[1])
    return of_rows(bias, offsets[1:], num_rows)


@train_bias.register_fake
def _(bias: Tensor, offsets: Tensor, num_rows: int, gemm: str) -> Tensor:
    return bias.new_empty(num_rows, bias.shape[1])


def _save_gemm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save for the backward pass what the wanted gradients of `train_gemm` need."""
    rows, weights, offsets, ctx.gemm = inputs
    needs_rows = ctx.needs_input_grad[0]
    needs_weights = ctx.needs_input_grad[1]
    # The gradient of weights needs the rows, and the gradient of rows needs the weights.
    ctx.save_for_backward(rows if needs_weights else None, weights if needs_rows else None, offsets)


def _gemm_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs of `train_gemm`. `_save_gemm` says which are wanted."""
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
