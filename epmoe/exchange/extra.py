"""What else a token brings to a round: `extra` of a call of dispatch, bytes of any dtype behind the
elements of x.

    x | 12 bytes, a word of zeros | 12 bytes, a word of zeros | …

A row in a dtype with scales has whole blocks of them, of which those without elements of x have a
scale of 1. Where D is no multiple of a block, a row is longer in rounds without `extra`, too: it
brings `NOTHING`, which is zeros. Every stage copies the longer row as it is. The last word of a
line of 16 bytes stays zeros: the LL protocol does not carry all its values (docs/protocol.md, "LL
lines").
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.native import ops
from epmoe.native.arguments import aligned_rows, check_forward_only, contiguous_rows, describe
from epmoe.native.formats import EXTRA_IN_LINE, LINE_BYTES, WireFormat


class Extra(NamedTuple):
    """The dtype and shape of the extra bytes of one token."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, given: Tensor) -> Extra:
        return cls(given.dtype, given.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of a token, without the zeros."""
        return math.prod(self.shape) * self.dtype.itemsize

    def width(self, D: int, wire: WireFormat, dtype: torch.dtype) -> int:
        """Elements of the longer row, of an x [T, D] of `dtype`."""
        return wire.width(D, self.nbytes, dtype)

    def behind(
        self, x: Tensor, scales: Tensor | None, given: Tensor | Extra, wire: WireFormat
    ) -> tuple[Tensor, Tensor | None]:
        """Put the extra bytes behind the rows of a call. Returns the longer rows and their scales,
        quantized if `wire` has scales.

        Where `given` is no tensor, x and scales are the beginnings of rows that are longer already.
        """
        T, D = x.shape
        width = self.width(D, wire, x.dtype)
        blocks = wire.num_scales(width)
        # The bytes are there already, within the stride of a row.
        if not isinstance(given, Tensor):
            x = x.as_strided((T, width), x.stride())
            if scales is not None:
                scales = scales.as_strided((T, blocks), scales.stride())
            return x, scales

        # The row as it travels, since its bytes lie behind that.
        if wire.scale and scales is None:
            x, scales = ops.quantize_fp8(contiguous_rows(x), None, T, wire.block)
        if scales is not None:
            scales = F.pad(scales, (0, blocks - wire.num_scales(D)), value=1.0)

        # Fill complete lines behind the row. The protocol leaves `EXTRA_IN_LINE` bytes of each.
        lines = (width - D) * x.itemsize // LINE_BYTES
        tokens = given.reshape(T, math.prod(self.shape)).contiguous().view(torch.uint8)
        padded = F.pad(tokens, (0, lines * EXTRA_IN_LINE - self.nbytes))
        in_lines = padded.view(T, lines, EXTRA_IN_LINE)
        tail = F.pad(in_lines, (0, LINE_BYTES - EXTRA_IN_LINE)).view(T, lines * LINE_BYTES)

        # Copy bits, in as few elements as possible.
        rows = torch.cat([part.view(torch.int64) for part in (aligned_rows(x), tail)], 1)
        return rows.view(x.dtype), scales

    def read(self, rows: Tensor, D: int) -> Tensor:
        """[…, *shape] of longer rows […, width]: a view up to 12 bytes a token, else a copy."""
        tail = rows[..., D:].view(torch.uint8)
        if self.nbytes > EXTRA_IN_LINE:
            # Several lines: what lies between them falls out in a copy.
            in_lines = tail.unflatten(-1, (-1, LINE_BYTES))[..., :EXTRA_IN_LINE]
            tail = in_lines.flatten(-2)[..., : self.nbytes].contiguous()
        return tail[..., : self.nbytes].view(self.dtype).view(*rows.shape[:-1], *self.shape)


NOTHING = Extra(torch.uint8, (0,))
"""What tokens bring in rounds without `extra` in which rows need whole blocks."""


def check_extra(given: object, T: int, device: torch.device, most_bytes: int) -> None:
    """Raise TypeError, ValueError or RuntimeError unless a value can be the `extra` of T tokens."""
    if not isinstance(given, Tensor):
        raise TypeError(f"`extra` must be a tensor [{T}, …], got {describe(given)}")
    if given.dim() < 1 or given.shape[0] != T:
        raise ValueError(f"`extra` must be [{T}, …], a row for each token, got {describe(given)}")
    if given.device != device:
        raise ValueError(f"`extra` must be on {device}, got {given.device}")
    nbytes = Extra.of(given).nbytes
    if not 1 <= nbytes <= most_bytes:
        raise ValueError(
            f"`extra` must have from 1 to {most_bytes} bytes a token, as `capacity.extra_bytes` "
            f"says, got {nbytes}: {describe(given)}"
        )
    check_forward_only(given)
