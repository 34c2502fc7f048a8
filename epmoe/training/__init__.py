"""Training: exact gradients that have the same bits on every run, in one round a layer and direction."""

from epmoe.training.exchange import Exchange, Routed
from epmoe.training.experts import GroupedExperts
from epmoe.training.layer import MoELayer
from epmoe.training.route import route

__all__ = ["Exchange", "GroupedExperts", "MoELayer", "Routed", "route"]
