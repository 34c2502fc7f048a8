"""Tensors that begin at any address, as views of longer ones do."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor) -> Tensor:
    """A copy that begins one element behind a multiple of 16 bytes."""
    size = tensor.element_size()
    longer = torch.empty(size + tensor.numel() * size, dtype=torch.uint8, device=tensor.device)
    copy = longer[size:].view(tensor.dtype).view(tensor.shape)
    copy.view(torch.uint8).copy_(tensor.detach().contiguous().view(torch.uint8))
    assert copy.data_ptr() % 16 == size % 16
    return copy
