"""Whether weights that arrive are numbers: NaN and Inf would reach every token."""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.native.arguments import FLOATS


class NotFiniteError(ValueError):
    """A version has NaN or Inf in this rank's experts or in its dense weights."""


def nonfinite_rows(values: Tensor, dtype: torch.dtype) -> list[int]:
    """Numbers of the rows [n, …] that have a NaN, or an Inf once they are in this dtype.

    It takes no memory beside them. On a GPU it waits for the stream.
    """
    if not values.numel() or not (values.is_floating_point() or values.is_complex()):
        return []
    if values.is_complex():
        values = torch.view_as_real(values)
    # fp8, which has no order in torch.
    if values.dtype not in (*FLOATS, torch.float64):
        values = values.float()
    ends = torch.stack(torch.aminmax(values.reshape(len(values), -1), dim=1))  # NaN is both
    return (~ends.to(dtype).isfinite()).any(0).nonzero().flatten().tolist()
