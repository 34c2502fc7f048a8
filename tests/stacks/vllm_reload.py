"""Loads weights again into vLLM's engine, inside torchrun: `python vllm_reload.py MODEL OTHER
OUTPUT EPMOE`.

EPMOE is the JSON of `--additional-config '{"epmoe": …}'`. First prompts of few different tokens, so
that experts move where they can; then the engine sleeps at level 1, and at level 2, after which it
gets the weights of OTHER, by vLLM's `reload_weights`. OUTPUT.RANK gets how many experts have moved
here before, and the tokens of the prompts of vllm_serve.py: before, after the first sleep, and with
the new weights.

vLLM for CPUs ignores sleep mode. So the backend is called as vLLM's worker for GPUs calls it, and
the allocator is a stand-in, which clears the weights where vLLM's does not keep them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm_live import PHASES, prompts
from vllm_serve import engine_of, moved_experts, sampling, tokens_of


class Allocator:
    """In place of vLLM's for GPUs."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        if "weights" not in offload_tags:
            for parameter in self.model.parameters():
                parameter.data.zero_()

    def wake_up(self, tags: list[str] | None) -> None: ...


def main(model: str, other: str, output: str, epmoe: str) -> None:
    from vllm import device_allocator
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    from epmoe.integrations.vllm.sizes import _session, named_exchanges

    rank = int(os.environ["RANK"])
    engine = engine_of(model, additional_config={"epmoe": json.loads(epmoe)})
    mine = slice(rank, None, 2)

    def asleep() -> set[bool]:
        (sizes,) = _session.entries()
        sizes.poll()  # as the thread that watches GPUs does all the time
        return {"asleep" in repr(ep) for ep in named_exchanges().values()}

    # Experts have moved.
    engine.generate(prompts(PHASES[0], rank), sampling(), use_tqdm=False)
    moved = moved_experts()

    # The backend of sleep mode that vLLM takes, with a stand-in for its allocator.
    allocator = Allocator(engine.apply_model(lambda model: model)[0])
    device_allocator.get_mem_allocator_instance = lambda: allocator
    model_config = engine.llm_engine.model_config
    assert model_config.sleep_mode_backend == "epmoe"
    backend = SleepModeBackendFactory.create_backend(model_config)

    # Level 1: the same tokens afterwards.
    before = tokens_of(engine, mine)
    backend.suspend(1)
    assert asleep() == {True}
    backend.resume()
    after = tokens_of(engine, mine)

    # Level 2: the windows wake up with the weights, which are loaded again.
    backend.suspend(2)
    backend.resume(["kv_cache"])
    assert asleep() == {True}
    backend.resume(["weights"])
    assert asleep() == {False}
    engine.collective_rpc("reload_weights", kwargs={"weights_path": other})
    new = tokens_of(engine, mine)
    result = {"moved": moved, "before": before, "after": after, "tokens": new}
    Path(f"{output}.{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
