"""The plans of `epmoe.live.balance` under the name that users import."""

from epmoe.live.balance import ExpertMove, Plan, balance, fresh, shares_of

__all__ = ["ExpertMove", "Plan", "balance", "fresh", "shares_of"]
