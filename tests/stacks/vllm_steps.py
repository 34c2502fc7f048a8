"""What live balancing adds to the steps of vLLM's engine: `torchrun --nproc-per-node 2
vllm_steps.py MODEL OUTPUT`.

Windows of steps with and without ticks of the balancer come by turns in one process, so that
whatever else the machine does strikes both alike. Prompts drift all the time: experts move in the
windows with ticks, and rest in the others. OUTPUT.RANK gets a line for each step, and rank 0 prints
a summary of them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from vllm_serve import engine_of, sampling

STEPS, WINDOWS = 50, 60  # of a window, and windows
LIVE = {"slots_per_rank": 8, "every": 50}  # each window with ticks has a plan
PROMPTS = WINDOWS * STEPS // 2  # 4 at a time, of 8 steps each
DRIFT = 100  # prompts, after which others come


class Step(NamedTuple):
    """Seconds, but for `window` and `moves`."""

    window: int
    wall: float
    cpu: float
    """of the engine's thread"""
    tick_wall: float
    """of the balancer, inside the step"""
    tick_cpu: float
    moves: bool
    """whether experts were moving, behind the tick"""


def prompts(rank: int) -> list[dict[str, list[int]]]:
    """Of few different tokens, so that few experts get most rows."""
    firsts = [40 if i // DRIFT % 2 else 300 for i in range(PROMPTS)]
    return [
        {
            "prompt_token_ids": [
                first + (7 * i + 3 * j + rank) % 3 for j in range(20 + (5 * i + 3 * rank) % 20)
            ]
        }
        for i, first in enumerate(firsts)
    ]


def run(model: str, rank: int) -> list[Step]:
    from epmoe.integrations.vllm.sizes import _session

    engine = engine_of(model, additional_config={"epmoe": {"layout": "layer", "live": LIVE}})
    (sizes,) = _session.entries()
    live = sizes.exchanges[0].live
    balancing = sizes.balancing
    step = engine.llm_engine.step
    assert live is not None
    # Measure each step and its tick. Every second window of steps has no ticks.
    tick = balancing.poll
    steps = list[Step]()
    ticked = [0.0, 0.0]

    def timed_tick() -> None:
        if len(steps) // STEPS % 2:
            return
        begin = time.perf_counter(), time.thread_time()
        tick()
        ticked[:] = time.perf_counter() - begin[0], time.thread_time() - begin[1]

    def timed_step() -> Any:
        ticked[:] = 0.0, 0.0
        begin = time.perf_counter(), time.thread_time()
        outputs = step()
        wall = time.perf_counter() - begin[0]
        cpu = time.thread_time() - begin[1]
        moves = live.moves is not None and not live.moves.done
        steps.append(Step(len(steps) // STEPS, wall, cpu, *ticked, moves))
        return outputs

    balancing.poll = timed_tick
    engine.llm_engine.step = timed_step
    engine.generate(prompts(rank), sampling(), use_tqdm=False)
    print(f"rank {rank}: {live.moved} experts have moved here in {len(steps)} steps", flush=True)
    return steps


def ratio(steps: list[Step], name: str, of: Any) -> str:
    """With ticks over without, by `of` of all steps; 95 % of draws of pairs of windows lie in the
    interval.
    """
    pairs = [
        (
            [getattr(s, name) for s in steps if s.window == w],
            [getattr(s, name) for s in steps if s.window == w + 1],
        )
        for w in range(0, steps[-1].window, 2)
    ]

    def of_pairs(chosen: list[tuple[list[float], list[float]]]) -> float:
        with_ticks, without = (of([value for pair in chosen for value in pair[i]]) for i in (0, 1))
        return with_ticks / without

    # Draw the pairs again and again, with repetitions.
    draw = random.Random(7)
    drawn = sorted(of_pairs(draw.choices(pairs, k=len(pairs))) for _ in range(1000))
    with_ticks, without = (of([value for pair in pairs for value in pair[i]]) for i in (0, 1))
    return (
        f"{with_ticks * 1e3:.2f} ms with ticks, {without * 1e3:.2f} without: "
        f"{with_ticks / without:.3f} ({drawn[25]:.3f} to {drawn[974]:.3f})"
    )


def last_percent(values: list[float]) -> float:
    return quantiles(values, n=100)[98]


def summary(steps: list[Step]) -> str:
    steps = steps[2 * STEPS :]  # the first ones warm up
    ticks = [s for s in steps if s.tick_wall]
    lines = [
        f"{what} of a step's {name}: {ratio(steps, name, of)}"
        for name in ("wall", "cpu")
        for what, of in (("median", median), ("99th percentile", last_percent))
    ]
    # What ticks take, by what the experts do meanwhile.
    kinds = {
        "all": ticks,
        "while nothing moves": [s for s in ticks if not s.moves],
        "while experts move": [s for s in ticks if s.moves],
    }
    for what, some in kinds.items():
        of_step = sorted(s.tick_cpu for s in some)
        lines.append(
            f"ticks, {what} ({len(some)}), ms of the processor: median "
            f"{median(of_step) * 1e3:.3f}, 99th percentile {last_percent(of_step) * 1e3:.3f}, most "
            f"{of_step[-1] * 1e3:.3f}"
        )
    return "\n".join(lines)


def main(model: str, output: str) -> None:
    rank = int(os.environ["RANK"])
    steps = run(model, rank)
    Path(f"{output}.{rank}").write_text("\n".join(json.dumps(step) for step in steps))
    if rank == 0:
        print(summary(steps), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
