"""Checks of the arguments of an `ExpertParallel`: that its config and its group are usable, and
that they fit each other.
"""

from __future__ import annotations

import os
import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from epmoe.config.config import EPConfig
from epmoe.config.placement import EP
from epmoe.group.peers import Peers
from epmoe.native.arguments import describe


def config_of(config: EPConfig | str | os.PathLike[str]) -> EPConfig:
    """Return the config, and load it first if it is given by a path or a name. Raises TypeError for
    any other argument, and ConfigError if the file is missing or wrong.
    """
    if isinstance(config, (str, os.PathLike)):
        return EPConfig.load(os.fspath(config))
    if not isinstance(config, EPConfig):
        hint = ": use EPConfig(**config)" if isinstance(config, dict) else ""
        raise TypeError(
            f"`config` must be an EPConfig or the path of its file, got {describe(config)}{hint}"
        )
    return config


def group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of the argument `group`. For a mesh it is the group of its last
    dimension, and for None it is the world. Without torch.distributed it is None: this process is
    alone. Raises TypeError or ValueError for any other argument.
    """
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names
        if not names or names[-1] != EP:
            raise ValueError(f"the last dimension of the mesh `group` must be {EP!r}, got {names}")
        # A process group numbers its ranks in ascending order, and a mesh numbers them by their
        # places. If the two orders differed, a rank would hold the experts of one number and would
        # be called by the other number.
        ranks = group.mesh
        if not bool((ranks.diff(dim=-1) > 0).all()):
            raise ValueError(
                f"the ranks of the mesh `group` must ascend along {EP!r}, as those of a process "
                f"group do, got {ranks.tolist()}"
            )
        return group.get_group(EP)
    if not isinstance(group, dist.ProcessGroup):
        # `new_group` returns this value to processes outside the group.
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this process is no member of `group`: only its members may make an ExpertParallel "
                "of it"
            )
        raise TypeError(
            f"`group` must be a process group of torch.distributed, got {describe(group)}"
        )
    return group


def check_backend(group: dist.ProcessGroup | None) -> None:
    """Raise ValueError for a group without a CPU backend, over which hosts exchange messages."""
    if group is not None and "cpu:" not in dist.get_backend_config(group):
        raise ValueError(
            f"`group` must have a CPU backend, got {dist.get_backend_config(group)!r}: use "
            "init_process_group('cpu:gloo,cuda:nccl')"
        )


def check_size(config: EPConfig, peers: Peers) -> None:
    """Raise ValueError unless the group has as many ranks as the config says.

    It warns if a launcher has started several ranks but torch.distributed is not initialised: each
    rank would then be a group of its own.
    """
    if config.topology.ep_size != peers.size:
        hint = ""
        if peers.group is None:
            hint = "; torch.distributed is not initialised, so the group is this process alone"
        raise ValueError(
            f"topology.ep_size must equal the size of the group, {peers.size}, got "
            f"{config.topology.ep_size}{hint}"
        )
    # A launcher may have started ranks that never joined a group.
    launched = os.environ.get("WORLD_SIZE", "1")
    if peers.group is None and launched != "1":
        warnings.warn(
            f"WORLD_SIZE is {launched}, but torch.distributed is not initialised: no experts are "
            "spread, since this process is a group of one. Call "
            "torch.distributed.init_process_group before, with topology.ep_size as large as the "
            "group",
            stacklevel=2,
        )
