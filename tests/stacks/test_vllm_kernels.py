"""vLLM's real FusedMoEKernel and TritonExperts with epmoe, in Triton's interpreter, in several
releases of vLLM.

EPMOE_VLLM_TREES is a folder with the Python files of these releases, which `make stacks` fetches.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "vllm_triton.py"
TREES = Path(os.environ.get("EPMOE_VLLM_TREES", "."))
CASES = 2 * 2 * 2 * 4  # bf16 and fp8, layouts, weights on input, ragged batches


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.33.0"])
def test_two_ranks_compute_what_one_computes(version: str) -> None:
    if not (TREES / version / "vllm").is_dir():
        pytest.skip(
            f"the Python files of vLLM {version} are not in EPMOE_VLLM_TREES: run `make stacks`"
        )
    environment = os.environ | {"PYTHONPATH": str(TREES / version), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count(f"vLLM {version}: ") == CASES
