"""The settings of a user of transformers, and the exchanges that the layers of models share by
them.
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
    """The arguments of `configure`."""

    group: dist.ProcessGroup | None = None
    static: bool = False
    clock: Callable[[], float] = time.perf_counter
    keys: dict[str, Any] = field(default_factory=dict)

    def config(
        self, num_experts: int, top_k: int, hidden_size: int, dtype: torch.dtype, ep_size: int
    ) -> EPConfig:
        """The configuration of layers with these shapes. Raises ConfigError for a wrong key."""
        sections: dict[str, dict[str, Any]] = {"exchange": {}, "topology": {}, "capacity": {}}
        for key, value in self.keys.items():
            sections[_section_of(key)][key] = value
        return make_config(num_experts, top_k, hidden_size, dtype, ep_size, sections)


def _section_of(key: str) -> str:
    """The section of `EPConfig` that has a key of `configure`, or refuses it."""
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
            longer batch is a ValueError before anything is sent. Then ranks agree on nothing and
            the host waits for no kernel, so that a forward pass can be compiled and captured into a
            CUDA graph. The first pass, which makes the windows, must be neither. False is the
            default.
        clock: gives seconds, for `SharedExpertParallel.seconds`; `time.perf_counter` by default.
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
        group or _settings.group,
        static,
        clock or _settings.clock,
        keys={**_settings.keys, **settings},
    )
    # Wrong keys and values raise here, before anything is closed.
    changed.config(1, 1, 128, torch.float32, 1)
    close()
    _settings = changed


def close() -> None:
    """Release every `ExpertParallel` made here; a later call makes new ones.

    Compiled models notice. CUDA graphs that were captured by hand must not be replayed any more.
    """
    release_graphs()
    _session.close()


def poll() -> None:
    """`ExpertParallel.poll` of every `ExpertParallel` in use: raises what kernels have reported so
    far, never waits.

    A replay of a CUDA graph is no call and raises nothing, so poll once in each step, as a
    `BaseStreamer` of transformers' generate can.
    """
    _session.poll()


def shared() -> tuple[SharedExpertParallel, ...]:
    """Every `SharedExpertParallel` in use, oldest first."""
    return _session.entries()


def share(
    x_TD: Tensor, ids_TK: Tensor, num_experts: int, group: dist.ProcessGroup | None = None
) -> SharedExpertParallel:
    """Find the `SharedExpertParallel` of these shapes and this group, by default that of
    `configure`: `Session.share`.
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
