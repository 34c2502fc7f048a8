"""The experts stage over weights that a module holds, epmoe's or a framework's: which GEMMs take
them, and its calls.

    weights ─ Stage.choose ─▶ Stage ─ serve ─▶ outputs [N,D]        train: the same with gradients
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Self

import torch
from torch import Tensor

from epmoe.local.experts_gradients import train_experts
from epmoe.local.gemm.gemm import Gemm, Segments, Weights
from epmoe.local.gemm.gradients import choose_trained
from epmoe.local.gemm.table import GEMMS, choose
from epmoe.native.arguments import FP8

_UNALIGNED = (
    "fp8 weights are dequantized in this call, which is slow: give the experts rows of "
    "`dispatch(…, aligned=True)` and `alignment=dispatched.alignment`"
)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which autocast changes no dtype."""
    # Where there is none, the host takes 10 µs less.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _by(
    gemm: Gemm, weights: Weights, rows_ND: Tensor, scales: Tensor | None, segments: Segments
) -> Tensor:
    """`gemm.experts`, in which autocast changes no dtype."""
    device = rows_ND.device
    # Where there is none, no context costs the host less than an empty one.
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        with without_autocast(device):
            return gemm.experts(weights, rows_ND, scales, segments)
    return gemm.experts(weights, rows_ND, scales, segments)


class Stage(NamedTuple):
    """The GEMMs for weights of one layout. It holds no weights, so each call may bring others."""

    gemms: tuple[str, ...]
    """Names of the GEMMs that serve. A call takes the first that takes its segments."""
    trained: str
    """Name of the GEMM of calls with gradients."""
    most_rows: dict[str, float]
    """`Gemm.most_rows` of each GEMM that serves"""
    alignment: int
    """Every segment must start at a multiple of this number of rows for `gemm`."""
    batch_invariant: bool
    """Whether the bits of a row's output depend on nothing but the row."""

    @classmethod
    def choose(
        cls, wanted: str, gate_up: Tensor, down: Tensor, *, batch_invariant: bool = False
    ) -> Self:
        """Choose the GEMMs for weights [e, 2F, D] and [e, D, F]. Arguments and errors are those of
        `table.choose`.
        """
        gemms = choose(wanted, gate_up, down, batch_invariant=batch_invariant)
        trained = choose_trained(wanted, gate_up, down, batch_invariant=batch_invariant)
        most_rows = {name: GEMMS[name].most_rows(gate_up, down) for name in gemms}
        served = [GEMMS[name] for name in gemms]
        invariant = all(gemm.batch_invariant for gemm in served)
        return cls(gemms, trained, most_rows, max(gemm.block for gemm in served), invariant)

    @property
    def gemm(self) -> str:
        """The name of the GEMM that serves calls of many rows whose segments lie as it
        wants them.
        """
        return next(name for name in self.gemms if GEMMS[name].takes_all_calls)

    def refuse_capture(self, weights: Tensor, *, trains: bool = False) -> None:
        """Raise RuntimeError, which names the GEMM, if the current stream captures a CUDA graph
        and a call with these weights would wait for the host. `trains`: a call with gradients.

        A call raises the same, but then within a round. Who opens the round asks before.
        """
        GEMMS[self.trained if trains else self.gemm].refuse_capture(weights)

    def serve(
        self, weights: Weights, rows_ND: Tensor, scales: Tensor | None, segments: Segments
    ) -> Tensor:
        """Run the experts without gradients: rows [N, D], in the dtype of outputs or fp8 with
        scales fp32 [N, ⌈D/128⌉], → outputs [N, D].

        On CPUs rows past the last segment cost nothing. Raises ValueError if no GEMM takes the
        segments.
        """
        gemm = self._gemm_of(segments, weights.down.dtype)
        N, D = rows_ND.shape
        # A rank without experts.
        if not weights.down.shape[0]:
            return rows_ND.new_empty(N, D, dtype=weights.dtype)
        device = rows_ND.device
        if device.type != "cpu" or torch.compiler.is_compiling():
            return _by(gemm, weights, rows_ND, scales, segments)
        # On CPUs the host knows how many rows there are, without synchronisation.
        n = int(segments.offsets[-1])
        if scales is not None:
            scales = scales[:n]
        out_nD = _by(gemm, weights, rows_ND[:n], scales, segments)
        # Outputs of the other rows are undefined.
        if n == N:
            return out_nD
        out_ND = out_nD.new_empty(N, D)
        out_ND[:n] = out_nD
        return out_ND

    def train(
        self, weights: Weights, rows_ND: Tensor, row_weights: Tensor | None, segments: Segments
    ) -> Tensor:
        """Run the experts with gradients of rows, weights and biases, and of `row_weights` fp32
        [N]: rows [N, D] → outputs [N, D].

        The bits are those of `serve` by the same GEMM. Weights, rows and biases have one dtype:
        fp32, fp16 or bf16.
        """
        with without_autocast(rows_ND.device):
            out_ND: Tensor
            out_ND, _ = train_experts(
                rows_ND.contiguous(),
                row_weights,
                weights.gate_up,
                weights.down,
                weights.gate_up_bias,
                weights.down_bias,
                segments.offsets,
                segments.tokens,
                *weights.gating,
                self.trained,
            )
        return out_ND

    def _gemm_of(self, segments: Segments, dtype: torch.dtype) -> Gemm:
        """Find the GEMM for a call with such segments, which another one would misread."""
        for name in self.gemms:
            gemm = GEMMS[name]
            if not gemm.takes(segments, self.most_rows.get(name, math.inf)):
                continue
            # Another GEMM would take the weights as they are, if segments were aligned.
            if dtype == FP8 and not gemm.takes_fp8 and GEMMS[self.gemm].takes_fp8:
                warnings.warn(_UNALIGNED, stacklevel=4)
            return gemm
        raise ValueError(
            f"`alignment` must be a multiple of {self.alignment}, got {segments.alignment}"
        )
