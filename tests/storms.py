"""Many storms side by side, each in processes of its own; docs/testing.md tells more.

python tests/storms.py --storms 16 --steps 1300
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PATHS = [str(TESTS.parent), str(TESTS), str(TESTS / "distributed")]
sys.path[:0] = PATHS
ACT_STEPS = 60
MOST_FAULTS = 20


def run_one(seed: int, steps: int, ranks: int, first: int, kinds: list[str], each: bool) -> int:
    """A storm of this process. Returns 1 where anything was wrong."""
    import torch
    from host import Host
    from storm.acts import Totals
    from storm.kinds import KINDS

    torch.set_num_threads(1)
    totals = Totals()
    act = first
    while totals.counts["steps"] < steps and len(totals.faults) < MOST_FAULTS:
        kind = KINDS[kinds[act % len(kinds)]]
        before = totals.counts["steps"]
        length = min(ACT_STEPS, steps - before)
        name = f"storm {seed}, act {act} ({kind.kind})"
        # The folder of versions is in memory, as that of a trainer should be.
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with (
            tempfile.TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as folder,
            Host(Path(folder), torch.device("cpu")) as host,
        ):
            try:
                kind(host, f"{seed}/{act}", totals, ranks).run(length)
            except Exception as error:
                step = totals.counts["steps"] - before
                fault = f"FAULT in {name}, step {step}: {type(error).__name__}: {error}"
                totals.faults.append(fault)
                print(fault, flush=True)
        if each:
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
    parser.add_argument("--steps", type=int, default=200, help="of each storm")
    parser.add_argument("--ranks", type=int, default=3, help="the most ranks of a group")
    parser.add_argument("--seed", type=int, default=0, help="of the first storm")
    parser.add_argument("--act", type=int, default=0, help="the first act, to see a fault again")
    parser.add_argument("--kinds", default="served,moving", help="of acts, in turn")
    parser.add_argument("--each", action="store_true", help="totals behind each act, too")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        kinds = given.kinds.split(",")
        return run_one(given.seed, given.steps, given.ranks, given.act, kinds, given.each)
    options = [
        word
        for name in ("steps", "ranks", "act", "kinds")
        for word in (f"--{name}", str(getattr(given, name)))
    ]
    if given.each:
        options.append("--each")
    return run_many(given.storms, given.seed, options)


if __name__ == "__main__":
    sys.exit(main())
