"""The experts stage: a grouped GEMM over `expert_offsets`, by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.memory import SCALE_BLOCK
from epmoe.stages.checks import check_tensor
from epmoe.stages.quantize import dequantize_rows


class SwiGLUExperts:
    """This rank's SwiGLU experts, `down(silu(gate(x)) · up(x))`, over rows in the order of `ep.dispatch`.

    The constructor tries once whether `torch.nn.functional.grouped_mm` accepts the weights: it needs strides that are
    multiples of 16 bytes, and no fp64. If it does not, a loop over the experts computes the same.

    Args:
        w_gate_up: [e, 2F, D], in which each expert has F gate rows, then F up rows.
        w_down: [e, D, F], same dtype and device.

    Raises:
        TypeError: a weight is no tensor, or the dtypes differ.
        ValueError: the shapes or devices do not fit each other.
    """

    def __init__(self, w_gate_up: Tensor, w_down: Tensor) -> None:
        check_tensor("w_down", w_down, (w_down.dtype,), ("e", "D", "F"))
        e, D, f = w_down.shape
        check_tensor("w_gate_up", w_gate_up, (w_down.dtype,), (e, 2 * f, D), w_down.device)
        self.w_gate_up, self.w_down = w_gate_up, w_down
        self.grouped = self._accepts_grouped_mm()

    def __call__(self, rows_ND: Tensor, expert_offsets: Tensor, scales: Tensor | None = None) -> Tensor:
        """Apply each expert to its segment of rows.

        Args:
            rows_ND: [N, D] in the weights' dtype, or fp8 with `scales`. Rows past `expert_offsets[e]` have no effect on
                others, and their outputs are undefined.
            expert_offsets: int32 [e + 1]. Expert i's segment is rows[expert_offsets[i] : expert_offsets[i + 1]],
                alignment gaps included.
            scales: fp32 [N, D/128], by which the rows are dequantised, or None.

        Returns:
            Outputs [N, D] in the weights' dtype.

        Raises:
            TypeError: an argument has another dtype.
            ValueError: an argument has another shape or device.
        """
        e, D, _ = self.w_down.shape
        check_tensor("expert_offsets", expert_offsets, (torch.int32,), (e + 1,), rows_ND.device)
        if scales is None:
            check_tensor("rows", rows_ND, (self.w_down.dtype,), ("N", D), self.w_down.device)
        else:
            check_tensor("scales", scales, (torch.float32,), (rows_ND.shape[0], D // SCALE_BLOCK), rows_ND.device)
        return (self._grouped if self.grouped else self._loop)(rows_ND, expert_offsets, scales)

    def _grouped(self, rows_ND: Tensor, expert_offsets: Tensor, scales: Tensor | None) -> Tensor:
        # On the CPU the number of rows costs no synchronisation, so rows past the last segment are left out.
        n = rows_ND.shape[0] if rows_ND.is_cuda else int(expert_offsets[-1])
        rows_nD = self._dequantise(rows_ND[:n], None if scales is None else scales[:n])
        ends = expert_offsets[1:]
        gate, up = F.grouped_mm(rows_nD, self.w_gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        out_nD = F.grouped_mm(F.silu(gate) * up, self.w_down.transpose(1, 2), offs=ends)
        if n == rows_ND.shape[0]:
            return out_nD
        out_ND = out_nD.new_empty(rows_ND.shape)
        out_ND[:n] = out_nD
        return out_ND

    def _loop(self, rows_ND: Tensor, expert_offsets: Tensor, scales: Tensor | None) -> Tensor:
        out_ND = rows_ND.new_empty(rows_ND.shape, dtype=self.w_down.dtype)
        ends = expert_offsets.tolist()
        for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            if start == end:
                continue
            rows_nD = self._dequantise(rows_ND[start:end], None if scales is None else scales[start:end])
            gate, up = (rows_nD @ self.w_gate_up[i].T).chunk(2, dim=-1)
            torch.mm(F.silu(gate) * up, self.w_down[i].T, out=out_ND[start:end])
        return out_ND

    def _dequantise(self, rows_nD: Tensor, scales: Tensor | None) -> Tensor:
        return rows_nD if scales is None else dequantize_rows(rows_nD, scales, self.w_down.dtype)

    def _accepts_grouped_mm(self) -> bool:
        e, D, f = self.w_down.shape
        none = torch.zeros(e, dtype=torch.int32, device=self.w_down.device)
        try:
            F.grouped_mm(self.w_down.new_zeros(1, D), self.w_gate_up.transpose(1, 2), offs=none)
            F.grouped_mm(self.w_down.new_zeros(1, f), self.w_down.transpose(1, 2), offs=none)
        except (RuntimeError, ValueError):
            return False
        return True
