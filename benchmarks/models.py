"""Times the exchange with the shapes of models, and the machine's floor: bf16, expert-major, uniform routing.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.models [RESULT.json]

The models are those of configs/, each with as many ranks as there are GPUs. `epmoe bench` measures each of them.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from benchmarks import render, results
from epmoe import EPConfig
from epmoe.bench import gpu
from epmoe.bench.gpu import Contender, Payload
from epmoe.bench.report import Job

MODELS = {
    "DeepSeek-V3": "h200x8_deepseek_v3",
    "Kimi-K2": "h200x8_kimi_k2",
    "Qwen3-235B-A22B": "h200x8_qwen3_235b",
    "Qwen3-30B-A3B": "h200x2_qwen3_30b",
    "Qwen3-Next-80B-A3B": "h200x8_qwen3_next_80b",
    "gpt-oss-120b": "h200x4_gpt_oss_120b",
    "Mixtral-8x7B": "h200x8_mixtral",
    "Llama 4 Maverick": "h200x8_llama4_maverick",
}
TOKENS, REPLAYS = (1, 16, 128, 1024), 15


def config_of(name: str, ep_size: int) -> EPConfig:
    """A ready configuration, for `ep_size` ranks of one node."""
    config = EPConfig.load(results.FOLDER.parent / "configs" / f"{name}.yaml")
    topology = config.topology.model_copy(update={"ep_size": ep_size, "ranks_per_node": ep_size})
    capacity = config.capacity.model_copy(update={"max_num_tokens_per_rank": max(TOKENS)})
    return config.model_copy(update={"topology": topology, "capacity": capacity})


def main() -> None:
    """Measure, print the table, and write the JSON file that the command line names."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rows = []
    for title, name in MODELS.items():
        job = Job(config_of(name, dist.get_world_size()), TOKENS, REPLAYS)
        report = gpu.run(job, contenders=[Contender.FLOOR, Contender.FUSED], payloads=[Payload.PLAIN])
        model = job.config.model
        shape = f"{model.num_experts} experts, top-{model.num_experts_per_tok}, D {model.hidden_size}"
        ours = [result for result in report.results if result["side"] == Contender.FUSED]
        rows.append([title, shape, *(f"{result['round']:.1f} ({result['floor']:.1f})" for result in ours)])
        if dist.get_rank() == 0:
            print(*rows[-1], sep="  ", flush=True)
    if dist.get_rank() == 0:
        content = results.of_this_run("models", dist.get_world_size()) | {
            "title": f"{dist.get_world_size()} × {torch.cuda.get_device_name()}: the exchange by model",
            "caption": "µs a round, with the floor in brackets; bf16, expert-major rows, uniform routing.",
            "columns": [{"name": "model"}, {"name": "shape"}, *({"name": f"T = {T}", "unit": "µs"} for T in TOKENS)],
            "rows": [{"cells": cells} for cells in rows],
        }
        render.publish(content)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
