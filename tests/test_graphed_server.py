"""The loop of examples/serve.py over CUDA graphs: ranks die under load, the others go on with equal tokens."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers import NO_CUDA
from launched import ROOT

pytest.importorskip("prometheus_client")


@pytest.mark.gpu
@pytest.mark.slow
@NO_CUDA
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_killed_under_load(ranks):
    """Graphs are captured again, and new ranks join."""
    command = [sys.executable, str(ROOT / "tests/graphed_server.py"), "--ranks", str(ranks), "--deaths", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["right"] >= 200 and len(last["deaths"]) == 5
