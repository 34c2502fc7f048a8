"""Generates greedy tokens with vLLM's engine and writes them as JSON: `python vllm_serve.py MODEL
LAUNCH MODE OUTPUT`.

LAUNCH is `one` for one process, `torchrun` inside torchrun, or `spawn`, where vLLM starts its
engine cores by itself. MODE is `eager` or `compiled`. EPMOE_VLLM chooses epmoe, or CHOICE does, as
the JSON that users write. The output holds the tokens of each prompt, in order.
VERSIONS_OF_WEIGHTS is a folder: with `spawn` the engine takes version 7 of its weights from there
before it generates.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = [
    [(7 * i + 3 * j) % 500 + 3 for j in range(length)] for i, length in enumerate((5, 9, 17, 3, 26))
]
NEW_TOKENS = 8


def arguments(model: str, mode: str, ranks: int) -> dict[str, Any]:
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if "fp4" in model else "float32",  # 4 bits come with bf16 only
        "enforce_eager": mode == "eager",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "data_parallel_size": ranks,
        "enable_expert_parallel": ranks > 1,
        # vLLM's native operator on CPUs rotates wrongly what DeepSeek-V3 rotates: the tokens of
        # transformers come out with torch's.
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
        "attention_backend": "CPU_MLA",  # where there is MLA: that for CPUs with AMX takes no fp32
        "seed": 0,
    }


def sampling() -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def engine_of(model: str, mode: str = "eager", ranks: int = 2, **options: Any) -> Any:
    """vLLM's engine, in one process or in each rank of torchrun."""
    from vllm import LLM

    extra: dict[str, Any] = {}
    if ranks > 1:
        extra["distributed_executor_backend"] = "external_launcher"
    if "CHOICE" in os.environ:
        extra["additional_config"] = {"epmoe": json.loads(os.environ["CHOICE"])}
    return LLM(**arguments(model, mode, ranks) | extra | options)


def tokens_of(engine: Any, mine: slice) -> dict[int, list[int]]:
    """The tokens of this process's prompts, by prompt."""
    numbers = range(len(PROMPTS))[mine]
    prompts = [{"prompt_token_ids": PROMPTS[i]} for i in numbers]
    outputs = engine.generate(prompts, sampling(), use_tqdm=False)
    return {i: list(one.outputs[0].token_ids) for i, one in zip(numbers, outputs, strict=True)}


def moved_experts() -> int:
    """How many experts have moved here."""
    from epmoe.integrations.vllm.sizes import named_exchanges

    return sum(ep.live.moved for ep in named_exchanges().values())


async def served(model: str, mode: str) -> dict[int, list[int]]:
    """First one rank alone serves, while the other one idles; then both serve at once. The tokens
    must agree.
    """
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    # "uni": each engine core runs its model itself, so that fewer processes import vLLM.
    options = arguments(model, mode, 2) | {"distributed_executor_backend": "uni"}
    versions = os.environ.get("VERSIONS_OF_WEIGHTS")
    if versions:
        options["weight_transfer_config"] = {"backend": "epmoe"}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    async def generate(i: int, rank: int) -> list[int]:
        prompt = {"prompt_token_ids": PROMPTS[i]}
        last = None
        async for output in engine.generate(
            prompt, sampling(), f"{i}-{rank}", data_parallel_rank=rank
        ):
            last = output
        return list(last.outputs[0].token_ids)

    try:
        # From here on the weights are those of a trainer.
        if versions:
            await engine.init_weight_transfer_engine(
                WeightTransferInitRequest(init_info={"folder": versions})
            )
            await engine.start_weight_update()
            await engine.update_weights(WeightTransferUpdateRequest(update_info={"version": 7}))
            await engine.finish_weight_update()
        alone = [await generate(i, 1) for i in range(2)]
        both = await asyncio.gather(*(generate(i, i % 2) for i in range(len(PROMPTS))))
    finally:
        engine.shutdown()
    assert alone == both[:2], "a prompt that runs with others got other tokens than alone"
    return dict(enumerate(both))


def pretend_mxfp4() -> None:
    """vLLM makes no layer in MXFP4 where it has no kernel for it. Layout `layer` does not run that
    kernel.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsMxfp4

    CPUExpertsMxfp4._supports_current_device = staticmethod(lambda: True)


def pretend_nvfp4() -> None:
    """The same of NVFP4."""
    from vllm.model_executor.layers.fused_moe.experts.nvfp4_emulation_moe import (
        Nvfp4QuantizationEmulationTritonExperts as Experts,
    )

    Experts.is_supported_config = staticmethod(lambda *_: (True, None))


def main(model: str, launch: str, mode: str, output: str) -> None:
    if model.endswith("mxfp4"):
        pretend_mxfp4()
    if model.endswith("nvfp4"):
        pretend_nvfp4()
    if launch == "spawn":
        tokens = asyncio.run(served(model, mode))
    elif launch == "torchrun":
        rank = int(os.environ["RANK"])
        tokens = tokens_of(engine_of(model, mode), slice(rank, None, 2))
        output = f"{output}.{rank}"
    else:
        tokens = tokens_of(engine_of(model, mode, ranks=1), slice(None))
    Path(output).write_text(json.dumps(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
