"""The experts stage: a grouped GEMM over `expert_offsets`, by torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epmoe.memory import SCALE_BLOCK
from epmoe.stages.checks import FLOATS, check_tensor
from epmoe.stages.quantize import dequantize_rows

DTYPES = (*FLOATS, torch.float64)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which torch computes in the dtypes of its inputs."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()  # takes the host less time
    return torch.autocast(device.type, enabled=False)


class SwiGLUExperts(nn.Module):
    """This rank's SwiGLU experts, `down(silu(gate(x)) · up(x))`, over rows in the order of `ep.dispatch`.

    The weights are parameters named `w_gate_up` and `w_down` that share the memory of the given tensors. They require
    no grad, because the exchange is forward only. Autocast changes nothing: outputs stay in the weights' dtype.

    The constructor tries whether `torch.nn.functional.grouped_mm` accepts the weights: it needs strides that are
    multiples of 16 bytes, and no fp64. If it does not, a loop over the experts computes the same. A cast, a move and
    `load_state_dict` try again.

    Args:
        w_gate_up: fp32, fp16, bf16 or fp64 [e, 2F, D], in which each expert has F gate rows, then F up rows.
        w_down: [e, D, F], same dtype and device.

    Raises:
        TypeError: a weight is no tensor, or has another dtype.
        ValueError: the shapes or devices do not fit each other.
    """

    w_gate_up: nn.Parameter
    w_down: nn.Parameter

    def __init__(self, w_gate_up: Tensor, w_down: Tensor) -> None:
        dtypes = [dtype for dtype in DTYPES if dtype == getattr(w_down, "dtype", None)]
        check_tensor("w_down", w_down, dtypes or DTYPES, ("e", "D", "F"))
        e, D, f = w_down.shape
        check_tensor("w_gate_up", w_gate_up, dtypes, (e, 2 * f, D), w_down.device)
        super().__init__()
        self.w_gate_up = nn.Parameter(w_gate_up, requires_grad=False)
        self.w_down = nn.Parameter(w_down, requires_grad=False)
        self.grouped = self._accepts_grouped_mm()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, of rows without scales, and of outputs."""
        return self.w_down.dtype

    def forward(self, rows_ND: Tensor, expert_offsets: Tensor, scales: Tensor | None = None) -> Tensor:
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
        w_down = self.w_down
        (e, D, _), device = w_down.shape, w_down.device
        dtype = w_down.dtype if scales is None else torch.float8_e4m3fn
        check_tensor("rows", rows_ND, (dtype,), ("N", D), device)
        check_tensor("expert_offsets", expert_offsets, (torch.int32,), (e + 1,), device)
        if scales is not None:
            check_tensor("scales", scales, (torch.float32,), (rows_ND.shape[0], D // SCALE_BLOCK), device)
        with without_autocast(device):
            return (self._grouped if self.grouped else self._loop)(rows_ND, expert_offsets, scales)

    def extra_repr(self) -> str:
        """What `repr` says of the weights."""
        e, D, f = self.w_down.shape
        return f"e={e}, D={D}, F={f}, {str(self.dtype).removeprefix('torch.')}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.grouped = self._accepts_grouped_mm()
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.grouped = self._accepts_grouped_mm()

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
