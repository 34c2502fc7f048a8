"""How the ranks of a node reach one another's memory. `exchange.transport` names it.

Another kind of memory, for a processor that there is, is a `Memory` and a `Window` in a file of its
own, and a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from epmoe.config.config import EPConfig
from epmoe.config.seats import Seats
from epmoe.exchange.addresses import Addresses
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.places import Memory
from epmoe.exchange.processors import PROCESSORS, processor_of
from epmoe.exchange.window import SharedMemoryWindow, Window
from epmoe.exchange.window_nvlink import NVLinkWindow
from epmoe.group.peers import Peers
from epmoe.native.arguments import describe


class Transport(NamedTuple):
    """A kind of windows."""

    device_type: str
    """of the devices whose kernels reach it"""
    memory: Callable[[torch.device], Memory]
    """of the windows and the scratch on a device"""
    window: Callable[[MemoryPlan, Peers, Seats, Addresses], Window]
    """Opens the windows of a group. Collective, in a step of `Peers.together`."""


TRANSPORTS = {
    "shared_memory": Transport(
        "cpu", lambda device: processor_of(device).memory(), SharedMemoryWindow.of
    ),
    "nvlink": Transport("cuda", lambda device: processor_of(device).memory(), NVLinkWindow.of),
}
"""By the name that `exchange.transport` gives; "auto" is the first one for the device."""


def device_of(config: EPConfig, device: torch.device | str | None) -> torch.device:
    """The device, by default the transport's. Raises ValueError if it does not fit the config or
    does not exist.
    """
    name = config.exchange.transport
    if name == "auto":
        fitting = list(dict.fromkeys(each.device_type for each in TRANSPORTS.values()))
    else:
        fitting = [TRANSPORTS[name].device_type]
    if device is None:
        device = fitting[0]
    wanted = _parsed(device)
    if wanted is None or wanted.type not in fitting:
        raise ValueError(
            f"`device` must be {' or '.join(fitting)} with exchange.transport={name!r}, got "
            f"{device}"
        )
    return PROCESSORS[wanted.type].named(config, wanted)


def transport_of(config: EPConfig, device: torch.device) -> Transport:
    """The transport of a group, whose ranks compute on such devices as this one."""
    name = config.exchange.transport
    if name != "auto":
        return TRANSPORTS[name]
    return next(each for each in TRANSPORTS.values() if each.device_type == device.type)


def addresses_of(config: EPConfig, device: torch.device) -> Addresses:
    """For the windows of an `ExpertParallel` on a device."""
    memory = transport_of(config, device).memory(device)
    return Addresses(memory, processor_of(device))


def _parsed(device: torch.device | str) -> torch.device | None:
    """None for a name that torch does not know. Raises TypeError for what is no name."""
    try:
        return torch.device(device)
    except TypeError:
        raise TypeError(
            f"`device` must be a torch.device or its name, got {describe(device)}"
        ) from None
    except RuntimeError:
        return None
