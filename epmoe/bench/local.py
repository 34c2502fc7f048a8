"""Times the local kernels on one GPU: `python -m epmoe.bench.local [--json FILE]`.

A CUDA graph holds several calls, each with its own inputs and outputs: together ten times the L2 cache where the sizes
allow. A figure is the median over replays of the time of a call. Outputs are poisoned before and compared after the
replays. `target` is the figure to reach on an H200, `peer` the figure of vLLM 0.33.0 there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epmoe
from epmoe.bench.sides import poison
from epmoe.extras import explain

D, K = 7168, 8
ROTATED_BYTES = 600 << 20  # inputs and outputs of a graph: more than ten times the 50 MB of an H200's L2 cache
COPY_BYTES_PER_US = 4262e3  # of a plain copy on an H200, read plus written


@dataclass(frozen=True)
class Case:
    """One row of the table. `call(i)` runs on the i-th of `sets` inputs; `check(i, result)` raises if it is wrong."""

    kernel: str
    tokens: int
    target: float | None
    peer: float | None
    bytes: int
    sets: int
    call: Callable[[int], Any]
    check: Callable[[int, Any], None]


def sets_for(num_bytes: int) -> int:
    """How many sets of inputs a graph gets, each call moving `num_bytes`."""
    return max(3, min(64, ROTATED_BYTES // num_bytes))


def graph_us(call: Callable[[int], Any], sets: int, replays: int = 30) -> tuple[float, list[Any]]:
    """Median microseconds a call, over replays of a graph of one call for each set, and the calls' results."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        rounds = max(1, 16 // sets)
        with torch.cuda.graph(graph, stream=stream):
            results = [call(i) for _ in range(rounds) for i in range(sets)]
        for result in results:
            tensors = result if isinstance(result, tuple) else (result,)
            poison(tensor for tensor in tensors if isinstance(tensor, Tensor))
        times = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (rounds * sets))
    return statistics.median(times[3:]), results[:sets]


def route_cases() -> Iterator[Case]:
    plain: dict[int, dict[int, tuple[float | None, float | None]]] = {
        256: {1: (2.2, 3.71), 128: (2.3, 4.14), 512: (2.5, 4.43), 4096: (6, 13.15), 16384: (14, 32.71)},
        128: {1: (2.1, 3.43), 128: (None, 3.79), 512: (None, 3.86), 4096: (4, 5.74), 16384: (9, 16.41)},
    }
    for E, sizes in plain.items():
        for T, (target, peer) in sizes.items():
            yield route_case(f"route softmax E={E}", T, E, target, peer)
            if E == 256:
                yield route_case("route softmax E=256, all NaN", T, E, None, None, fill=torch.nan)
    for T in (128, 4096):
        bias = torch.rand(256, device="cuda") * 0.2
        options: dict[str, Any] = {
            "scoring": "sigmoid",
            "bias": bias,
            "num_expert_groups": 8,
            "top_groups": 4,
            "renormalize": True,
        }
        yield route_case("route sigmoid, bias, 8 groups top 4", T, 256, None, None, **options)


def route_case(
    name: str, T: int, E: int, target: float | None, peer: float | None, fill: float | None = None, **options: Any
) -> Case:
    num_bytes = T * (2 * E + 8 * K)
    logits = [torch.randn(T, E, device="cuda").bfloat16() for _ in range(sets_for(num_bytes))]
    if fill is not None:
        logits = [x.fill_(fill) for x in logits]

    def check(i: int, got: epmoe.Routing) -> None:
        cpu: dict[str, Any] = {
            name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()
        }
        want = epmoe.route(logits[i].cpu(), K, **cpu)
        assert torch.equal(got.ids.cpu(), want.ids)
        torch.testing.assert_close(got.weights.cpu(), want.weights, rtol=4e-6, atol=0)

    return Case(name, T, target, peer, num_bytes, len(logits), lambda i: epmoe.route(logits[i], K, **options), check)


