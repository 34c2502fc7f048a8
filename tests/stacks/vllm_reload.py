"""Loads weights again into vLLM's engine, inside torchrun: `python vllm_reload.py MODEL OTHER OUTPUT EPMOE`.

EPMOE is the JSON of `--additional-config '{"epmoe": …}'`. First prompts of few different tokens, so that experts move
where they can; then the weights of OTHER, by vLLM's `reload_weights`. OUTPUT.RANK gets how many experts have moved here
before, and the tokens of the prompts of vllm_serve.py with the new weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from vllm_live import PHASES, prompts
from vllm_serve import PROMPTS, arguments, sampling


def main(model: str, other: str, output: str, epmoe: str) -> None:
    from vllm import LLM

    from epmoe.integrations.vllm.sizes import _session

    rank = int(os.environ["RANK"])
    engine = LLM(
        **arguments(model, "eager", 2),
        distributed_executor_backend="external_launcher",
        additional_config={"epmoe": json.loads(epmoe)},
    )
    engine.generate(prompts(PHASES[0], rank), sampling(), use_tqdm=False)
    moved = sum(ep.live.moved for sizes in _session.entries() for ep in sizes.exchanges if ep.live is not None)
    engine.collective_rpc("reload_weights", kwargs={"weights_path": other})
    mine = range(len(PROMPTS))[rank::2]
    outputs = engine.generate([{"prompt_token_ids": PROMPTS[i]} for i in mine], sampling(), use_tqdm=False)
    tokens = {i: list(one.outputs[0].token_ids) for i, one in zip(mine, outputs, strict=True)}
    Path(f"{output}.{rank}").write_text(json.dumps({"moved": moved, "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
