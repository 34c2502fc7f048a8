"""Fixtures of every test: the device, one at a time; what runs on CUDA is marked `gpu` and says why it is skipped."""

from __future__ import annotations

import pytest
import torch
from helpers import NO_CUDA

torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
