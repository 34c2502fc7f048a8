"""Times a decode step and a prefill of transformers' Qwen3-MoE with its experts spread over GPUs,
four layers of it.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.transformers_step [RESULT.json]

Every rank decodes sequences of its own. Rows of the table: epmoe as experts function and as EP
implementation, in its ordinary and in its static mode, eager and captured into a CUDA graph; the
model without its experts, both ways, which is what remains of a step however fast they are; and
transformers' own all_to_all. Attention is replicated. A figure is the median over batches of calls
back to back, of the slowest rank. Without GPUs a tiny model shows that the script works; its
figures mean nothing. It needs transformers 5.23 or newer.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.integrations.moe import ExpertsInterface

import epmoe.integrations.transformers as integration
from benchmarks import render
from epmoe.bench import timing

ON_GPUS = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPUS else "cpu"
# On GPUs four layers of the real model, on CPUs one of a tiny model.
QWEN3_30B_A3B = {
    "num_hidden_layers": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
}
TINY = {
    "num_hidden_layers": 1,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
TINY |= {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
# Sequences of a rank in a decode step, and tokens of a prefill.
BATCHES = (1, 32, 128) if ON_GPUS else (1, 8)
PROMPTS = (2048, 8192) if ON_GPUS else (64,)
# Calls in a batch, and batches, of which the median counts.
CALLS, REPEATS = (10, 7) if ON_GPUS else (2, 3)
CONTEXT = 128  # tokens in the cache when a step begins
DTYPE = torch.bfloat16 if ON_GPUS else torch.float32

Milliseconds = list[float | None]

ExpertsInterface.register(
    "none", lambda experts, hidden_states, top_k_index, top_k_weights: hidden_states
)


def make_model(implementation: str) -> nn.Module:
    """The same random weights on every rank and in every call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **(QWEN3_30B_A3B if ON_GPUS else TINY))
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPE, experts_implementation=implementation
        )
    return model.eval().requires_grad_(False)


def spread_experts(model: nn.Module, implementation: str) -> nn.Module:
    """Leave each rank its share of the experts, as `DistributedConfig(ep_size=R)` does."""
    size = dist.get_world_size()
    # The plan names each parameter of the experts, and then the experts.
    plan = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            plan |= {
                f"{name}.{parameter}": "grouped_gemm" for parameter, _ in module.named_parameters()
            }
            plan[name] = "ep_dispatch_experts"  # behind its parameters
    # Experts are spread over all ranks; nothing else is.
    mesh = init_device_mesh(DEVICE, (size,))
    alone = init_device_mesh(DEVICE, (size, 1), mesh_dim_names=("other", "tp"))["tp"]
    return apply_expert_parallelism(model, mesh, alone, plan, ep_implementation=implementation)


