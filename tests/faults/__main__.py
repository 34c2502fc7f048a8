"""Hurts a group of ranks by every kind of fault, again and again, and counts what follows: `make faults`.

On GPUs: `make faults DEVICE=cuda`. More options: `make faults FAULTS="--ranks 4 --kinds killed stopped"`. Two nodes of
two ranks, with a network between them where this user may make one: `make faults FAULTS="--nodes 2"`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from faults.kinds import AT_ONCE_S, NAMED_S, Group, Outcome, kinds_of
from faults.nodes import NAMESPACES, RANKS, Nodes, kinds_of_nodes

TWO_MACHINES = Path(__file__).parents[1] / "two_machines.sh"


def count(
    kinds: dict[str, Any], runs: int, make: Callable[[Path], Group | Nodes]
) -> Iterable[tuple[str, list[Outcome]]]:
    """Yields a kind and its outcomes. One group serves as long as it can."""
    group = None
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, kind) in enumerate(kinds.items()):
            outcomes = []
            for seed in range(runs):
                group = group or make(Path(tempfile.mkdtemp(dir=folder)))
                outcomes.append(group.hurt(kind, seed))
                if not outcomes[-1].resumed or (number == len(kinds) - 1 and seed == runs - 1):
                    group.close()
                    group = None
            yield name, outcomes


def main(arguments: list[str] | None = None) -> int:
    """Prints a table. Returns whether anything was not as it should be."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of each kind")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, help="by default 3, on GPUs as many as there are")
    parser.add_argument("--nodes", type=int, choices=[1, 2], default=1, help="2: of two ranks, on the CPU")
    parser.add_argument("--kinds", nargs="*", default=[""], help="parts of their names")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    size = options.ranks or (torch.cuda.device_count() if cuda and device.type == "cuda" else 3)
    if options.nodes == 1:
        offered: dict[str, Any] = dict(kinds_of(device))
        make: Callable[[Path], Group | Nodes] = partial(Group, device=device, size=size)
        print(f"{size} ranks on {options.device}. Expected: the victim is named by the deadline and {NAMED_S:.0f} s,")
        print(
            f"one that died or left within {AT_ONCE_S} s; a slow rank and failing experts harm no round of the others;"
        )
        print("corrupted windows end no process.")
    else:
        if NAMESPACES not in os.environ:
            os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # otherwise it warns of addresses without a name
            os.execv(TWO_MACHINES, [str(TWO_MACHINES), "1gbit", "alone", sys.executable, "-m", "faults", *sys.argv[1:]])
        offered, make = dict(kinds_of_nodes()), Nodes
        print(f"2 nodes of {RANKS // 2} ranks. Expected: all ranks name the victim, or ranks of a node out of reach,")
        print(f"within the deadline and {NAMED_S:.0f} s; what is over within the deadline harms no round.")
    kinds = {name: kind for name, kind in offered.items() if any(part in name for part in options.kinds)}
    print("kind                          runs  expected  hung  device alive  resumed  slowest s  took s")
    reasons, started = [], time.monotonic()
    for name, outcomes in count(kinds, options.runs, make):
        expected, hung, alive, resumed = (
            sum(getattr(o, key) for o in outcomes) for key in ("named", "hung", "alive", "resumed")
        )
        slowest, took, started = max(o.seconds for o in outcomes), time.monotonic() - started, time.monotonic()
        counts = f"{len(outcomes):6}{expected:10}{hung:6}{alive:14}{resumed:9}"
        print(f"{name:28}{counts}{slowest:11.2f}{took:8.0f}", flush=True)
        reasons += [f"{name}, run {n}:{o.why}" for n, o in enumerate(outcomes) if o.why]
    print(*reasons, sep="\n", end="\n" if reasons else "")
    return bool(reasons)


if __name__ == "__main__":
    sys.exit(main())
