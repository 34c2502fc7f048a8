"""The launch policy: which variant of the dispatch and combine kernels a call takes on a GPU, and its launch.

The policy itself is ``csrc/launch_policy.h``; this module asks the native library and names what comes back. It needs
no GPU. ``docs/kernels.md`` explains the variants.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.exchange.memory import MemoryPlan
from epmoe.native import ops

H200_MULTIPROCESSORS = 132
H200_MAJOR = 9


class DispatchLaunch(NamedTuple):
    """One launch of dispatch. `DispatchLaunch` in csrc/launch_policy.h says what each field is."""

    recv_lines: int
    coarse: int
    exclusive: int
    blocks: int
    threads: int
    send_blocks: int
    notify_blocks: int
    send_offset_entries: int
    source_offset_entries: int
    row_chunks: int
    chunk_bytes: int
    tokens_per_release: int
    shared_bytes: int

    @property
    def protocol(self) -> str:
        """The protocol of the rows: LL or Simple."""
        return "LL" if self.recv_lines else "Simple"

    @property
    def send_lines(self) -> int:
        """Lines that a sending lane moves at once; 0: Simple protocol."""
        return self.recv_lines if self.coarse else min(self.recv_lines, 1)


class CombineLaunch(NamedTuple):
    """One launch of combine. `CombineLaunch` in csrc/launch_policy.h says what each field is."""

    send_lines: int
    coarse: int
    own: int
    forwards: int
    blocks: int
    threads: int
    send_blocks: int
    team: int
    shared_bytes: int

    @property
    def protocol(self) -> str:
        """The protocol of the sums: LL or Simple."""
        return "LL" if self.send_lines else "Simple"

    @property
    def recv_lines(self) -> int:
        """Lines that a receiving lane sums at once; 0: Simple protocol."""
        return self.send_lines if self.coarse else min(self.send_lines, 1)


def launches(
    plan: MemoryPlan,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    expert_major: bool = True,
    send: bool = True,
    receive: bool = True,
    multiprocessors: int = H200_MULTIPROCESSORS,
) -> tuple[DispatchLaunch, CombineLaunch]:
    """The launches of one round of `tokens` rows of `dtype` with the plan's D and K.

    Args:
        plan: the plan of a rank on GPUs, `MemoryPlan.build(..., nvlink=True)`.
        tokens: T.
        dtype: the dtype of x: fp32, fp16 or bf16, or fp8 with an fp8 payload.
        expert_major: the layout.
        send: the launch runs the send phase.
        receive: the launch runs the recv phase.
        multiprocessors: how many the GPU has; an H200 has 132.

    Returns:
        The launch of dispatch and that of combine.
    """
    sizes = plan.sizes
    call = (tokens, sizes["D"], sizes["K"], ops.DTYPES.index(dtype), expert_major, send, receive)
    fields: dict[str, dict[str, int]] = {"dispatch": {}, "combine": {}}
    for line in ops.launch_policy(_as_tensor(plan), *call, multiprocessors, H200_MAJOR).splitlines():
        stage, name, value = line.split()
        fields[stage][name] = int(value)
    return DispatchLaunch(**fields["dispatch"]), CombineLaunch(**fields["combine"])


def shared_bytes_needed(plan: MemoryPlan) -> int:
    """Bytes of shared memory that a block of any kernel of the exchange needs, at most."""
    return ops.shared_bytes_needed(_as_tensor(plan))


def _as_tensor(plan: MemoryPlan) -> Tensor:
    return torch.tensor(plan.as_ints(), dtype=torch.int64, device="cpu")
