"""Checks weights that arrive for NaN and Inf, which would spread to every token."""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.native.arguments import FLOATS


class NotFiniteError(ValueError):
    """A version has NaN or Inf in this rank's experts or in its dense weights."""


def nonfinite_rows(values: Tensor, dtype: torch.dtype) -> list[int]:
    """Find rows that would have a NaN or an Inf once they are in `dtype`. Returns their indices.

    `values` is [rows, …]. It makes no copy of `values`, except for dtypes that torch cannot
    compare. On a GPU it waits for the current stream.
    """
    if not values.numel() or not (values.is_floating_point() or values.is_complex()):
        return []
    if values.is_complex():
        values = torch.view_as_real(values)
    # torch has no `aminmax` for fp8.
    if values.dtype not in (*FLOATS, torch.float64):
        values = values.float()
    # The least and the largest value of each row tell it all: if a row has a NaN, both are NaN.
    rows = values.reshape(len(values), -1)
    extremes = torch.stack(torch.aminmax(rows, dim=1))
    is_bad = ~extremes.to(dtype).isfinite()
    return is_bad.any(0).nonzero().flatten().tolist()
