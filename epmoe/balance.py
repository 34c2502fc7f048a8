"""The plans of `epmoe.live.balance` under the name that users import."""

from epmoe.live.balance import Choices, ExpertMove, Plan, balance, choices, fresh, shares_of

__all__ = ["Choices", "ExpertMove", "Plan", "balance", "choices", "fresh", "shares_of"]
