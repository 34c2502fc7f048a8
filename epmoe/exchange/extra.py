"""Extra bytes that a token brings to a round: the argument `extra` of dispatch.

The extra bytes travel behind the elements of the token's row of x, and every stage copies the
longer row as it is:

    x | 12 bytes, a word of zeros | 12 bytes, a word of zeros | …

Each line of 16 bytes holds 12 extra bytes. Its last word stays 0, since the LL protocol cannot
carry every value in that word (docs/protocol.md, "LL lines").

Rows that are quantized have whole blocks of elements, with one scale a block. A block that holds
only extra bytes has a scale of 1. If the hidden size D is no multiple of a block, rows also travel
with zeros up to whole blocks in rounds without `extra`. Dispatch adds them, and x stays as it is.
In the code such a row brings `NOTHING`.
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
        """Bytes that a token brings, without the words of zeros between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    def width(self, D: int, wire: WireFormat, dtype: torch.dtype) -> int:
        """Elements of the longer row, where x has D elements of `dtype` in a row."""
        return wire.width(D, self.nbytes, dtype)

    def behind(
        self, x: Tensor, scales: Tensor | None, given: Tensor | Extra, wire: WireFormat
    ) -> tuple[Tensor, Tensor | None]:
        """Put the extra bytes of each token behind its row of x.

        Args:
            x: rows [T, D].
            scales: the scales of rows that are quantized already, otherwise None.
            given: the extra bytes, a tensor [T, …]. An `Extra` in place of a tensor says that the
                bytes lie in memory behind each row of x already, and that x and `scales` only view
                the beginnings of longer rows.
            wire: the format in which rows travel.

        Returns:
            The longer rows and their scales. If the format has scales, rows are quantized here.
        """
        T, D = x.shape
        width = self.width(D, wire, x.dtype)
        blocks = wire.num_scales(width)
        # The bytes are there already: view each row with them, within its stride.
        if not isinstance(given, Tensor):
            x = x.as_strided((T, width), x.stride())
            if scales is not None:
                scales = scales.as_strided((T, blocks), scales.stride())
            return x, scales

        # Quantize first: extra bytes lie behind the row in its quantized form.
        if wire.scale and scales is None:
            x, scales = ops.quantize_fp8(contiguous_rows(x), None, T, wire.block)
        if scales is not None:
            scales = F.pad(scales, (0, blocks - wire.num_scales(D)), value=1.0)

        # Spread the bytes over complete lines, of which each holds `EXTRA_IN_LINE` bytes.
        lines = (width - D) * x.itemsize // LINE_BYTES
        tokens = given.reshape(T, math.prod(self.shape)).contiguous().view(torch.uint8)
        padded = F.pad(tokens, (0, lines * EXTRA_IN_LINE - self.nbytes))
        in_lines = padded.view(T, lines, EXTRA_IN_LINE)
        tail = F.pad(in_lines, (0, LINE_BYTES - EXTRA_IN_LINE)).view(T, lines * LINE_BYTES)

        # Join both as int64: the bits stay as they are, and the copy has few elements.
        rows = torch.cat([part.view(torch.int64) for part in (aligned_rows(x), tail)], 1)
        return rows.view(x.dtype), scales

    def read(self, rows: Tensor, D: int) -> Tensor:
        """Read the extra bytes of longer rows […, width], as […, *shape] of `dtype`.

        The result is a view if a token has up to 12 bytes, and a copy otherwise.
        """
        tail = rows[..., D:].view(torch.uint8)
        if self.nbytes > EXTRA_IN_LINE:
            # Several lines: a copy leaves out the words of zeros between them.
            in_lines = tail.unflatten(-1, (-1, LINE_BYTES))[..., :EXTRA_IN_LINE]
            tail = in_lines.flatten(-2)[..., : self.nbytes].contiguous()
        return tail[..., : self.nbytes].view(self.dtype).view(*rows.shape[:-1], *self.shape)


NOTHING = Extra(torch.uint8, (0,))
"""No extra bytes. It stands for rows that dispatch fills up to whole blocks."""


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
