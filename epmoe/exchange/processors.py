"""The processor of each device. A device has one."""

from __future__ import annotations

from functools import cache

import torch

from epmoe.exchange.cpu import Cpu
from epmoe.exchange.gpu import Gpu
from epmoe.exchange.processor import Processor

PROCESSORS: dict[str, type[Processor]] = {"cpu": Cpu, "cuda": Gpu}
"""By the type of a device."""


@cache
def processor_of(device: torch.device) -> Processor:
    """The processor of a device, named as its tensors name it."""
    return PROCESSORS[device.type](device)
