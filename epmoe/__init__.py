"""Expert parallelism for Mixture-of-Experts models: tokens to the ranks of their experts, and back.

    logits [T,E] ─ route ─▶ ids,weights [T,K] ─ dispatch ─▶ rank-major rows [R,M,D] ─ permute ─▶ expert-major rows [N,D]
                                                                                                        │ experts
    y [T,D] ◀─ combine ── partial rows [R,M,D] ◀─ finalize ── expert-major outputs [N,D] ◀──────────────┘

T tokens on this rank, M the most it may bring, D hidden size, E logical and P physical experts, e those of one rank,
K experts per token, R ranks, N expert-major rows.
"""

from epmoe.config import ConfigError, EPConfig
from epmoe.handles import Dispatched, Sent
from epmoe.health import EPError, EPMismatchError, EPOverflowError, EPTimeoutError, Health
from epmoe.layer import MoELayer
from epmoe.memory import MemoryPlan
from epmoe.placement import Placement
from epmoe.service import ExpertParallel
from epmoe.simulate import simulate_routing
from epmoe.stages.experts import SwiGLUExperts
from epmoe.stages.finalize import finalize
from epmoe.stages.permute import Permuted, permute
from epmoe.stages.quantize import Quantized, quantize_fp8, zero_padding_rows_
from epmoe.stages.route import Routing, route

__all__ = [
    "ConfigError",
    "Dispatched",
    "EPConfig",
    "EPError",
    "EPMismatchError",
    "EPOverflowError",
    "EPTimeoutError",
    "ExpertParallel",
    "Health",
    "MemoryPlan",
    "MoELayer",
    "Permuted",
    "Placement",
    "Quantized",
    "Routing",
    "Sent",
    "SwiGLUExperts",
    "finalize",
    "permute",
    "quantize_fp8",
    "route",
    "simulate_routing",
    "zero_padding_rows_",
]
