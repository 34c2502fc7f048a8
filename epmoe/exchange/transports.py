"""The transports: how the ranks of a node reach one another's memory.

`exchange.transport` names a transport. To add one for a processor that exists already, write a
`Memory` and a `Window` in a file of its own, and add a row to `TRANSPORTS`.
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
    """One way in which ranks share windows."""

    device_type: str
    """The type of the devices whose kernels reach these windows, as `torch.device.type`."""
    memory: Callable[[torch.device], Memory]
    """Makes the memory for the windows and the scratch of a device."""
    window: Callable[[MemoryPlan, Peers, Seats, Addresses], Window]
    """Opens the windows of a group. Every rank calls it, in a step of `Peers.together`."""


TRANSPORTS = {
    "shared_memory": Transport(
        "cpu", lambda device: processor_of(device).memory(), SharedMemoryWindow.of
    ),
    "nvlink": Transport("cuda", lambda device: processor_of(device).memory(), NVLinkWindow.of),
}
"""The transports by their names in `exchange.transport`. The name "auto" stands for the first one
of the device's type.
"""


def device_of(config: EPConfig, device: torch.device | str | None) -> torch.device:
    """The device on which a rank computes. Without `device` it is one that fits the transport.

    Raises ValueError if the device does not fit the transport of the config, or does not exist.
    """
    name = config.exchange.transport
    if name == "auto":
        # Each type once, in the order of the table.
        device_types = list(dict.fromkeys(each.device_type for each in TRANSPORTS.values()))
    else:
        device_types = [TRANSPORTS[name].device_type]
    if device is None:
        device = device_types[0]
    wanted = _parsed(device)
    if wanted is None or wanted.type not in device_types:
        raise ValueError(
            f"`device` must be {' or '.join(device_types)} with exchange.transport={name!r}, got "
            f"{device}"
        )
    return PROCESSORS[wanted.type].named(config, wanted)


def transport_of(config: EPConfig, device: torch.device) -> Transport:
    """The transport of a group whose ranks compute on devices of this type."""
    name = config.exchange.transport
    if name != "auto":
        return TRANSPORTS[name]
    return next(each for each in TRANSPORTS.values() if each.device_type == device.type)


def addresses_of(config: EPConfig, device: torch.device) -> Addresses:
    """Make the object that keeps the addresses of windows and scratch, for an `ExpertParallel` on a
    device.
    """
    memory = transport_of(config, device).memory(device)
    return Addresses(memory, processor_of(device))


def _parsed(device: torch.device | str) -> torch.device | None:
    """The torch.device of a name, or None if torch does not know the name. Raises TypeError for a
    value that is neither a name nor a device.
    """
    try:
        return torch.device(device)
    except TypeError:
        raise TypeError(
            f"`device` must be a torch.device or its name, got {describe(device)}"
        ) from None
    except RuntimeError:
        return None
