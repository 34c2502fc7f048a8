"""The formats in which rows travel between ranks. The table `WIRE_FORMATS` has all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

SCALE_BLOCK = 128  # elements of a row that share one fp8 scale
LINE_BYTES = 16  # rows are whole lines
EXTRA_IN_LINE = 12
"""How many extra bytes a line of 16 bytes holds: see epmoe/exchange/extra.py."""

PayloadName = Literal["auto", "fp8"]
"""The payloads that a user can choose. They are names in `WIRE_FORMATS` and `TRAINING_FORMATS`."""


@dataclass(frozen=True)
class WireFormat:
    """How a row travels. ``csrc/wire_format.h`` has the same table."""

    name: str
    """The name of the format. Formats that are not packed can be the value of `exchange.payload`
    and `exchange.combine_payload`.
    """
    number: int
    """The number of the format in the enumeration `WireFormat` of C++."""
    element: torch.dtype | None
    """The dtype of an element on the way. None: rows travel in the dtype of x, without scales."""
    element_bits: int
    """The bits of an element. 0: as many as in the dtype of x."""
    scale: torch.dtype | None
    """The dtype of a scale. None: there are no scales."""
    block: int
    """How many elements of a row share a scale. 0: there are no scales."""
    packed: bool = False
    """Whether the scales of a row lie behind its elements, and fill it up to whole lines of 16
    bytes. Otherwise the scales are a tensor of their own.
    """

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the rows of x travel, if x has `dtype`."""
        return self.element or dtype

    def takes(self, D: int) -> bool:
        """Whether a row of D elements is made of whole blocks."""
        return not self.block or D % self.block == 0

    def row_items(self, D: int, dtype: torch.dtype) -> int:
        """The length of a row of D elements, in items of the dtype in which it travels."""
        return self.row_bytes(D, dtype) // self.dtype_of(dtype).itemsize

    def row_bytes(self, D: int, dtype: torch.dtype) -> int:
        """Bytes of a row of D elements, if x has `dtype`. Scales count only if they are packed."""
        # `-(-a // b)` is a / b rounded up.
        bits = self.element_bits or 8 * dtype.itemsize
        element_bytes = -(-D * bits // 8)
        if not self.packed:
            return element_bytes
        return -(-(element_bytes + self.scale_bytes(D)) // LINE_BYTES) * LINE_BYTES

    def width(self, D: int, extra_bytes: int, dtype: torch.dtype) -> int:
        """The length of a row of D elements with `extra_bytes` behind them, in elements.

        If the format has scales, the row is filled up to whole blocks. `dtype` is that of x.
        """
        # Extra bytes fill whole lines, of which each holds `EXTRA_IN_LINE` of them.
        extra_lines = -(-extra_bytes // EXTRA_IN_LINE)
        items = extra_lines * LINE_BYTES // self.dtype_of(dtype).itemsize
        if not self.block:
            return D + items
        return -(-(D + items) // self.block) * self.block

    def num_scales(self, D: int) -> int:
        """How many scales a row of D elements has. The last block may have fewer elements."""
        return -(-D // self.block) if self.block else 0

    def scale_bytes(self, D: int) -> int:
        """Bytes of the scales of a row of D elements."""
        return self.num_scales(D) * self.scale.itemsize if self.scale else 0


_FORMATS = (
    WireFormat(name="auto", number=0, element=None, element_bits=0, scale=None, block=0),
    WireFormat(
        name="fp8",
        number=1,
        element=torch.float8_e4m3fn,
        element_bits=8,
        scale=torch.float32,
        block=SCALE_BLOCK,
    ),
    WireFormat(
        name="packed_fp8",
        number=2,
        element=torch.float8_e4m3fn,
        element_bits=8,
        scale=torch.float32,
        block=SCALE_BLOCK,
        packed=True,
    ),
)
WIRE_FORMATS = {each.name: each for each in _FORMATS}
"""The formats by their names."""

TRAINING_FORMATS = {"auto": WIRE_FORMATS["auto"], "fp8": WIRE_FORMATS["packed_fp8"]}
"""The formats of rounds of training, by the `payload` of a `TrainingExchange`."""


def format_of_rows(D: int, scales: int) -> WireFormat:
    """Find the format of rows that come with a tensor of scales.

    `D` is the number of elements and `scales` the number of scales of a row. Returns the format
    "fp8" if no format fits.
    """
    with_scales = [each for each in WIRE_FORMATS.values() if each.scale and not each.packed]
    for wire in with_scales:
        if wire.num_scales(D) == scales:
            return wire
    return with_scales[0]


def payload_of(element: torch.dtype, block: int) -> PayloadName | None:
    """The name of the payload whose rows arrive in the dtype `element`, with a scale for each
    `block` elements. None if there is no such payload.
    """
    name: PayloadName
    for name in get_args(PayloadName):
        if (WIRE_FORMATS[name].element, WIRE_FORMATS[name].block) == (element, block):
            return name
    return None
