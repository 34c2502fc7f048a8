"""The formats in which rows travel between ranks. A format is a row of `WIRE_FORMATS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

SCALE_BLOCK = 128  # elements of a row that share one fp8 scale
LINE_BYTES = 16  # rows are whole lines
EXTRA_IN_LINE = 12
"""Bytes of `extra` in a line behind a row: see epmoe/exchange/extra.py."""

PayloadName = Literal["auto", "fp8"]
"""What a user can choose: names of `WIRE_FORMATS`, and of `TRAINING_FORMATS`."""


@dataclass(frozen=True)
class WireFormat:
    """How a row travels. ``csrc/wire_format.h`` has the same table."""

    name: str
    """The value of `exchange.payload` and `exchange.combine_payload`, unless the
    format is packed.
    """
    number: int
    """The value of `WireFormat` in C++."""
    element: torch.dtype | None
    """None: the dtype of x, without scales."""
    element_bits: int
    """0: as many as in the dtype of x."""
    scale: torch.dtype | None
    block: int
    """Elements of a row that share a scale; 0: there are no scales."""
    packed: bool = False
    """Scales lie behind the elements of their row, which has whole lines of 16 bytes; otherwise
    they are a tensor.
    """

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the rows of an x of `dtype`."""
        return self.element or dtype

    def takes(self, D: int) -> bool:
        """Whether a row of D elements has whole blocks."""
        return not self.block or D % self.block == 0

    def row_items(self, D: int, dtype: torch.dtype) -> int:
        """Items of `dtype_of(dtype)` in a row of D elements."""
        return self.row_bytes(D, dtype) // self.dtype_of(dtype).itemsize

    def row_bytes(self, D: int, dtype: torch.dtype) -> int:
        """Bytes of a row of D elements of an x of `dtype`. Scales count if they are packed."""
        elements = -(-D * (self.element_bits or 8 * dtype.itemsize) // 8)
        return -(-(elements + self.scale_bytes(D)) // 16) * 16 if self.packed else elements

    def width(self, D: int, extra_bytes: int, dtype: torch.dtype) -> int:
        """Elements of a row of D elements of an x of `dtype`, and of so many bytes behind them, in
        whole blocks.
        """
        items = -(-extra_bytes // EXTRA_IN_LINE) * LINE_BYTES // self.dtype_of(dtype).itemsize
        if not self.block:
            return D + items
        return -(-(D + items) // self.block) * self.block

    def num_scales(self, D: int) -> int:
        return -(-D // self.block) if self.block else 0

    def scale_bytes(self, D: int) -> int:
        return self.num_scales(D) * self.scale.itemsize if self.scale else 0


_FORMATS = (
    WireFormat("auto", 0, None, 0, None, 0),
    WireFormat("fp8", 1, torch.float8_e4m3fn, 8, torch.float32, SCALE_BLOCK),
    WireFormat("packed_fp8", 2, torch.float8_e4m3fn, 8, torch.float32, SCALE_BLOCK, packed=True),
)
WIRE_FORMATS = {each.name: each for each in _FORMATS}
"""The formats by their names."""

TRAINING_FORMATS = {"auto": WIRE_FORMATS["auto"], "fp8": WIRE_FORMATS["packed_fp8"]}
"""The formats of training, by the `payload` of a `TrainingExchange`."""


def format_of_rows(D: int, scales: int) -> WireFormat:
    """The format of rows of D elements that come with so many scales each; "fp8" where no format
    has so many.
    """
    scaled = [each for each in WIRE_FORMATS.values() if each.scale and not each.packed]
    return next((each for each in scaled if each.num_scales(D) == scales), scaled[0])


def payload_of(element: torch.dtype, block: int) -> PayloadName | None:
    """The name of the payload whose rows arrive as `element` with a scale for each `block`
    elements; None: no such.
    """
    name: PayloadName
    for name in get_args(PayloadName):
        if (WIRE_FORMATS[name].element, WIRE_FORMATS[name].block) == (element, block):
            return name
    return None
