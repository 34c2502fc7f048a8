"""The choice of a user of vLLM for epmoe, and its settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from vllm.config import get_current_vllm_config

from epmoe.config.config_file import ConfigError
from epmoe.config.placement import is_int
from epmoe.integrations.vllm.release import VARIABLE

VllmLayout = Literal["rank", "layer"]


@dataclass(frozen=True)
class Choice:
    """The settings of `--additional-config '{"epmoe": …}'`.

    Attributes:
        layout: what vLLM's experts get. "rank": each token once, with its ids and weights, for experts that sort and
            reduce by themselves (Triton). "layer": one row for each pair, expert by expert, for epmoe's own
            `GroupedExperts` in place of vLLM's experts.
        exchange: keys of the section `exchange` of `EPConfig`, above all `timeout_s`.
        live: with layout "layer", experts move: keys of `epmoe.Balancer` (`every`, `goal`, `max_moves`, `least_gain`),
            and of the section `placement`, above all `slots_per_rank`. None: experts stay where they are.
        metrics_port: each rank serves its metrics at this port plus its rank, for Prometheus; None: nowhere.
    """

    layout: VllmLayout = "rank"
    exchange: dict[str, Any] = field(default_factory=dict)
    live: dict[str, Any] | None = None
    metrics_port: int | None = None

    @classmethod
    def of(cls, value: object) -> Choice | None:
        """From `true`, the name of a layout, or a mapping with `layout`, `live`, `metrics_port` and keys of `exchange`;
        None: not chosen. Raises ConfigError where the attributes do not go together."""
        if value in (None, False, "", "0"):
            return None
        if value in (True, "1"):
            return cls()
        settings: dict[str, Any] = dict(value) if isinstance(value, dict) else {"layout": value}
        layout: VllmLayout = settings.pop("layout", "rank")
        if layout not in get_args(VllmLayout):
            raise ConfigError(f"`epmoe.layout` must be 'rank' or 'layer', got {layout!r}")
        live, port = settings.pop("live", None), settings.pop("metrics_port", None)
        if live is not None and not (isinstance(live, dict) and is_int(live.get("slots_per_rank"))):
            raise ConfigError(f"`epmoe.live` must be a mapping with an integer `slots_per_rank`, got {live!r}")
        if live is not None and layout != "layer":
            raise ConfigError(f'`epmoe.live` must come with `layout` "layer", whose experts can move, got {layout!r}')
        if port is not None and not (is_int(port) and 1 <= port < 2**16):
            raise ConfigError(f"`epmoe.metrics_port` must be a port, got {port!r}")
        return cls(layout, settings, live, port)


def chosen() -> Choice | None:
    """The choice of the model that vLLM is building; None if epmoe is not to be used."""
    additional = get_current_vllm_config().additional_config
    if isinstance(additional, dict) and "epmoe" in additional:
        return Choice.of(additional["epmoe"])
    return Choice.of(os.environ.get(VARIABLE))
