"""Commands that run on several ranks: they need torchrun, and only rank 0 prints."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from epmoe.cli.console import UserError, console, launched_rank
from epmoe.config import EPConfig


@contextmanager
def all_ranks(config: EPConfig) -> Iterator[int]:
    """Initialise the default process group over gloo, with `transport: nvlink` also over NCCL; yields this rank.

    Raises UserError if torchrun did not start this process or started another number of processes (with the command to
    type), and if there are fewer GPUs than ranks.
    """
    size = config.topology.ep_size
    command = f"torchrun --standalone --nproc-per-node {size} -m epmoe {shlex.join(sys.argv[1:])}"
    rank, started = launched_rank(), os.environ.get("WORLD_SIZE")
    if rank is None:
        raise UserError(f"this command wants {size} processes; start them with torchrun:\n  {command}")
    if started != str(size):
        raise UserError(f"`topology.ep_size` is {size}, but torchrun started {started} processes:\n  {command}")
    on_gpus = config.exchange.transport == "nvlink"
    if on_gpus:
        if (found := torch.cuda.device_count()) < size:
            raise UserError(
                f"`exchange.transport` nvlink wants a GPU for each of {size} ranks, and torch sees {found}; "
                "EPMOE_EXCHANGE__TRANSPORT=shared_memory in the environment runs this configuration on the CPU"
            )
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    console.quiet = rank != 0
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    try:
        yield rank
    finally:
        dist.destroy_process_group()
