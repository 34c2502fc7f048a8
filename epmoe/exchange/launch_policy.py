"""The launch policy: which variant of the dispatch and combine kernels a call on a GPU takes, with
how many blocks and threads.

The policy itself is written in ``csrc/launch_policy.h``. This module asks the native library for
its decision and gives names to the numbers that come back. It needs no GPU. ``docs/kernels.md``
explains the variants.
"""

from __future__ import annotations

from ctypes import sizeof
from types import SimpleNamespace

import torch
from torch import Tensor

from epmoe.exchange.memory import MemoryPlan
from epmoe.native import ops
from epmoe.native.layouts import struct

# The properties of an H200 on which the policy depends.
H200_MULTIPROCESSORS = 132
# The major number of the compute capability.
H200_MAJOR = 9
# Shared memory of one multiprocessor.
H200_SHARED_BYTES = 228 << 10


class KernelLaunch(SimpleNamespace):
    """One launch of dispatch or combine.

    It has the fields of the struct `DispatchLaunch` or `CombineLaunch`, which csrc/launch_policy.h
    explains. In addition it has `send_lines` and `recv_lines`: how many lines of 16 bytes a sending
    and a receiving lane of a warp move at once. Both are 0 in the Simple protocol.
    """

    @property
    def protocol(self) -> str:
        return "LL" if self.recv_lines else "Simple"


def launches(
    plan: MemoryPlan,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    expert_major: bool = True,
    send: bool = True,
    receive: bool = True,
    multiprocessors: int = H200_MULTIPROCESSORS,
    major: int = H200_MAJOR,
    shared_bytes: int = H200_SHARED_BYTES,
) -> tuple[KernelLaunch, KernelLaunch]:
    """Ask the policy for the launches of one round.

    The hidden size and the experts per token are those of the plan.

    Args:
        plan: the memory plan of a rank on GPUs, `MemoryPlan.build(..., nvlink=True)`.
        tokens: how many rows x has on this rank.
        dtype: the dtype of x, or fp8 with an fp8 payload.
        expert_major: whether the layout of the round is "expert".
        send: whether the launch runs the send phase.
        receive: whether the launch runs the receive phase.
        multiprocessors: how many multiprocessors the GPU has.
        major: the major number of the GPU's compute capability.
        shared_bytes: bytes of shared memory of one multiprocessor.

    Returns:
        The launch of dispatch, and the launch of combine.
    """
    sizes = plan.sizes
    call = (tokens, sizes["D"], sizes["K"], ops.DTYPES.index(dtype), expert_major, send, receive)
    gpu = (multiprocessors, major, shared_bytes)
    # The library returns the bytes of both structs, one behind the other.
    policy = memoryview(ops.launch_policy(_as_tensor(plan), *call, *gpu).numpy())
    of_combine = policy[sizeof(struct("DispatchLaunch")) :]
    dispatch = _launch("DispatchLaunch", policy, "recv_lines", "send_lines")
    combine = _launch("CombineLaunch", of_combine, "send_lines", "recv_lines")
    return dispatch, combine


def _launch(name: str, policy: memoryview, coarse: str, derived: str) -> KernelLaunch:
    """Read the struct of this name at the start of `policy`.

    The struct has the number of lines for one side only, in the field `coarse` ("send_lines" or
    "recv_lines"). The number for the other side, `derived`, follows from it: the same in a coarse
    launch, and otherwise at most one line.
    """
    # Fields whose names begin with "_" are padding.
    read = struct(name).from_buffer_copy(policy)
    names = [field[0] for field in read._fields_]
    fields = {name: getattr(read, name) for name in names if not name.startswith("_")}
    lines = fields[coarse]
    if not fields["coarse"]:
        lines = min(lines, 1)
    fields[derived] = lines
    return KernelLaunch(**fields)


def shared_bytes_needed(plan: MemoryPlan) -> int:
    """The bytes of shared memory that a block of any kernel of the exchange needs at most."""
    needed: int = ops.shared_bytes_needed(_as_tensor(plan))
    return needed


def _as_tensor(plan: MemoryPlan) -> Tensor:
    """The plan as the operators take it: int64 on the host."""
    return torch.tensor(plan.as_ints(), dtype=torch.int64, device="cpu")
