"""Makes complete tensors from the parts that ranks have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def whole_tensor(value: Any) -> Tensor:
    """A DTensor's values on all ranks of its mesh, which is a collective; any other tensor as it
    is.

    gloo of torch 2.11 to 2.14 reads the GPU's memory of a DTensor as if it were the CPU's, which
    ends the process (pytorch#152645). So without NCCL the values go by the CPU.
    """
    if not hasattr(value, "full_tensor"):
        whole: Tensor = value
        return whole
    if value.device.type == "cuda" and _is_over_gloo(value):
        return _by_cpu(value)
    return value.full_tensor()


def _is_over_gloo(value: DTensor) -> bool:
    """Whether gloo carries GPU tensors in a group of a DTensor's mesh."""
    groups = value.device_mesh.get_all_groups()
    return any("cuda:gloo" in dist.get_backend_config(group) for group in groups)


def _by_cpu(value: DTensor) -> Tensor:
    """Gather a DTensor on a GPU over gloo, by a copy on the CPU."""
    from torch.distributed.tensor import DeviceMesh, DTensor

    mesh = value.device_mesh
    # Make a mesh of CPUs over the same groups.
    groups = mesh.get_all_groups()
    if len(groups) == 1:
        mesh_of_cpus = DeviceMesh.from_group(groups[0], "cpu")
    else:
        names = mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(mesh.ndim))
        mesh_of_cpus = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
    on_cpu = DTensor.from_local(
        value.to_local().cpu(),
        mesh_of_cpus,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return on_cpu.full_tensor().to(value.device)
