"""vLLM's kernel on GPUs through epmoe, compared with one rank by itself, and timed against vLLM's
own exchange.

    PYTHONPATH=.:tests/stacks torchrun --standalone --nproc-per-node 2 benchmarks/vllm_layer.py \\
        [--model qwen3] [--quant fp8] [--json FILE]

Needs vLLM 0.26.0 on the path, its native libraries included, and for the layout "layer" DeepGEMM
(the module `deep_gemm`). All contenders have the same weights and the same tokens; fp8 weights have
a scale for each block of 128 × 128. Times are µs of a layer inside CUDA graphs of ten layers: the
median over replays, on the slowest rank. `prepare`, `experts` and `finalize` come from events
inside the graph; `exchange` (prepare and finalize without experts) and `layer` from graphs without
events.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")

import torch
import torch.distributed as dist
import vllm
from torch import Tensor
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import get_ep_group, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEPrepareAndFinalizeModular
from vllm.model_executor.layers.fused_moe.prepare_finalize import (
    make_moe_prepare_and_finalize_naive_dp_ep,
)
from vllm.v1.worker.workspace import init_workspace_manager
from vllm_kernels import Layer, Model, Weights, batch, check_close, moe_config, step

from benchmarks import render, results
from epmoe.bench.timing import captured, elapsed_us, slowest
from epmoe.exchange.handles import Layout
from epmoe.integrations.vllm.choice import Choice
from epmoe.integrations.vllm.prepare_finalize import EpmoePrepareAndFinalize
from epmoe.integrations.vllm.sizes import Shape, Sizes

MODELS = {"qwen3": Model(E=128, K=8, D=2048, F=768), "deepseek": Model(E=256, K=8, D=7168, F=2048)}
# The largest first: vLLM's workspace must not grow behind a captured graph.
TOKENS = (4096, 512, 128, 16, 1)
RAGGED = (5, 0), (0, 3), (1, 1), (130, 7), (4096, 4000), (0, 0)
LAYERS = 10
REPLAYS = 30
PHASES = ("prepare", "experts", "finalize")
COLUMNS = (*PHASES, "exchange", "layer")
MarkedLayer = Callable[[Callable[[], None]], Tensor]
"""Runs one layer, calling its argument at the beginning, between the phases and at the end."""


def init() -> tuple[int, int, torch.device]:
    """vLLM's groups for data parallelism with expert parallelism, one rank a GPU."""
    # torchrun has set these.
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    # vLLM knows one data-parallel rank for each GPU, and spreads experts over all.
    parallel = ParallelConfig(
        data_parallel_size=size,
        enable_expert_parallel=True,
        distributed_executor_backend="external_launcher",
    )
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        init_distributed_environment(size, rank, "env://", rank, "nccl")
        initialize_model_parallel(1)
    init_workspace_manager(device)
    return rank, size, device


def phases(
    layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, with_experts: bool = True
) -> MarkedLayer:
    """A layer in the three parts of vLLM's own kernel; without experts, around outputs that are
    there already.
    """
    impl = layer.kernel.impl
    own = layer.weights
    config = layer.config
    kept: list[Tensor] = []

    def run(mark: Callable[[], None]) -> Tensor:
        output = torch.empty_like(x)
        mark()
        # To the ranks of the experts.
        rows, scales, counts, row_ids, row_weights = impl._prepare(
            x, weights, ids, config.num_experts, layer.expert_map, False
        )
        mark()
        # The experts; without them the way back takes rows that are there already.
        if with_experts:
            outputs = impl._fused_experts(
                x.dtype,
                rows,
                scales,
                own.w1,
                own.w2,
                row_weights,
                row_ids,
                MoEActivation.SILU,
                config.num_experts,
                config.num_local_experts,
                layer.expert_map,
                False,
                counts,
            )
        elif not kept:
            kept.append(torch.zeros(len(rows), x.shape[1], dtype=x.dtype, device=x.device))
        mark()
        # And back to the tokens.
        impl._finalize(
            output, outputs if with_experts else kept[0], x, row_weights, row_ids, False, None, None
        )
        mark()
        return output

    return run


def replayed(run: MarkedLayer, with_events: bool) -> tuple[list[float], Tensor]:
    """µs of a layer, or of its three phases, and what the last layer of the graph put out."""
    # Kernels are compiled and loaded before the graph is captured.
    for _ in range(3):
        run(lambda: None)
    torch.cuda.synchronize()
    dist.barrier()
    events: list[Any] = []

    def mark() -> None:
        events.append(torch.cuda.Event(enable_timing=True, external=True))
        events[-1].record()

    def layers() -> Tensor:
        for _ in range(LAYERS):
            output = run(mark if with_events else lambda: None)
        return output

    # A graph of several layers: one alone would measure its launch.
    graph, output = captured(layers)
    times: list[list[float]] = []
    for number in range(REPLAYS + 5):
        # The last replay writes into NaN: what it leaves out shows.
        if number == REPLAYS + 4:
            output.fill_(float("nan"))
        # The first replays warm up.
        layers_us = elapsed_us(graph.replay)
        if number < 5:
            continue
        # Without events only the whole graph has a time.
        if not with_events:
            times.append([layers_us / LAYERS])
            continue
        for i in range(4, len(events), 4):  # the first layer waits for the other rank's start
            times.append(
                [1000 * a.elapsed_time(b) for a, b in itertools.pairwise(events[i : i + 4])]
            )
    return slowest(
        [median(column) for column in zip(*times, strict=True)], get_ep_group().cpu_group
    ), output


