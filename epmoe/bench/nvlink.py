"""Times a round of the exchange over NVLink beside NCCL's `all_to_all_single` of the same rows, in one run.

    torchrun --standalone --nproc-per-node 4 -m epmoe.bench.nvlink

A pair is dispatch to expert-major rows and combine from expert-major outputs. A graph of pairs is replayed behind a
sleeping kernel and one pair that brings the ranks into step; a figure is the median over replays on the slowest rank.
NCCL moves the rows that cross to other ranks, both ways, without sorting, counting or summing anything. The output of a
round is checked first.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from epmoe.config import EPConfig
from epmoe.service import ExpertParallel
from epmoe.simulate import simulate_routing
from epmoe.stages.dispatch import Dispatched
from epmoe.stages.quantize import dequantize_rows

TOKENS = (1, 16, 64, 128, 512, 4096)
PAIRS, REPLAYS, CALLS = 10, 15, 100
SLEEP_CYCLES = 2_000_000  # about 1 ms, in which the host gets ahead


@dataclasses.dataclass(frozen=True)
class Result:
    """One T: microseconds a pair and of the host a call, and the bytes that leave the busiest rank each way."""

    tokens: int
    pair: float
    nccl: float
    host_dispatch: float
    host_combine: float
    wire_bytes: float


def measure(ep: ExpertParallel, tokens: int) -> Result:
    """Collective: every rank calls it and gets the same figures."""
    model = ep.config.model
    generator = torch.Generator().manual_seed(ep.rank)
    x = torch.randn(tokens, model.hidden_size, generator=generator).to(ep.device, model.torch_dtype)
    ids, weights = simulate_routing(
        "uniform", tokens, model.num_experts, model.num_experts_per_tok, seed=ep.rank, id_dtype=torch.int32
    )
    ids, weights = ids.to(ep.device), weights.to(ep.device)
    _check_round(ep, x, ids, weights)
    before = ep.health().rows_sent
    d = ep.dispatch(x, ids, weights)
    outputs = torch.randn(d.rows.shape[0], x.shape[1], device=ep.device, dtype=x.dtype)
    ep.combine(outputs, d)
    sent = [after - then for after, then in zip(ep.health().rows_sent, before, strict=True)]

    def pair() -> None:
        ep.combine(outputs, ep.dispatch(x, ids, weights))

    remote = sum(rows for rank, rows in enumerate(sent) if rank != ep.rank) * x.shape[1] * x.itemsize
    figures = torch.tensor(
        [_graph_us(pair), _graph_us(_all_to_all(x, sent)), *_host_us(ep, x, ids, weights, outputs), float(remote)]
    )
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    ep.check()
    return Result(tokens, *figures.tolist())


def _check_round(ep: ExpertParallel, x: Tensor, ids: Tensor, weights: Tensor) -> None:
    """With experts that return their rows, y is x times the sum of its weights, to the precision of the wire."""
    d = ep.dispatch(x, ids, weights)
    y = ep.combine(_dequantised(d), d)
    torch.testing.assert_close(y.float(), x.float() * weights.sum(1, keepdim=True), rtol=0.1, atol=0.1)


def _dequantised(d: Dispatched) -> Tensor:
    scales = getattr(d, "scales", None)
    return d.rows if scales is None else dequantize_rows(d.rows, scales, d.dtype)


def _all_to_all(x: Tensor, rows_to: list[int]) -> Callable[[], None]:
    counts = torch.tensor(rows_to)
    counts[dist.get_rank()] = 0
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    there, back = counts.tolist(), arriving.tolist()
    out = torch.randn(sum(there), x.shape[1], device=x.device).to(x.dtype)
    received = torch.empty(sum(back), x.shape[1], dtype=x.dtype, device=x.device)

    def pair() -> None:
        dist.all_to_all_single(received, out, back, there)
        dist.all_to_all_single(out, received, there, back)

    return pair


def _graph_us(pair: Callable[[], None]) -> float:
    pair()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(PAIRS):
            pair()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier(device_ids=[torch.cuda.current_device()])
        torch.cuda._sleep(SLEEP_CYCLES)
        pair()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / PAIRS)
    return statistics.median(times)


def _host_us(ep: ExpertParallel, x: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> tuple[float, float]:
    """Of an eager dispatch and an eager combine, while the GPU is behind."""
    dispatch = combine = 0.0
    torch.cuda.synchronize()
    torch.cuda._sleep(50 * SLEEP_CYCLES)
    for _ in range(CALLS):
        start = time.perf_counter()
        d = ep.dispatch(x, ids, weights)
        middle = time.perf_counter()
        ep.combine(outputs, d)
        combine += time.perf_counter() - middle
        dispatch += middle - start
    torch.cuda.synchronize()
    return dispatch * 1e6 / CALLS, combine * 1e6 / CALLS


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    view = Table(title=f"EP{dist.get_world_size()}, hidden 7168, 256 experts, top-8, uniform, bf16; µs")
    for column in ("T", "payload", "pair", "NCCL, rows only", "host: dispatch + combine", "wire GB/s each way"):
        view.add_column(column, justify="right")
    payloads = (("auto", "auto"), ("fp8", "auto"), ("fp8", "fp8"))
    for (payload, combine_payload), tokens in itertools.product(payloads, TOKENS):
        config = EPConfig(
            model={"num_experts": 256, "num_experts_per_tok": 8, "hidden_size": 7168},
            topology={"ep_size": dist.get_world_size()},
            capacity={"max_num_tokens_per_rank": tokens, "max_expert_rows": 16 * tokens + 64},
            exchange={"transport": "nvlink", "payload": payload, "combine_payload": combine_payload},
        )
        with ExpertParallel(config) as ep:
            r = measure(ep, tokens)
        wire = f"{2e-3 * r.wire_bytes / r.pair:.0f}" if payload == "auto" else ""
        names = f"{payload} / {combine_payload}".replace("auto", "bf16")
        host = f"{r.host_dispatch:.0f} + {r.host_combine:.0f}"
        view.add_row(f"{tokens}", names, f"{r.pair:.1f}", f"{r.nccl:.1f}", host, wire)
    if dist.get_rank() == 0:
        Console(width=120).print(view)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
