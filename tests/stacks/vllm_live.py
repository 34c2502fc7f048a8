"""Serves prompts that drift with vLLM's engine, inside torchrun: `python vllm_live.py MODEL OUTPUT
EPMOE`.

EPMOE is the JSON of `--additional-config '{"epmoe": …}'`. Prompts are of few different tokens, so
that few experts get most rows, and of others in the second phase. OUTPUT.RANK gets the tokens of
each prompt, what each step took, the time of the processor in each tick of the balancer, and the
rows of this rank's experts in the second half of each phase, after the balancer has seen the first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm_serve import engine_of, moved_experts, sampling

PHASES = (40, 300)  # the first of the tokens of their prompts
PROMPTS = 40  # of a rank in each half of a phase


def prompts(first: int, rank: int) -> list[dict[str, list[int]]]:
    lengths = [20 + (5 * i + 3 * rank) % 20 for i in range(PROMPTS)]
    return [
        {"prompt_token_ids": [first + (7 * i + 3 * j + rank) % 3 for j in range(length)]}
        for i, length in enumerate(lengths)
    ]


def main(model: str, output: str, epmoe: str) -> None:
    from epmoe.integrations.vllm.sizes import _session

    rank = int(os.environ["RANK"])
    engine = engine_of(model, additional_config={"epmoe": json.loads(epmoe)})
    # Measure each step, and each tick within it.
    step = engine.llm_engine.step
    steps_s = list[float]()
    ticks_s = list[float]()

    def timed() -> Any:
        begin = time.perf_counter()
        outputs = step()
        steps_s.append(time.perf_counter() - begin)
        return outputs

    engine.llm_engine.step = timed
    (sizes,) = _session.entries()
    tick = sizes.balancing.poll

    def timed_tick() -> None:
        begin = time.thread_time()
        tick()
        ticks_s.append(time.thread_time() - begin)

    sizes.balancing.poll = timed_tick

    # Two batches of each phase: the tokens, and the rows that this rank got for the second one.
    def rows() -> list[list[int]]:
        return [ep.health().rows_by_layer for ep in sizes.exchanges]

    tokens = []
    received = []
    for first in PHASES:
        for _ in range(2):
            before = rows()
            outputs = engine.generate(prompts(first, rank), sampling(), use_tqdm=False)
            tokens.append([list(one.outputs[0].token_ids) for one in outputs])
        received.append(sum(map(sum, rows())) - sum(map(sum, before)))
    result = {
        "tokens": tokens,
        "rows": received,
        "steps_s": steps_s,
        "ticks_s": ticks_s,
        "moved": moved_experts(),
    }
    Path(f"{output}.{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