def contenders(
    model: Model, payload: str, device: torch.device
) -> dict[str, FusedMoEPrepareAndFinalizeModular]:
    group = get_ep_group().cpu_group

    def sizes(layout: Layout, aligned: bool = False) -> Sizes:
        shape = Shape(
            model.E, model.K, model.D, torch.bfloat16, TOKENS[0], "linear", payload, layout, aligned
        )
        return Sizes.make(shape, group, device, Choice())

    return {
        "epmoe layer": EpmoePrepareAndFinalize(
            sizes("expert", aligned=True), "layer", aligned=True
        ),
        "epmoe rank": EpmoePrepareAndFinalize(sizes("rank"), "rank"),
        "all-gather": make_moe_prepare_and_finalize_naive_dp_ep(
            use_monolithic=False, num_dispatchers=group.size()
        ),
    }


def check_ragged(model: Model, layer: Layer, alone: Layer, rank: int, what: str) -> None:
    """Outputs are those of one rank by itself, whatever the ranks bring. vLLM's all-gather knows no
    idle ranks.
    """
    by_epmoe = isinstance(layer.kernel.prepare_finalize, EpmoePrepareAndFinalize)
    for number, tokens in enumerate(RAGGED if by_epmoe else RAGGED[2:5]):
        # Each rank brings another number of tokens, or none.
        x, ids, weights = batch(
            model, tokens[rank % 2], 10 * number + rank, layer.weights.w1.device
        )
        with step([tokens[r % 2] for r in range(layer.config.ep_size)]):
            y = layer(x, ids, weights)
            check_close(
                y,
                alone(x, ids, weights) if len(x) else x,
                f"{what} {tokens} rank {rank}",
                layer.slack,
            )


def time_layer(layer: Layer, inputs: tuple[Tensor, Tensor, Tensor], what: str) -> dict[str, float]:
    """µs by COLUMNS. Outputs of replays are those of an eager call."""
    expected = layer(*inputs).clone()
    # Once with events between the phases, which cost time themselves.
    parts, output = replayed(phases(layer, *inputs), with_events=True)
    check_close(output, expected, f"{what}, events")
    # Once without, which is the time of the layer.
    whole, output = replayed(phases(layer, *inputs), with_events=False)
    check_close(output, expected, what)
    # And once without experts.
    exchange, _ = replayed(phases(layer, *inputs, with_experts=False), with_events=False)
    return dict(zip(COLUMNS, (*parts, *exchange, *whole), strict=True))


@torch.inference_mode()
def measure(
    model: Model, quant: str, rank: int, size: int, device: torch.device, checks_only: bool
) -> list[dict[str, Any]]:
    # All weights on each rank: one of them alone says what is right.
    everything = Weights.random(model, quant == "fp8", device)
    alone = Layer(moe_config(model, 0, 1, TOKENS[0], device), everything)
    mine = everything.of_rank(rank, size)
    rows = []
    for name, exchange in contenders(model, "fp8" if quant == "fp8" else "auto", device).items():
        layer = Layer(moe_config(model, rank, size, TOKENS[0], device), mine, exchange)
        who = {"exchange_by": name, "gemm": layer.gemm, "dtype": quant}
        what = ", ".join(who.values())
        # Nothing is timed that is not right.
        check_ragged(model, layer, alone, rank, what)
        say(f"{what}: ragged batches equal one rank by itself")
        for T in () if checks_only else TOKENS:
            with step([T] * size):
                us = time_layer(layer, batch(model, T, rank, device), f"{what}, T={T}")
            say(f"{what}, T={T}: " + ", ".join(f"{column} {us[column]:.1f}" for column in COLUMNS))
            rows.append(who | {"T": T} | us)
    return rows


def cells(rows: list[dict[str, Any]]) -> list[list[object]]:
    """µs by T, a row for each dtype, column and contender."""
    by_case: dict[tuple[str, ...], dict[int, float]] = {}
    for column, row in itertools.product(COLUMNS, rows):
        # A row for each column and contender, T by T.
        case = row["dtype"], column, row["exchange_by"], row["gemm"]
        by_case.setdefault(case, {})[row["T"]] = results.figure(row[column])
    return [[*case, *(us[T] for T in reversed(TOKENS))] for case, us in by_case.items()]


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--quant", choices=("bf16", "fp8", "both"), default="both")
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rank, size, device = init()
    rows = []
    # A data type at a time: the weights of the former one leave the GPU first.
    for quant in ("bf16", "fp8") if options.quant == "both" else (options.quant,):
        rows += measure(MODELS[options.model], quant, rank, size, device, options.checks_only)
        torch.cuda.empty_cache()
    # One rank writes what all have measured.
    if rows and rank == 0:
        render.publish(
            f"benchmarks/vllm_layer.py --model {options.model} --quant {options.quant}",
            f"a layer of vLLM {vllm.__version__}, {options.model}",
            "µs of a layer inside CUDA graphs of ten.",
            [
                *({"name": name} for name in ("dtype", "µs of", "who", "experts")),
                *results.columns(TOKENS[::-1]),
            ],
            cells(rows),
            options.json,
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