def layer_inputs(T: int, num_bytes: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """For each set: x [T, D] bf16 and ids int32 [T, K]; and the expert map of a rank that owns all 256 experts."""
    sets = sets_for(num_bytes)
    x = [torch.randn(T, D, device="cuda").bfloat16() for _ in range(sets)]
    ids = [torch.rand(T, 256, device="cuda").argsort(1)[:, :K].int() for _ in range(sets)]
    return x, ids, torch.arange(256, dtype=torch.int32, device="cuda")


def permute_cases() -> Iterator[Case]:
    table = {1: (6, 11.0), 128: (10, 18.0), 512: (24, 40.4), 4096: (150, 243.8), 8192: (295, 470)}
    for T, (target, peer) in table.items():
        num_bytes = T * (1 + K) * D * 2
        x, ids, expert_map = layer_inputs(T, num_bytes)

        def check(i: int, got: epmoe.Permuted, x: list = x, ids: list = ids) -> None:
            order = ids[i].flatten().long().argsort(stable=True)
            assert torch.equal(got.row_of_pair.flatten().long()[order], torch.arange(ids[i].numel(), device="cuda"))
            assert torch.equal(got.rows, x[i][order // K])

        def call(i: int, x: list = x, ids: list = ids, expert_map: Tensor = expert_map) -> epmoe.Permuted:
            return epmoe.permute(x[i], ids[i], expert_map, 256)

        yield Case("permute 7168, top-8, E=256", T, target, peer, num_bytes, len(x), call, check)


def finalize_cases() -> Iterator[Case]:
    table = {1: (4, 9.3), 128: (6.5, 9.8), 512: (20, 24.9), 4096: (130, 132.4), 8192: (255, 257)}
    for T, (target, peer) in table.items():
        num_bytes = T * (1 + K) * D * 2
        x, ids, expert_map = layer_inputs(T, num_bytes)
        permuted = [epmoe.permute(*inputs, expert_map, 256) for inputs in zip(x, ids, strict=True)]
        weights = torch.rand(T, K, device="cuda")

        def check(i: int, got: Tensor, x: list = x, weights: Tensor = weights) -> None:
            want = weights.sum(1, keepdim=True) * x[i].float()
            torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)

        def call(i: int, permuted: list = permuted, weights: Tensor = weights) -> Tensor:
            return epmoe.finalize(permuted[i].rows, permuted[i], weights)

        yield Case("finalize, the same", T, target, peer, num_bytes, len(x), call, check)


def activation_cases() -> Iterator[Case]:
    """bf16 rows of experts of width 2048, among 8192 rows or more, of which T·K are real."""
    width = 2048
    for quantize, name in ((False, "SwiGLU, width 2048"), (True, "SwiGLU to fp8, width 2048")):
        for T in (1, 128, 512, 4096):
            real = T * K
            num_bytes = real * width * (4 + (1 if quantize else 2))
            shape = (max(real, 8192), 2 * width)
            rows = [torch.randn(*shape, device="cuda").bfloat16() for _ in range(sets_for(num_bytes))]
            offsets = torch.tensor([0, real], dtype=torch.int32, device="cuda")

            def call(i: int, rows: list = rows, offsets: Tensor = offsets, quantize: bool = quantize) -> Any:
                swiglu = False, math.inf, 1.0, 0.0
                return epmoe.native.ops.gated_activation(rows[i], offsets, None, None, *swiglu, quantize)

            def check(i: int, got: Any, rows: list = rows, real: int = real) -> None:
                out, scales = got[0][:real].float(), got[1][:real]
                gate, up = rows[i][:real].float().chunk(2, dim=1)
                want = torch.nn.functional.silu(gate) * up
                if len(scales):
                    out = (out.unflatten(1, (-1, 128)) * scales[..., None]).flatten(1)
                limit = 2**-4 if len(scales) else 2**-8
                assert ((out - want).abs() <= limit * want.abs() + 0.02).all()

            yield Case(name, T, None, None, num_bytes, len(rows), call, check)


def run() -> Iterator[tuple[Case, float]]:
    """Time every case in microseconds a call, and check its results."""
    for cases in (route_cases, permute_cases, finalize_cases, activation_cases):
        for case in cases():
            us, results = graph_us(case.call, case.sets)
            for i, result in enumerate(results):
                case.check(i, result)
            yield case, us


def main() -> None:
    """Print a row for each case, where "!" marks a missed target, and write `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the timings to this file")
    path = parser.parse_args().json
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError as error:
        parser.error(explain(error) or str(error))
    table = Table("kernel", title=f"{torch.cuda.get_device_name()}, µs a call")
    for column in ("tokens", "µs", "target", "peer", "bytes' floor"):
        table.add_column(column, justify="right")
    timings = []
    for case, us in run():
        floor = case.bytes / COPY_BYTES_PER_US
        missed = case.target is not None and us > case.target
        figures = (f"{us:.2f}{' !' if missed else ''}", case.target, case.peer, f"{floor:.2f}")
        table.add_row(case.kernel, str(case.tokens), *("–" if f is None else str(f) for f in figures))
        timing = {"kernel": case.kernel, "tokens": case.tokens, "us": us, "target": case.target, "peer": case.peer}
        timings.append(timing | {"floor": floor})
    Console(width=120).print(table)
    if path:
        path.write_text(json.dumps(timings, indent=1))


if __name__ == "__main__":
    main()
