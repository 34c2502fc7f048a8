"""The experts stage of a round: it chooses GEMMs for the weights of experts, and runs them.

The weights belong to a module, which may be `GroupedExperts` or a module of a framework.

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
    """A context in which autocast does not change dtypes, for kernels on this device."""
    # Entering torch's context takes 10 µs, so it is entered only where autocast is on.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _run_experts(
    gemm: Gemm, weights: Weights, rows_ND: Tensor, scales: Tensor | None, segments: Segments
) -> Tensor:
    """Call `gemm.experts` without autocast."""
    device = rows_ND.device
    # Serving calls this in every layer. Without autocast even an empty context would cost time.
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        with without_autocast(device):
            return gemm.experts(weights, rows_ND, scales, segments)
    return gemm.experts(weights, rows_ND, scales, segments)


class Stage(NamedTuple):
    """The GEMMs that have been chosen for weights of one shape, dtype and device.

    It does not hold the weights, so that each call can give other weights of the same kind.
    """

    gemms: tuple[str, ...]
    """The names of the GEMMs for calls without gradients, in the order in which a call tries them.
    """
    trained: str
    """The name of the GEMM for calls with gradients."""
    most_rows: dict[str, float]
    """For each name in `gemms`, the most rows of an expert, on average, that the GEMM takes."""
    alignment: int
    """The number of rows at whose multiples segments must start, so that every GEMM takes them."""
    batch_invariant: bool
    """Whether the bits of a row's output depend on nothing but the row."""

    @classmethod
    def choose(
        cls,
        wanted: str,
        gate_up: Tensor,
        down: Tensor,
        *,
        batch_invariant: bool = False,
        has_tensor_scales: bool = False,
    ) -> Self:
        """Choose the GEMMs for weights `gate_up` [e, 2F, D] and `down` [e, D, F].

        `table.choose` describes the arguments and the errors.
        """
        gemms = choose(
            wanted,
            gate_up,
            down,
            batch_invariant=batch_invariant,
            has_tensor_scales=has_tensor_scales,
        )
        trained = choose_trained(wanted, gate_up, down, batch_invariant=batch_invariant)
        most_rows = {name: GEMMS[name].most_rows(gate_up, down) for name in gemms}
        served = [GEMMS[name] for name in gemms]
        invariant = all(gemm.batch_invariant for gemm in served)
        return cls(
            gemms=gemms,
            trained=trained,
            most_rows=most_rows,
            alignment=max(gemm.block for gemm in served),
            batch_invariant=invariant,
        )

    @property
    def gemm(self) -> str:
        """The name of the GEMM for calls with many rows whose segments are aligned as it needs, if
        no adapters add to its products.
        """
        return next(name for name in self.gemms if GEMMS[name].takes_all_calls)

    @property
    def needed_alignment(self) -> int:
        """The number of rows at whose multiples segments must start so that `gemm` takes them."""
        return GEMMS[self.gemm].block

    def refuse_capture(self, weights: Tensor, *, trains: bool = False) -> None:
        """Raise RuntimeError if a CUDA graph is being captured that could not capture a call.

        That is the case if the GEMM for these weights makes the host wait. The error names the
        GEMM. `trains` means a call with gradients. The call itself would raise the same error, but
        only in the middle of a round; a layer therefore asks before it opens the round.
        """
        GEMMS[self.trained if trains else self.gemm].refuse_capture(weights)

    def serve(
        self, weights: Weights, rows_ND: Tensor, scales: Tensor | None, segments: Segments
    ) -> Tensor:
        """Run the experts without gradients on N rows.

        `rows_ND` [N, D] has the dtype of outputs, or it is fp8 and `scales` is fp32 [N, ⌈D/128⌉].
        Returns outputs [N, D]. On CPUs, rows behind the last segment are not computed. Raises
        ValueError if no GEMM takes the segments.
        """
        gemm = self._gemm_for(rows_ND, scales, segments, weights)
        N, D = rows_ND.shape
        # A rank without experts has nothing to compute.
        if not weights.down.shape[0]:
            return rows_ND.new_empty(N, D, dtype=weights.dtype)
        device = rows_ND.device
        if device.type != "cpu" or torch.compiler.is_compiling():
            return _run_experts(gemm, weights, rows_ND, scales, segments)
        # On CPUs the number of rows in segments can be read without waiting. Leave out all others.
        n = int(segments.offsets[-1])
        if scales is not None:
            scales = scales[:n]
        out_nD = _run_experts(gemm, weights, rows_ND[:n], scales, segments)
        # Outputs of the rows behind the last segment are undefined.
        if n == N:
            return out_nD
        out_ND = out_nD.new_empty(N, D)
        out_ND[:n] = out_nD
        return out_ND

    def train(
        self, weights: Weights, rows_ND: Tensor, row_weights: Tensor | None, segments: Segments
    ) -> Tensor:
        """Run the experts on rows [N, D] so that autograd can compute gradients.

        Rows, weights, biases and `row_weights` fp32 [N] get gradients. Returns outputs [N, D], with
        the same bits as `serve` by the same GEMM. Weights, rows and biases must have the same
        dtype: fp32, fp16 or bf16.
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

    def _gemm_for(
        self, rows_ND: Tensor, scales: Tensor | None, segments: Segments, weights: Weights
    ) -> Gemm:
        """Find the first GEMM that takes a call with these rows, segments and weights.

        Raises ValueError if there is none, since a GEMM that needs aligned segments would read
        wrong rows. Warns if the call is slow only because its segments are not aligned.
        """
        aligned_would_be_fp8 = False
        for name in self.gemms:
            gemm = GEMMS[name]
            if weights.added is not None and not gemm.takes_adapters:
                continue
            if not gemm.takes(segments, self.most_rows.get(name, math.inf)):
                aligned_would_be_fp8 |= gemm.takes_all_calls and gemm.takes_fp8
                continue
            if not (gemm.takes_all_rows or gemm.takes_rows(rows_ND, scales)):
                continue
            # This GEMM dequantizes fp8 weights. With aligned segments another one would not.
            if aligned_would_be_fp8 and weights.down.dtype == FP8 and not gemm.takes_fp8:
                warnings.warn(_UNALIGNED, stacklevel=4)
            return gemm
        raise ValueError(
            f"`alignment` must be a multiple of {self.alignment}, got {segments.alignment}"
        )
