"""The choice of a user of vLLM for epmoe, and its settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from vllm import envs
from vllm.config import get_current_vllm_config

from epmoe.config.config_file import ConfigError
from epmoe.config.placement import is_int
from epmoe.integrations.vllm.release import VARIABLE

VllmLayout = Literal["rank", "layer"]


@dataclass(frozen=True)
class Choice:
    """The settings of `--additional-config '{"epmoe": …}'`.

    Attributes:
        layout: what vLLM's experts get. "rank": each token once, with its ids and weights, for
            experts that sort and reduce by themselves (Triton). "layer": one row for each pair,
            expert by expert, for epmoe's own `GroupedExperts` in place of vLLM's experts.
        exchange: keys of the section `exchange` of `EPConfig`, above all `timeout_s`.
        live: with layout "layer", experts move: keys of `epmoe.Balancer` (`every`, `goal`,
            `max_moves`, `least_gain`), and of the section `placement`, above all `slots_per_rank`.
            None: experts stay where they are.
        metrics_port: each rank serves its metrics at this port plus its rank, for Prometheus; None:
            nowhere.
        max_num_tokens_per_rank: most tokens of a rank in a round; longer steps take several. None:
            a step is one round.
        batch_invariant: the bits of y of a token depend on no other token. By default as
            VLLM_BATCH_INVARIANT says.
    """

    layout: VllmLayout = "rank"
    exchange: dict[str, Any] = field(default_factory=dict)
    live: dict[str, Any] | None = None
    metrics_port: int | None = None
    max_num_tokens_per_rank: int | None = None
    batch_invariant: bool = False

    @classmethod
    def of(cls, value: object) -> Choice | None:
        """Read the settings: `true`, the name of a layout, or a mapping with the attributes and
        keys of `exchange`; None: not chosen.

        Raises ConfigError for a wrong value, and where the attributes do not go together.
        """
        if value in (None, False, "", "0"):
            return None
        if value in (True, "1"):
            value = {}
        settings: dict[str, Any] = dict(value) if isinstance(value, dict) else {"layout": value}
        # The attributes, each checked; what is left are keys of `exchange`.
        own: dict[str, Any] = {"batch_invariant": envs.VLLM_BATCH_INVARIANT}
        for key, (takes, must_be) in _ATTRIBUTES.items():
            value_of_key = settings.pop(key, None)
            if value_of_key is None:
                continue
            if not takes(value_of_key):
                raise ConfigError(f"`epmoe.{key}` must be {must_be}, got {value_of_key!r}")
            own[key] = value_of_key
        choice = cls(exchange=settings, **own)
        # What does not go together.
        if choice.live is not None and choice.layout != "layer":
            raise ConfigError(
                '`epmoe.live` must come with `layout` "layer", whose experts can move, got '
                f"{choice.layout!r}"
            )
        if choice.live is not None and choice.batch_invariant:
            raise ConfigError(
                "`epmoe.live` must be left out with batch invariance: sums change where experts "
                "move"
            )
        return choice


_ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "layout": (get_args(VllmLayout).__contains__, "'rank' or 'layer'"),
    "live": (
        lambda live: isinstance(live, dict) and is_int(live.get("slots_per_rank")),
        "a mapping with an integer `slots_per_rank`",
    ),
    "metrics_port": (lambda port: is_int(port) and 1 <= port < 2**16, "a port"),
    "max_num_tokens_per_rank": (
        lambda tokens: is_int(tokens) and tokens >= 1,
        "a positive integer",
    ),
    "batch_invariant": (lambda value: isinstance(value, bool), "true or false"),
}


def chosen() -> Choice | None:
    """The choice of the model that vLLM is building; None if epmoe is not to be used."""
    additional = get_current_vllm_config().additional_config
    if isinstance(additional, dict) and "epmoe" in additional:
        return Choice.of(additional["epmoe"])
    return Choice.of(os.environ.get(VARIABLE))
