"""Commands that run on several ranks: they ask for torchrun, and only rank 0 prints."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from epmoe.cli.console import UserError, console, launched_rank
from epmoe.config import EPConfig


@contextmanager
def all_ranks(config: EPConfig) -> Iterator[int]:
    """This process's rank, in a process group over gloo. Raises UserError with the command that starts one."""
    size = config.topology.ep_size
    command = f"torchrun --standalone --nproc-per-node {size} -m epmoe {shlex.join(sys.argv[1:])}"
    rank, started = launched_rank(), os.environ.get("WORLD_SIZE")
    if rank is None:
        raise UserError(f"this command wants {size} processes; start them with torchrun:\n  {command}")
    if started != str(size):
        raise UserError(f"`topology.ep_size` is {size}, but torchrun started {started} processes:\n  {command}")
    console.quiet = rank != 0
    dist.init_process_group("gloo")
    try:
        yield rank
    finally:
        dist.destroy_process_group()
