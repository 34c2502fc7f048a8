"""Finds the processor of a device. Each device has one processor object."""

from __future__ import annotations

from functools import cache

import torch

from epmoe.exchange.cpu import Cpu
from epmoe.exchange.gpu import Gpu
from epmoe.exchange.processor import Processor

PROCESSORS: dict[str, type[Processor]] = {"cpu": Cpu, "cuda": Gpu}
"""The class of the processor, by the type of the device."""


@cache
def processor_of(device: torch.device) -> Processor:
    """The processor of a device. The device has the name that its tensors have."""
    return PROCESSORS[device.type](device)
