"""Expert parallelism for Mixture-of-Experts models: tokens to the ranks of their experts, and back.

    logits [T,E] ─ route ─▶ ids, weights [T,K]
                                 │ dispatch
                                 ▼
                            rank-major rows [R,M,D] ─ permute ─▶ expert-major rows [N,D]
                                                                      │ experts
                                                                      ▼
                            partial rows [R,M,D] ◀─ finalize ─ expert-major outputs [N,D]
                                 │ combine
                                 ▼
                            y [T,D]

T: tokens on this rank. M: most tokens a rank may bring to a round. D: hidden size.
K: experts per token. E: logical experts. P: physical experts. e: physical experts of this rank.
R: ranks. N: expert-major rows.
"""

import os as _os
import warnings as _warnings

import torch as _torch

from epmoe.balance import balance
from epmoe.checkpoint.safetensors_folder import SafetensorsFolder
from epmoe.config.config import ConfigError, EPConfig
from epmoe.config.placement import Move, Placement
from epmoe.exchange.handles import Dispatched, RoundShape, Sent
from epmoe.exchange.health import Health
from epmoe.exchange.memory import MemoryPlan
from epmoe.group.errors import (
    EPAbortedError,
    EPError,
    EPMismatchError,
    EPOpenError,
    EPOrderError,
    EPOverflowError,
    EPRefusedError,
    EPResumeError,
    EPStateError,
    EPTimeoutError,
)
from epmoe.group.recovery import recover
from epmoe.group.store import folder_store
from epmoe.layer import MoELayer
from epmoe.live.balancer import Balancer
from epmoe.live.receiver import WeightReceiver
from epmoe.live.sleeping import SleepingWeights
from epmoe.live.versions import WeightSender
from epmoe.local.adapters import ExpertAdapters, LoRA
from epmoe.local.contexts import adapters_of, replay
from epmoe.local.experts import GroupedExperts
from epmoe.local.finalize import finalize
from epmoe.local.permute import Permuted, permute
from epmoe.local.quantize import Quantized, quantize_fp8, zero_padding_rows_
from epmoe.local.recording import Routes, recording
from epmoe.local.records import pack_routes, pad_routes
from epmoe.local.route import Routing, route
from epmoe.local.simulate import simulate_routing
from epmoe.native import opaque as opaque
from epmoe.native.build import problem_with_torch as _problem_with_torch
from epmoe.native.package import __version__ as __version__
from epmoe.resizing import join_group, resize
from epmoe.service import ExpertParallel

__all__ = [
    "Balancer",
    "ConfigError",
    "Dispatched",
    "EPConfig",
    "EPAbortedError",
    "EPError",
    "EPMismatchError",
    "EPOpenError",
    "EPOrderError",
    "EPOverflowError",
    "EPRefusedError",
    "EPResumeError",
    "EPStateError",
    "EPTimeoutError",
    "ExpertAdapters",
    "ExpertParallel",
    "GroupedExperts",
    "Health",
    "LoRA",
    "MemoryPlan",
    "MoELayer",
    "Move",
    "Permuted",
    "Placement",
    "Quantized",
    "RoundShape",
    "Routes",
    "Routing",
    "SafetensorsFolder",
    "Sent",
    "SleepingWeights",
    "WeightReceiver",
    "WeightSender",
    "adapters_of",
    "balance",
    "finalize",
    "folder_store",
    "join_group",
    "pack_routes",
    "pad_routes",
    "permute",
    "quantize_fp8",
    "recording",
    "recover",
    "replay",
    "resize",
    "route",
    "simulate_routing",
    "zero_padding_rows_",
]

_problem = _problem_with_torch(_torch.__version__)
if _problem and not _os.environ.get("EPMOE_UNTRIED_TORCH"):
    _warnings.warn(f"{_problem} (EPMOE_UNTRIED_TORCH=1 silences this)", stacklevel=2)
