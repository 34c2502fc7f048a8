"""Predicts the µs of an exchange within a node.

Letters: T tokens a rank, K experts a token, G ranks, u the ranks that a token needs. Rows are those
of one way, on average. The model knows nothing of ranks that wait for one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from epmoe.bench.sample import ranks_needed, wire_bytes
from epmoe.config.config import EPConfig
from epmoe.local.reference import route_reference
from epmoe.local.simulate import simulate_logits

# At 1 GB/s.
_BYTES_PER_US = 1000
# Tokens from which `Spread.of` takes its mean: within 1%.
_ROUTED = 8192


@dataclass(frozen=True)
class Speeds:
    """Of a GPU, by default those fitted to rounds of two and four H200. 1 GB/s is 10⁹ bytes/s."""

    nvlink_gb_per_s: float = 340.0
    """GB/s of rows that a rank sends to the other ranks of its node."""
    local_gb_per_s: float = 2400.0
    """GB/s, bytes read plus bytes written, at which a rank moves rows between a window and the
    experts.
    """
    row_ns: float = 0.0
    """ns that such a row takes besides its bytes."""
    exchange_us: float = 4.2
    """µs of one way without rows."""


class Spread(NamedTuple):
    """Where a token goes, on average over tokens whose logits are all equally likely."""

    experts: int
    """K"""
    ranks: float
    """u: ranks that hold one of its experts; its own rank may be one of them"""

    @classmethod
    def of(cls, config: EPConfig) -> Self:
        """Route random logits, in the experts' groups and placement of `config`.

        Groups are scored as with a bias, by their two best experts: the models that have groups
        have one.
        """
        model = config.model
        routing = config.routing
        R = config.topology.ep_size
        K = model.num_experts_per_tok
        tokens = -(-_ROUTED // R)
        bias = None
        if routing.num_expert_groups > 1:
            bias = torch.zeros(model.num_experts)
        ids = route_reference(
            simulate_logits("uniform", R * tokens, model.num_experts),
            K,
            scoring=routing.scoring,
            bias=bias,
            num_expert_groups=routing.num_expert_groups,
            top_groups=routing.top_groups,
        ).ids
        # The ranks that a token needs, on average.
        needs_RTR = ranks_needed(config.place_experts(), ids.view(R, tokens, K).long())
        return cls(K, needs_RTR.sum(-1).double().mean().item())


class RowBytes(NamedTuple):
    """Bytes of a row of one way."""

    node: int
    """between the ranks of a node"""
    experts: int
    """expert-major"""

    @classmethod
    def of(cls, config: EPConfig) -> tuple[Self, Self]:
        """Rows of dispatch, of the payload. Rows of combine: the payload, and x's dtype where
        experts write them.
        """
        D = config.model.hidden_size
        dtype = config.model.torch_dtype
        out = wire_bytes(D, dtype, config.exchange.payload)
        plain = wire_bytes(D, dtype, "auto")
        back = wire_bytes(D, dtype, config.exchange.combine_payload)
        return cls(out, out), cls(back, plain)


@dataclass(frozen=True)
class NodeModel:
    """µs of one way. The bytes of its rows say whether it is dispatch or combine."""

    speeds: Speeds
    ranks: int
    """G"""
    spread: Spread

    def us(self, T: int, row: RowBytes) -> float:
        """The slower of the wire and of the rows that each GPU moves itself."""
        speeds = self.speeds
        spread = self.spread
        rows = T * spread.ranks * (self.ranks - 1) / self.ranks
        wire = rows * row.node / (speeds.nvlink_gb_per_s * _BYTES_PER_US)
        row_us = row.experts / (speeds.local_gb_per_s * _BYTES_PER_US) + speeds.row_ns / 1000
        return speeds.exchange_us + max(wire, T * (spread.experts + spread.ranks) * row_us)
