"""Gathers complete tensors from the parts that ranks hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def whole_tensor(value: Any) -> Tensor:
    """Return the complete values of a tensor.

    A DTensor is gathered from all ranks of its mesh, so all of these ranks must call. Any other
    tensor is complete already and is returned as it is.

    With gloo, torch 2.11 to 2.14 would read the GPU memory of a DTensor as if it were CPU memory,
    and that ends the process (pytorch#152645). Where gloo carries the tensors of GPUs, the values
    are therefore gathered through a copy on the CPU.
    """
    if not hasattr(value, "full_tensor"):
        whole: Tensor = value
        return whole
    if value.device.type == "cuda" and _is_over_gloo(value):
        return _by_cpu(value)
    return value.full_tensor()


def _is_over_gloo(value: DTensor) -> bool:
    """Whether gloo, and not NCCL, carries GPU tensors in one of the groups of a DTensor's mesh."""
    groups = value.device_mesh.get_all_groups()
    return any("cuda:gloo" in dist.get_backend_config(group) for group in groups)


def _by_cpu(value: DTensor) -> Tensor:
    """Gather a DTensor on a GPU over gloo: copy to the CPU, gather there, and copy back."""
    from torch.distributed.tensor import DeviceMesh, DTensor

    mesh = value.device_mesh
    # A DTensor on the CPU needs a mesh of CPUs. It can use the process groups of the GPU mesh,
    # so that no rank has to make new groups.
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
