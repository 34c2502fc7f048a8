"""The `hardware` section of a configuration: the constants of `NetworkModel` (epmoe/cli/prediction.py)."""

from __future__ import annotations

from pydantic import Field

from epmoe.config.strict import Strict


class HardwareConfig(Strict):
    """Speeds and latencies for `epmoe plan --predict`, by default those of H200s with a 400 Gb/s network card each.

    Nothing else reads them. 1 GB/s is 10⁹ bytes a second.
    """

    network_gb_per_s: float = Field(default=44.5, gt=0)
    """GB/s of rows that a rank sends to other nodes, and receives from them at the same time."""
    nvlink_gb_per_s: float = Field(default=340.0, gt=0)
    """GB/s of rows that a rank sends to the other ranks of its node."""
    local_gb_per_s: float = Field(default=2400.0, gt=0)
    """GB/s, bytes read plus bytes written, at which a rank moves rows between a window and the experts."""
    exchange_us: float = Field(default=4.2, ge=0)
    """µs of one way of the node's exchange without rows."""
    launch_us: float = Field(default=4.0, ge=0)
    """µs to start the collective of the network."""
    collective_us: float = Field(default=20.0, ge=0)
    """µs of a collective without rows, between two nodes."""
    peer_us: float = Field(default=1.5, ge=0)
    """µs that each node beyond the own one adds to a collective."""
    counts_us: float = Field(default=60.0, ge=0)
    """µs until the host has read how many rows come, with `exchange.network_splits: exact`."""
    put_us: float = Field(default=30.0, ge=0)
    """µs of one way without rows, where a kernel writes to other nodes itself: the two designs to compare with."""
    chunks: int = Field(default=8, ge=1)
    """Chunks of a call that the pipelined design has under way one after another."""
