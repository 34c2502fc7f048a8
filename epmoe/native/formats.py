"""The formats in which rows travel between ranks. A format is a row of `WIRE_FORMATS`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCALE_BLOCK = 128  # elements of a row that share one fp8 scale


@dataclass(frozen=True)
class WireFormat:
    """How a row travels. ``csrc/wire_format.h`` has the same table."""

    name: str
    """its name in `exchange.payload` and `exchange.combine_payload`"""
    number: int
    """its number in `WireFormat` of C++"""
    element: torch.dtype | None
    """None: the dtype of x, without scales."""
    element_bits: int
    """0: as many as in the dtype of x."""
    scale: torch.dtype | None
    block: int
    """Elements of a row that share a scale; 0: there are no scales."""

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the rows of an x of `dtype`."""
        return self.element or dtype

    def row_items(self, D: int, dtype: torch.dtype) -> int:
        """Items of `dtype_of(dtype)` in a row of D elements."""
        return self.row_bytes(D, dtype) // self.dtype_of(dtype).itemsize

    def row_bytes(self, D: int, dtype: torch.dtype) -> int:
        """Bytes of a row of D elements without its scales, of an x of `dtype`."""
        return -(-D * (self.element_bits or 8 * dtype.itemsize) // 8)

    def num_scales(self, D: int) -> int:
        """Scales of a row of D elements."""
        return -(-D // self.block) if self.block else 0

    def scale_bytes(self, D: int) -> int:
        """Bytes of the scales of a row of D elements."""
        return self.num_scales(D) * self.scale.itemsize if self.scale else 0


def packed_row_bytes(D: int) -> int:
    """Bytes of a row of D elements as `pack_fp8` makes it, its scales behind it: whole lines of 16 bytes."""
    fp8 = WIRE_FORMATS["fp8"]
    return -(-(fp8.row_bytes(D, torch.float8_e4m3fn) + fp8.scale_bytes(D)) // 16) * 16


WIRE_FORMATS = {
    each.name: each
    for each in (
        WireFormat("auto", 0, None, 0, None, 0),
        WireFormat("fp8", 1, torch.float8_e4m3fn, 8, torch.float32, SCALE_BLOCK),
    )
}
"""The formats by their names."""
