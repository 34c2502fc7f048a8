"""Checks that the config and the processes of an `ExpertParallel` fit one another."""

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
    """Load the config, if it is given by path or name. Raises TypeError for anything else,
    ConfigError for a bad file.
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
    """The group, if it is given as a mesh or not at all: then it is the world. Raises TypeError or
    ValueError for anything else.
    """
    if group is None:
        # Without torch.distributed this process is alone.
        return dist.group.WORLD if dist.is_initialized() else None
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names
        if not names or names[-1] != EP:
            raise ValueError(f"the last dimension of the mesh `group` must be {EP!r}, got {names}")
        # A process group numbers its ranks in ascending order, a mesh by their places. Where these
        # differ, a rank would hold the experts of one number under the name of the other.
        ranks = group.mesh
        if not bool((ranks.diff(dim=-1) > 0).all()):
            raise ValueError(
                f"the ranks of the mesh `group` must ascend along {EP!r}, as those of a process "
                f"group do, got {ranks.tolist()}"
            )
        return group.get_group(EP)
    if not isinstance(group, dist.ProcessGroup):
        # `new_group` returns it to processes outside the group.
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
    """Raise ValueError for a group that cannot carry messages of hosts."""
    if group is not None and "cpu:" not in dist.get_backend_config(group):
        raise ValueError(
            f"`group` must have a CPU backend, got {dist.get_backend_config(group)!r}: use "
            "init_process_group('cpu:gloo,cuda:nccl')"
        )


def check_size(config: EPConfig, peers: Peers) -> None:
    """Raise ValueError unless the group has as many ranks as the config says.

    Warns where a launcher has started several ranks, of which each is a group of one without
    torch.distributed.
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
