"""The launch policy: which variant of the dispatch and combine kernels a call takes on a GPU, and
its launch.

The policy itself is ``csrc/launch_policy.h``; this module asks the native library and names what
comes back. It needs no GPU. ``docs/kernels.md`` explains the variants.
"""

from __future__ import annotations

from ctypes import sizeof
from types import SimpleNamespace

import torch
from torch import Tensor

from epmoe.exchange.memory import MemoryPlan
from epmoe.native import ops
from epmoe.native.layouts import struct

H200_MULTIPROCESSORS = 132
H200_MAJOR = 9
# Properties of a multiprocessor.
H200_SHARED_BYTES = 228 << 10


class KernelLaunch(SimpleNamespace):
    """One launch of dispatch or combine.

    Its fields are those of `DispatchLaunch` or `CombineLaunch` in csrc/launch_policy.h, which says
    what they are, and `send_lines` and `recv_lines`: the lines that a sending and a receiving lane
    move at once, 0 in the Simple protocol.
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
    """The launches of dispatch and of combine, in a round of `tokens` rows of `dtype` with the
    plan's D and K.

    The plan is that of a rank on GPUs, `MemoryPlan.build(..., nvlink=True)`, and `dtype` that of x,
    or fp8 with an fp8 payload. `send` and `receive` are the phases that the launch runs, and
    `major` is that of the compute capability. `shared_bytes` is the shared memory of a
    multiprocessor.
    """
    sizes = plan.sizes
    call = (tokens, sizes["D"], sizes["K"], ops.DTYPES.index(dtype), expert_major, send, receive)
    # The library returns both structs, one behind the other.
    gpu = (multiprocessors, major, shared_bytes)
    policy = memoryview(ops.launch_policy(_as_tensor(plan), *call, *gpu).numpy())
    of_combine = policy[sizeof(struct("DispatchLaunch")) :]
    dispatch = _launch("DispatchLaunch", policy, "recv_lines", "send_lines")
    combine = _launch("CombineLaunch", of_combine, "send_lines", "recv_lines")
    return dispatch, combine


def _launch(name: str, policy: memoryview, coarse: str, derived: str) -> KernelLaunch:
    """Read the launch at the start of `policy`.

    Its struct has the lines of lanes of one side, `coarse`. Lanes of the other side, `derived`,
    move as many lines in a coarse launch, and otherwise one.
    """
    # Names of padding begin with "_".
    read = struct(name).from_buffer_copy(policy)
    names = [field[0] for field in read._fields_]
    fields = {name: getattr(read, name) for name in names if not name.startswith("_")}
    lines = fields[coarse]
    if not fields["coarse"]:
        lines = min(lines, 1)
    fields[derived] = lines
    return KernelLaunch(**fields)


def shared_bytes_needed(plan: MemoryPlan) -> int:
    """Bytes of shared memory that a block of any kernel of the exchange needs, at most."""
    needed: int = ops.shared_bytes_needed(_as_tensor(plan))
    return needed


def _as_tensor(plan: MemoryPlan) -> Tensor:
    """int64 on the host: a plan as operators take it."""
    return torch.tensor(plan.as_ints(), dtype=torch.int64, device="cpu")
