"""Many storms side by side, each in processes of its own; docs/testing.md tells more.

python tests/storms.py --storms 16 --steps 1300
python tests/storms.py --storms 8 --seconds 480
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PATHS = [str(TESTS.parent), str(TESTS), str(TESTS / "distributed")]
sys.path[:0] = PATHS
ACT_STEPS = 60
STEPS = 200
"""Of a storm, where nobody says how long it lasts."""
MOST_FAULTS = 20
ANSWER_S = 60.0
"""A process that takes longer hangs."""


def run_one(given: argparse.Namespace) -> int:
    """A storm of this process. Returns 1 where anything was wrong."""
    import torch
    from host import Host
    from storm.acts import Totals
    from storm.kinds import KINDS

    torch.set_num_threads(1)
    seed = given.seed
    kinds = given.kinds.split(",")
    steps = given.steps
    if steps is None:
        steps = STEPS if given.seconds is None else sys.maxsize
    deadline = math.inf if given.seconds is None else time.monotonic() + given.seconds

    totals = Totals()
    act = given.act
    while totals.counts["steps"] < steps and len(totals.faults) < MOST_FAULTS:
        if time.monotonic() > deadline:
            break
        kind = KINDS[kinds[act % len(kinds)]]
        before = totals.counts["steps"]
        length = min(ACT_STEPS, steps - before)
        name = f"storm {seed}, act {act} ({kind.kind})"
        # The folder of versions is in memory, as that of a trainer should be.
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with (
            tempfile.TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as folder,
            Host(Path(folder), torch.device("cpu"), ANSWER_S) as host,
        ):
            try:
                kind(host, f"{seed}/{act}", totals, given.ranks).run(length)
            except Exception as error:
                step = totals.counts["steps"] - before
                fault = f"FAULT in {name}, step {step}: {type(error).__name__}: {error}"
                totals.faults.append(fault)
                print(fault, flush=True)
        if given.each:
            print(f"storm {seed}, behind act {act}: {totals}", flush=True)
        act += 1
    print(f"storm {seed}: {totals}", flush=True)
    return int(bool(totals.faults))


def run_many(count: int, first_seed: int, options: list[str]) -> int:
    """Storms of following seeds, each of which prints its lines."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    storms = [
        subprocess.Popen(
            [sys.executable, __file__, "--one", "--seed", str(seed), *options], env=environment
        )
        for seed in range(first_seed, first_seed + count)
    ]
    return int(any([storm.wait() for storm in storms]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storms", type=int, default=1, help="how many, side by side")
    parser.add_argument("--steps", type=int, help="of each storm")
    parser.add_argument("--seconds", type=float, help="a storm ends with the act behind so many")
    parser.add_argument("--ranks", type=int, default=3, help="the most ranks of a group")
    parser.add_argument("--seed", type=int, default=0, help="of the first storm")
    parser.add_argument("--act", type=int, default=0, help="the first act, to see a fault again")
    parser.add_argument("--kinds", default="served,moving", help="of acts, in turn")
    parser.add_argument("--each", action="store_true", help="totals behind each act, too")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return run_one(given)
    # What was said of these storms is said to each.
    options = ["--each"] if given.each else []
    for name in ("steps", "seconds", "ranks", "act", "kinds"):
        value = getattr(given, name)
        if value is not None:
            options += [f"--{name}", str(value)]
    return run_many(given.storms, given.seed, options)


if __name__ == "__main__":
    sys.exit(main())
