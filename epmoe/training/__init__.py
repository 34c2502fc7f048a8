"""Training: exact gradients that have the same bits on every run, in one round a layer and
direction.
"""

from epmoe.training.exchange import Routed, TrainingExchange
from epmoe.training.lora import spread_adapters
from epmoe.training.models import clip_grad_norm_, fully_shard, ignore_experts, spread
from epmoe.training.route import route

__all__ = [
    "Routed",
    "TrainingExchange",
    "clip_grad_norm_",
    "fully_shard",
    "ignore_experts",
    "route",
    "spread",
    "spread_adapters",
]
