"""Times the exchange with the shapes of models, beside the machine's floor: bf16, expert-major, uniform routing.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.models [RESULT.json]

The models are those of configs/, each with as many ranks as there are GPUs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import results
from epmoe import EPConfig, ExpertParallel
from epmoe.bench.floor import BLOCKS, Floor, FloorWindow
from epmoe.bench.graphs import measure, round_us
from epmoe.bench.sample import Sample, wire_bytes
from epmoe.bench.sides import Fused

FOLDER = Path(__file__).resolve().parents[1] / "configs"
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
    config = EPConfig.load(FOLDER / f"{name}.yaml")
    topology = config.topology.model_copy(update={"ep_size": ep_size, "ranks_per_node": ep_size})
    capacity = config.capacity.model_copy(update={"max_num_tokens_per_rank": max(TOKENS)})
    return config.model_copy(update={"topology": topology, "capacity": capacity})


def main() -> None:
    """Measure, print the table, and write the JSON file that the command line names."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    largest = config_of(next(iter(MODELS.values())), size)  # its rows are the longest
    window, rows = FloorWindow(largest, rank, group, device), []
    for title, name in MODELS.items():
        config = config_of(name, size)
        model, cells = config.model, list[str]()
        row_bytes = wire_bytes(model.hidden_size, model.torch_dtype, "auto")
        with ExpertParallel(config, group, device=device) as ep:
            for T in TOKENS:
                sample = Sample(config, rank, T, device=device)
                ours, floor = Fused(ep, sample), Floor(window, sample, row_bytes, row_bytes)
                ours.check()

                def floor_us(blocks: int, floor: Floor = floor) -> float:
                    floor.blocks = blocks
                    return round_us(floor, REPLAYS, group)

                cells.append(f"{measure(ours, REPLAYS, group).round:.1f} ({min(map(floor_us, BLOCKS)):.1f})")
        shape = f"{model.num_experts} experts, top-{model.num_experts_per_tok}, D {model.hidden_size}"
        rows.append({"cells": [title, shape, *cells]})
        if rank == 0:
            print(f"{title:20} {shape:30}", *(f"{cell:>16}" for cell in cells), flush=True)
        torch.cuda.empty_cache()
    if rank == 0 and len(sys.argv) > 1:
        content = results.of_this_run("models", size) | {
            "title": f"{size} × {torch.cuda.get_device_name()}: the exchange by model",
            "caption": "µs a round, with the floor in brackets; bf16, expert-major rows, uniform routing.",
            "columns": [{"name": "model"}, {"name": "shape"}, *({"name": f"T = {T}", "unit": "µs"} for T in TOKENS)],
            "rows": rows,
        }
        results.write(Path(sys.argv[1]), content)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
