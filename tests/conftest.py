"""The `device` fixture: a test runs on the CPU and on CUDA. CUDA cases have the mark `gpu` and a skip reason."""

from __future__ import annotations

import pytest
import torch
from helpers import NO_CUDA

torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
