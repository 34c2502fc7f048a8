"""Runs programs in child processes, over several ranks with torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def torchrun(ranks: int, *program: object) -> subprocess.CompletedProcess[str]:
    """Runs `program` under torchrun: a script, or `-m` and a module, followed by its arguments."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run([*launch, *map(str, program)])


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"} | variables
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