class Decoding:
    """A step of `batch` sequences with a static cache."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=2 * CONTEXT)
        # Each rank decodes sequences of its own, behind a context of this length.
        shape = batch, CONTEXT
        ids = torch.randint(
            model.config.vocab_size, shape, generator=torch.Generator().manual_seed(dist.get_rank())
        )
        self.ids = ids[:, :1].to(DEVICE)
        self.position = torch.full((batch, 1), CONTEXT, device=DEVICE)
        # A mask of our own: with StaticCache, transformers' own code for it may look at the cache's
        # length.
        self.mask = (torch.arange(2 * CONTEXT, device=DEVICE) < CONTEXT + CALLS).expand(
            batch, 1, 1, -1
        )
        self()  # makes the cache

    def __call__(self) -> Tensor:
        logits: Tensor = self.model(
            input_ids=self.ids,
            attention_mask=self.mask,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        return logits

    def rewind(self) -> None:
        """Before a batch of calls, each of which adds a token to the cache."""
        for layer in self.cache.layers:
            length = getattr(layer, "cumulative_length", None)
            if isinstance(length, Tensor):
                length.fill_(CONTEXT)


def milliseconds(
    call: Callable[[], object], calls: int, rewind: Callable[[], None] = lambda: None
) -> float:
    """The time of one call, the median over batches of `calls`, on the slowest rank. Collective."""
    times = []
    for repeat in range(REPEATS + 1):
        rewind()
        synchronize()
        dist.barrier()
        # Calls run back to back: the host may run ahead of the GPU.
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        if repeat:  # the first one warms up
            times.append(1e3 * (time.perf_counter() - start) / calls)
    return round(timing.slowest([statistics.median(times)])[0], 2)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if ON_GPUS:
        torch.cuda.synchronize()


def decode_steps(model: nn.Module, captured: bool) -> Milliseconds:
    """Milliseconds of a step for each of `BATCHES`."""
    cells: Milliseconds = []
    for batch in BATCHES:
        step = Decoding(model, batch)
        call: Callable[[], object] = step
        # A replay cannot raise, so the host polls for failures after it.
        if captured:
            graph, _ = timing.captured(step)

            def call(replay: Callable[[], None] = graph.replay) -> None:
                replay()
                integration.poll()

        cells.append(milliseconds(call, CALLS, step.rewind))
    return cells


def prefills(model: nn.Module) -> Milliseconds:
    """Milliseconds of a prompt for each of `PROMPTS`."""
    cells: Milliseconds = []
    for tokens in PROMPTS:
        generator = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(model.config.vocab_size, (1, tokens), generator=generator).to(DEVICE)
        cells.append(milliseconds(lambda ids=ids: model(ids, use_cache=False, logits_to_keep=1), 2))
    return cells


def check(model: nn.Module, want: Tensor) -> None:
    """Raise RuntimeError unless most logits of `model` are `want`: in bf16, near ties route some
    tokens elsewhere.
    """
    got = model(torch.arange(32, device=DEVICE)[None], use_cache=False).logits
    # The median, since near ties route some tokens elsewhere.
    error = (got - want).abs().float().median() / want.abs().max()
    if error > 2e-2:
        raise RuntimeError(f"the logits are not those of one process: median error {error:.3g}")


def rows() -> Iterator[tuple[str, str, Milliseconds]]:
    """Who, how, and milliseconds by `BATCHES` and `PROMPTS`."""
    no_prefill: Milliseconds = [None] * len(PROMPTS)
    # What one process gives is what every spread model must give.
    alone = make_model("grouped_mm")
    want = alone(torch.arange(32, device=DEVICE)[None], use_cache=False).logits
    del alone
    # epmoe both ways, in its ordinary and in its static mode.
    entries = {
        "experts function": make_model("epmoe"),
        "EP implementation": spread_experts(make_model("grouped_mm"), "epmoe"),
    }
    for name, model in entries.items():
        integration.configure(static=False, max_num_tokens_per_rank=1024)  # the default again
        check(model, want)
        yield f"**epmoe**, {name}", "eager", decode_steps(model, captured=False) + prefills(model)
        integration.configure(static=True, max_num_tokens_per_rank=max(*BATCHES, 32))
        check(model, want)
        yield "", "static, eager", decode_steps(model, captured=False) + no_prefill
        if ON_GPUS:
            yield "", "static, captured", decode_steps(model, captured=True) + no_prefill
    del entries, model
    integration.close()
    # What remains of a step without experts: no exchange can be faster.
    without = make_model("none")
    yield "without experts", "eager", decode_steps(without, captured=False) + no_prefill
    if ON_GPUS:
        yield "", "captured", decode_steps(without, captured=True) + no_prefill
    del without
    # Last the exchange of transformers itself.
    model = spread_experts(make_model("grouped_mm"), "all_to_all")
    check(model, want)
    yield "transformers' all_to_all", "eager", decode_steps(model, captured=False) + prefills(model)


def main() -> None:
    """Measure, print the table, and write the JSON file that the command line names."""
    if ON_GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPUS else "cpu:gloo")
    table: list[list[object]] = []
    # Every row is printed as soon as it is measured.
    with torch.no_grad():
        for who, how, cells in rows():
            table.append([who, how, *cells])
            if dist.get_rank() == 0:
                print(who, how, *cells, flush=True)
    if dist.get_rank() == 0:
        # The table, in the order of `rows`.
        names = [f"decode, batch {batch}" for batch in BATCHES] + [
            f"prefill, {tokens:,} tokens" for tokens in PROMPTS
        ]
        render.publish(
            "-m benchmarks.transformers_step",
            f"transformers, {'4 layers of Qwen3-30B-A3B' if ON_GPUS else 'a tiny model'}",
            (
                f"ms of a step. A batch counts sequences of a rank, each with {CONTEXT} tokens of "
                "context."
            ),
            [{"name": "who"}, {"name": "how"}, *({"name": name, "unit": "ms"} for name in names)],
            table,
            next(map(Path, sys.argv[1:]), None),
        )
    integration.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
