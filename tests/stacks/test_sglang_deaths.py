"""What ends SGLang's server when a rank dies, and what of it a plugin's hooks can answer
(docs/serving.md).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("sglang") is None:
    pytest.skip("needs SGLang: make stacks-sglang", allow_module_level=True)

SCRIPT = Path(__file__).parent / "sglang_deaths.py"
TIMEOUT_S = 300


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    ("case", "by"),
    [
        ("dies", "Scheduler hit an exception"),
        ("raises", "EPTimeoutError"),
        ("unseen", "Subprocess scheduler_1"),
        ("hooked", None),
    ],
)
def test_a_rank_dies(tmp_path: Path, case: str, by: str | None) -> None:
    """`by` is what the process logs that ends the server; None: the server and the
    survivor go on.
    """
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(SCRIPT.parent))))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), case, str(tmp_path / "store")],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    goes_on = "the server is alive, the survivor is\n" in done.stdout
    if by is None:
        assert goes_on and done.returncode == 0, done.stdout[-6000:]
        return
    assert by in done.stdout and "SIGQUIT received" in done.stdout, done.stdout[-6000:]
    assert not goes_on and done.returncode == -signal.SIGKILL, done.stdout[-6000:]
    (pids,) = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("pids ")]
    # They run for a moment after a kill. If they stay, pytest's timeout ends this.
    while any(_is_running(int(pid)) for pid in pids):
        time.sleep(0.01)


@pytest.mark.timeout(TIMEOUT_S)
def test_a_rank_dies_in_the_middle_of_a_move() -> None:
    """The other one raises from its next step, which ends the server as above, and
    names the rank.
    """
    path = os.pathsep.join(
        filter(None, (os.environ.get("PYTHONPATH"), *map(str, (SCRIPT.parent, SCRIPT.parents[1]))))
    )
    done = subprocess.run(
        [sys.executable, str(SCRIPT.with_name("sglang_live.py"))],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # It prints who died, and what the other one says.
    found = re.search(
        r"in the middle of a move dies rank (\d)\n(?:.*\n)*the other one says: (.*)\n", done.stdout
    )
    assert found, done.stdout[-6000:]
    assert (
        f"missed rank(s) [{found[1]}] of the group" in found[2]
        and "whose process has ended" in found[2]
    )
    assert f"exit codes [-{signal.SIGKILL:d}, 0]" in done.stdout


def _is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
