"""Collects the facts that stand in front of the figures in a benchmark's JSON file: what has run,
where, and with which versions.
"""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from epmoe.config.config import EPConfig
from epmoe.local.simulate import Kind
from epmoe.native.package import __version__


def facts(benchmark: str, config: EPConfig, routing: Kind, repeats: int) -> dict[str, Any]:
    """Collect everything that is known about a benchmark but its figures, in types that JSON can
    hold.
    """
    return {
        "benchmark": benchmark,
        "config": config.model_dump(mode="json"),
        "routing": routing,
        "ranks": config.topology.ep_size,
        "repeats": repeats,
        **this_run(),
    }


def this_run() -> dict[str, Any]:
    """When and where this process runs, with which versions."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }


def machine() -> dict[str, Any]:
    """Describe this machine. "cores" are those that this process may use."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "cores_of_machine": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    """The versions of epmoe and of what it runs on. A part that is absent has None."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "epmoe": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }


def commit(folder: Path = Path(__file__).resolve().parents[2]) -> str | None:
    """The commit of the checkout in `folder`, with "-dirty" behind it if files have been changed.
    Returns None if `folder` is no checkout.
    """
    if not (folder / ".git").exists():
        return None
    # Exclude all tags, so that git names the commit itself.
    describe = ["describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*"]
    command = ["git", "-C", str(folder), "--no-optional-locks", *describe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    """The model of the processor, or its architecture where the kernel names none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
