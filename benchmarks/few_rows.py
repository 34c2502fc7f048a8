"""µs of experts that have a few rows each, by kernel: the tables of "Experts with few rows" in
docs/experiments.md.

    python -m benchmarks.few_rows [--zipf] [CONFIG ...]

Experts alone of one of two ranks, on one GPU. A graph has several layers, so that weights are cold,
and a routing for each; kernels take turns. A cell has the times of `names_of` the dtype, after
outputs that were NaN have agreed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from epmoe import EPConfig, permute
from epmoe.bench.timing import captured, elapsed_us
from epmoe.local.gemm.gemm import SWIGLU, Segments, Weights
from epmoe.local.gemm.table import GEMMS
from epmoe.local.quantize import quantize_fp8
from epmoe.local.simulate import Kind, simulate_logits
from epmoe.native.arguments import FP8

CONFIGS = "h200x2_qwen3_30b", "h200x8_qwen3_235b", "h200x8_deepseek_v3", "h200x4_gpt_oss_120b"
COUNTS = (0.0625, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)  # rows of an expert, on average
FEW = "few_rows"
ALIGNMENT = 64
WEIGHTS_BYTES = 2 << 30
REPLAYS = 9
MOST_OFF = 0.05  # between the products each rounds to fp8 with scales of its own
Call = tuple[Weights, Tensor, Tensor | None, Segments]
"""of `Gemm.experts`"""


def names_of(dtype: torch.dtype) -> tuple[str, ...]:
    """The kernels that take turns; all must agree with the last."""
    if dtype == FP8:
        return FEW, "fused_experts", "deep_gemm"
    return FEW, "few_rows_by_tma", "deep_gemm"


def weights_of(e: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """[e, n, k], and scales of blocks for fp8."""
    if dtype != FP8:
        return torch.randn(e, n, k, dtype=dtype) / k**0.5, None
    # Random bits, without the ones that make large values or NaN.
    codes = torch.randint(256, (e, n, k), dtype=torch.uint8) & 0xB7  # values below 2, no NaN
    return codes.view(FP8), torch.rand(e, n // 128, k // 128) / k**0.5


def routed(weights: Weights, T: int, E: int, K: int, kind: Kind, seed: int) -> tuple[Call, Tensor]:
    """A call of the first half of the experts with rows of 2 · T tokens, and the indices of its
    real rows.
    """
    # The routing is drawn on the CPU, where one seed has the same bits everywhere.
    (e, D, _) = weights.down.shape
    dtype = weights.down.dtype
    with torch.device("cpu"):
        ids = simulate_logits(kind, 2 * T, E, seed=seed).topk(K).indices.to(weights.down.device)
    # This rank holds the first experts; rows of the others are left out.
    expert_map = torch.arange(E, dtype=torch.int32)
    expert_map[e:] = -1
    given = permute(
        torch.randn(2 * T, D, dtype=torch.bfloat16), ids, expert_map, e, alignment=ALIGNMENT
    )
    segments = Segments(given.expert_offsets, given.tokens_per_expert, ALIGNMENT, 2 * T * K / E)
    # Kernels in fp8 take rows that are quantized already.
    rows, scales = (
        (given.rows, None)
        if dtype != FP8
        else quantize_fp8(given.rows, num_tokens=segments.offsets[-1])
    )
    return (weights, rows, scales, segments), given.row_of_pair[given.row_of_pair >= 0].long()


def times(layers: Sequence[Weights], T: int, E: int, K: int, kind: Kind) -> list[float | None]:
    """µs a layer by each of `names_of` its dtype; None where it takes more than twice the least."""
    names = names_of(layers[0].down.dtype)
    calls, real = zip(
        *(routed(weights, T, E, K, kind, seed) for seed, weights in enumerate(layers)), strict=True
    )

    def serve(name: str) -> list[Tensor]:
        return [GEMMS[name].experts(*call) for call in calls]

    def replay_twice(graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()
        graph.replay()

    for name in names:  # DeepGEMM compiles in its first call
        serve(name)
    # Outputs are NaN before a replay: what a kernel does not write shows.
    graphs = [captured(partial(serve, name)) for name in names]
    outputs = []
    for graph, outs in graphs:
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        outputs.append(torch.cat([out[rows] for out, rows in zip(outs, real, strict=True)]).float())
    # All kernels must agree with the last one, up to their rounding.
    for name, got in zip(names, outputs, strict=True):
        off = (got - outputs[-1]).norm() / outputs[-1].norm()
        if not off <= MOST_OFF:
            raise RuntimeError(f"{name} is off by {off:.2g}")
    # Kernels take turns, so that clocks and temperature are the same for all.
    taken: list[list[float]] = [[] for _ in names]
    for _ in range(REPLAYS):
        for (graph, _), samples in zip(graphs, taken, strict=True):
            samples.append(elapsed_us(partial(replay_twice, graph)) / 2 / len(layers))
    # What takes twice the least is no candidate, and its cell stays empty.
    us = list(map(statistics.median, taken))
    return [each if each <= 2 * min(us) else None for each in us]


def main(arguments: Sequence[str]) -> None:
    """Print the lines of a table."""
    torch.set_default_device("cuda")
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    # Words beside the option name configurations.
    kind: Kind = "zipf" if "--zipf" in arguments else "uniform"
    for name in [each for each in arguments if each != "--zipf"] or CONFIGS:
        model = EPConfig.load(name).model
        E = model.num_experts
        K = model.num_experts_per_tok
        D = model.hidden_size
        F = model.intermediate_size
        assert F is not None
        for dtype in (FP8, torch.bfloat16):
            # A model whose sizes these kernels do not take has no line.
            if GEMMS[FEW].problem_with(
                *(torch.empty(E // 2, *shape, dtype=dtype) for shape in ((2 * F, D), (D, F)))
            ):
                continue
            # As many layers as it takes to push the weights of the first out of the cache.
            count = max(WEIGHTS_BYTES // (3 * E // 2 * D * F * dtype.itemsize), 1)
            given = [
                (*weights_of(E // 2, 2 * F, D, dtype), *weights_of(E // 2, D, F, dtype))
                for _ in range(count)
            ]
            layers = [
                Weights(gate_up, down, gate_up_scales, down_scales, None, None, SWIGLU)
                for gate_up, gate_up_scales, down, down_scales in given
            ]
            # T such that an expert of this rank has n rows on average.
            cells = [times(layers, max(int(n * E / (2 * K)), 1), E, K, kind) for n in COUNTS]
            print(f"| {name}, {str(dtype)[6:]} |", end="")
            for cell in cells:
                print(
                    "",
                    " / ".join("–" if us is None else f"{us:.4g}" for us in cell),
                    end=" |",
                    flush=True,
                )
            print(flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
