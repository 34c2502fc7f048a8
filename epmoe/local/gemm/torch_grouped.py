"""torch's `grouped_mm`.

In bf16, on GPUs of compute capability 9 and 10, torch has a kernel for it, and the host does not
wait. On other GPUs and in other dtypes torch copies the ends of segments to the host and loops over
the experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.local.gemm.gemm import Gemm, Scaled, plain_rows, plain_weights
from epmoe.local.weight_formats import plain_shape, product_dtype

# The major numbers of the compute capabilities for which torch has a kernel (`_grouped_mm_cuda` of
# torch 2.11 to 2.14; pytorch#169970, pytorch#186620).
_WITH_KERNEL = (9, 10)
# Strides must be multiples of this number of bytes. In a backward pass rows become columns, so it
# holds for both dimensions there.
_STRIDE_BYTES = 16


class TorchGrouped(Gemm):
    """`torch.nn.functional.grouped_mm`. It takes any segments.

    fp8, MXFP4 and NVFP4 weights are dequantized in every call.
    """

    name = "torch"
    takes_tensor_scales = True

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """Return torch's own error for these weights, or None if it takes them.

        A product of one row without any expert that has rows shows it. torch does not take fp64,
        nor strides that are not multiples of 16 bytes.
        """
        none = torch.zeros(down.shape[0], dtype=torch.int32, device=down.device)
        try:
            for weights in (gate_up, down):
                # Quantized weights are dequantized into new memory, so only the shape counts.
                dtype = product_dtype(weights)
                if dtype != weights.dtype:
                    weights = torch.empty(plain_shape(weights), dtype=dtype, device="meta")
                row = weights.new_zeros(1, weights.shape[2])
                F.grouped_mm(row, weights.transpose(1, 2), offs=none.to(weights.device))
        except (RuntimeError, ValueError) as error:
            return error
        return None

    def trains(self, gate_up: Tensor, down: Tensor) -> bool:
        for weights in (gate_up, down):
            for size in weights.shape[1:]:
                if size * weights.element_size() % _STRIDE_BYTES:
                    return False
        return self.problem_with(gate_up, down) is None

    def is_capturable(self, weights: Tensor) -> bool:
        if not weights.is_cuda or product_dtype(weights) != torch.bfloat16:
            return False
        major, _ = torch.cuda.get_device_capability(weights.device)
        return major in _WITH_KERNEL

    def is_traceable(self, rows: Tensor, weights: Tensor) -> bool:
        return rows.dtype == weights.dtype == torch.bfloat16

    def multiply(self, rows: Scaled, weights: Scaled, ends: Tensor, alignment: int) -> Tensor:
        if weights[0].is_cuda:
            self.refuse_capture(weights[0])
        plain = plain_weights(weights)
        return F.grouped_mm(plain_rows(rows, plain.dtype), plain.transpose(1, 2), offs=ends)

    def multiply_plain(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        if rows.is_cuda:
            self.refuse_capture(weights)
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)

    def multiply_for_weights(self, grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        if rows.is_cuda:
            self.refuse_capture(rows)
        return F.grouped_mm(grad.t(), rows, offs=ends)
