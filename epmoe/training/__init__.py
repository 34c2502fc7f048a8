"""Training: exact gradients that have the same bits on every run, in one round a layer and direction."""

from epmoe.training.exchange import Exchange, Routed

__all__ = ["Exchange", "Routed"]
