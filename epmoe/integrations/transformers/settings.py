"""Keeps the settings that a user of transformers has made by `configure`, and the exchanges that
the layers of models share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.config.config import ConfigError, EPConfig, ExchangeConfig
from epmoe.integrations.batches import SharedExpertParallel
from epmoe.integrations.session import Session, make_config
from epmoe.integrations.transformers.graphs import release_graphs


@dataclass(frozen=True)
class Settings:
    """The arguments of all calls of `configure` so far."""

    group: dist.ProcessGroup | None = None
    static: bool = False
    clock: Callable[[], float] = time.perf_counter
    keys: dict[str, Any] = field(default_factory=dict)
    """keys of `EPConfig` and their values, without their sections"""

    def config(
        self, num_experts: int, top_k: int, hidden_size: int, dtype: torch.dtype, ep_size: int
    ) -> EPConfig:
        """The configuration of layers with these shapes. Raises ConfigError for a wrong key."""
        sections: dict[str, dict[str, Any]] = {"exchange": {}, "topology": {}, "capacity": {}}
        for key, value in self.keys.items():
            sections[_section_of(key)][key] = value
        return make_config(num_experts, top_k, hidden_size, dtype, ep_size, sections)


def _section_of(key: str) -> str:
    """The section of `EPConfig` to which a key of `configure` belongs. An unknown key goes to
    `capacity`, which refuses it by name.
    """
    if key in ExchangeConfig.model_fields:
        return "exchange"
    if key == "ranks_per_node":
        return "topology"
    return "capacity"


_settings = Settings()
_session: Session[SharedExpertParallel] = Session()


def configure(
    *,
    group: dist.ProcessGroup | None = None,
    static: bool | None = None,
    clock: Callable[[], float] | None = None,
    **settings: Any,
) -> None:
    """Change the settings of later calls. Call it on every rank with the same arguments, between
    forward passes.

    Settings that a call leaves out keep their values. Every `ExpertParallel` in use is closed; the
    next forward pass makes new ones.

    Args:
        group: the expert-parallel group of layers whose framework names no group; the world by
            default.
        static: with True, a rank brings at most `max_num_tokens_per_rank` tokens to a call, and a
            longer batch is a ValueError before anything is sent. The ranks then need not agree on
            the number of rounds, and the host waits for no kernel, so that a forward pass can be
            compiled and captured into a CUDA graph. The first pass makes the windows, and must be
            neither compiled nor captured. False is the default.
        clock: a function that returns seconds, for `SharedExpertParallel.seconds`;
            `time.perf_counter` by default.
        settings: keys of the `capacity` and `exchange` sections of `EPConfig`, above all
            `max_num_tokens_per_rank` (longer batches take several rounds, unless `static`) and
            `timeout_s`; and `ranks_per_node` of `topology`, where the group spans machines.

    Raises:
        ConfigError: a key or its value is wrong; the message names the key.
    """
    global _settings
    if static is not None and not isinstance(static, bool):
        raise ConfigError(f"`static` must be True or False, got {static!r}")
    if static is None:
        static = _settings.static
    changed = Settings(
        group=group or _settings.group,
        static=static,
        clock=clock or _settings.clock,
        keys={**_settings.keys, **settings},
    )
    # Wrong keys and values raise here, before anything is closed. The shapes of the layers are not
    # known yet, so the smallest ones stand in for them.
    changed.config(num_experts=1, top_k=1, hidden_size=128, dtype=torch.float32, ep_size=1)
    close()
    _settings = changed


def close() -> None:
    """Release every `ExpertParallel` that layers share; their next calls make new ones.

    Compiled models go on with the new ones. CUDA graphs that the user has captured must not be
    replayed any more.
    """
    release_graphs()
    _session.close()


def poll() -> None:
    """Raise what kernels have reported so far, by `ExpertParallel.poll` of every `ExpertParallel`
    in use. It never waits.

    A replay of a CUDA graph raises nothing by itself. Whoever replays graphs calls `poll` once in
    each step, for example from a `BaseStreamer` of transformers' `generate`.
    """
    _session.poll()


def shared() -> tuple[SharedExpertParallel, ...]:
    """Every `SharedExpertParallel` in use, oldest first."""
    return _session.entries()


def share(
    x_TD: Tensor, ids_TK: Tensor, num_experts: int, group: dist.ProcessGroup | None = None
) -> SharedExpertParallel:
    """Find the `SharedExpertParallel` for layers with these shapes, by `Session.share`.

    x_TD holds T tokens of D values, and ids_TK the K experts of each token. `group` is by default
    the group of `configure`. The first call for certain shapes is collective.
    """
    settings = _settings
    group = group or _settings.group
    device = x_TD.device
    shapes = (num_experts, ids_TK.shape[1], x_TD.shape[1], x_TD.dtype)

    def make(ep_size: int) -> SharedExpertParallel:
        return SharedExpertParallel(
            settings.config(*shapes, ep_size), group, device, settings.static, settings.clock
        )

    return _session.share(shapes, group, device, make)
