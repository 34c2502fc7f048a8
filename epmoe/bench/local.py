"""Times the local kernels on one GPU: `python -m epmoe.bench.local [--json FILE]`.

A CUDA graph holds several calls, each with its own inputs and outputs: together ten times the L2 cache where the sizes
allow. A figure is the median over replays of the time of a call. Outputs are poisoned before and compared after the
replays.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.bench.sides import poison
from epmoe.bench.timing import captured, elapsed_us
from epmoe.local.finalize import finalize
from epmoe.local.permute import Permuted, permute
from epmoe.local.route import Routing, route
from epmoe.native import ops
from epmoe.native.package import explain

D, K, WIDTH, REPLAYS = 7168, 8, 2048, 30
ROTATED_BYTES = 600 << 20  # inputs and outputs of a graph: more than ten times the 50 MB of an H200's L2 cache
COPY_BYTES_PER_US = 4262e3  # of a plain copy on an H200, read plus written
ROUTED, MOVED = (1, 128, 512, 4096, 16384), (1, 128, 512, 4096, 8192)  # T


class Kernel(NamedTuple):
    """One row of the table. `call` takes each of `inputs`; `check(input, result)` raises if the result is wrong."""

    name: str
    tokens: int
    bytes: int
    inputs: list[Any]
    call: Callable[[Any], Any]
    check: Callable[[Any, Any], None]

    def us(self) -> float:
        """Median microseconds a call, over replays of a graph of calls for each input."""
        with torch.cuda.stream(torch.cuda.Stream()):
            self.call(self.inputs[0])
            rounds = max(1, 16 // len(self.inputs))
            graph, results = captured(lambda: [self.call(given) for _ in range(rounds) for given in self.inputs])
            for result in results:
                tensors = result if isinstance(result, tuple) else (result,)
                poison(tensor for tensor in tensors if isinstance(tensor, Tensor))
            times = [elapsed_us(graph.replay) / len(results) for _ in range(REPLAYS)]
        for given, result in zip(self.inputs, results, strict=False):
            self.check(given, result)
        return statistics.median(times[3:])


def kernels() -> Iterator[Kernel]:
    """All rows of the table."""
    for E in (256, 128):
        for T in ROUTED:
            yield routing(f"route softmax E={E}", T, E)
            if E == 256:
                yield routing("route softmax E=256, all NaN", T, E, fill=torch.nan)
    groups: dict[str, Any] = {"num_expert_groups": 8, "top_groups": 4}
    for T in (128, 4096):
        bias = torch.rand(256, device="cuda") * 0.2
        name = "route sigmoid, bias, 8 groups top 4"
        yield routing(name, T, 256, scoring="sigmoid", bias=bias, renormalize=True, **groups)
    yield from map(permutation, MOVED)
    yield from map(finalization, MOVED)
    for quantize in (False, True):
        yield from (activation(T, quantize) for T in (1, 128, 512, 4096))


def several(make: Callable[[], Any], num_bytes: int) -> list[Any]:
    """The inputs of a graph whose calls move `num_bytes` each."""
    return [make() for _ in range(max(3, min(64, ROTATED_BYTES // num_bytes)))]


def routing(name: str, T: int, E: int, fill: float | None = None, **options: Any) -> Kernel:
    def logits() -> Tensor:
        drawn = torch.randn(T, E, device="cuda").bfloat16()
        return drawn if fill is None else drawn.fill_(fill)

    def check(given: Tensor, got: Routing) -> None:
        cpu: dict[str, Any] = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
        want = route(given.cpu(), K, **cpu)
        assert torch.equal(got.ids.cpu(), want.ids)
        torch.testing.assert_close(got.weights.cpu(), want.weights, rtol=4e-6, atol=0)

    num_bytes = T * (2 * E + 8 * K)
    return Kernel(name, T, num_bytes, several(logits, num_bytes), partial(route, top_k=K, **options), check)


def tokens(T: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """x [T, D] bf16, ids int32 [T, K], and the expert map of a rank that owns all 256 experts."""
    x = torch.randn(T, D, device="cuda").bfloat16()
    ids = torch.rand(T, 256, device="cuda").argsort(1)[:, :K].int()
    return x, ids, torch.arange(256, dtype=torch.int32, device="cuda"), 256


def permutation(T: int) -> Kernel:
    def check(given: tuple[Tensor, Tensor, Tensor, int], got: Permuted) -> None:
        x, ids, *_ = given
        order = ids.flatten().long().argsort(stable=True)
        assert torch.equal(got.row_of_pair.flatten().long()[order], torch.arange(ids.numel(), device="cuda"))
        assert torch.equal(got.rows, x[order // K])

    num_bytes = T * (1 + K) * D * 2
    inputs = several(partial(tokens, T), num_bytes)
    return Kernel("permute 7168, top-8, E=256", T, num_bytes, inputs, lambda given: permute(*given), check)


def finalization(T: int) -> Kernel:
    weights = torch.rand(T, K, device="cuda")

    def permuted() -> tuple[Tensor, Permuted]:
        given = tokens(T)
        return given[0], permute(*given)

    def check(given: tuple[Tensor, Permuted], got: Tensor) -> None:
        want = weights.sum(1, keepdim=True) * given[0].float()
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)

    def call(given: tuple[Tensor, Permuted]) -> Tensor:
        return finalize(given[1].rows, given[1], weights)

    num_bytes = T * (1 + K) * D * 2
    return Kernel("finalize, the same", T, num_bytes, several(permuted, num_bytes), call, check)


def activation(T: int, quantize: bool) -> Kernel:
    """bf16 rows of experts of width 2048, among 8192 rows or more, of which T·K are real."""
    real = T * K
    offsets = torch.tensor([0, real], dtype=torch.int32, device="cuda")

    def call(rows: Tensor) -> Any:
        return ops.gated_activation(rows, offsets, None, None, False, math.inf, 1.0, 0.0, quantize)

    def check(rows: Tensor, got: Any) -> None:
        out, scales = got[0][:real].float(), got[1].t()[:real]  # which lie block by block
        gate, up = rows[:real].float().chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
        if len(scales):
            out = (out.unflatten(1, (-1, 128)) * scales[..., None]).flatten(1)
        limit = 2**-4 if len(scales) else 2**-8
        assert ((out - want).abs() <= limit * want.abs() + 0.02).all()

    num_bytes = real * WIDTH * (5 if quantize else 6)
    rows = several(lambda: torch.randn(max(real, 8192), 2 * WIDTH, device="cuda").bfloat16(), num_bytes)
    return Kernel(f"SwiGLU{' to fp8' if quantize else ''}, width {WIDTH}", T, num_bytes, rows, call, check)


def main() -> None:
    """Print a row for each kernel and T, and write `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the timings to this file")
    path = parser.parse_args().json
    try:
        from rich.console import Console

        from epmoe.bench.report import Column, Report
    except ModuleNotFoundError as error:
        parser.error(explain(error) or str(error))
    columns = (
        Column("kernel", "kernel"),
        Column("tokens", "T", "tokens"),
        Column("us", "µs", "µs a call", "{:.2f}".format),
        Column("floor", "bytes' floor", "µs of a copy of as many bytes", "{:.2f}".format),
    )
    results = [
        {"kernel": k.name, "tokens": k.tokens, "us": k.us(), "floor": k.bytes / COPY_BYTES_PER_US} for k in kernels()
    ]
    report = Report("local", columns, results, plotted=("us",))
    Console(width=120).print(report.table(torch.cuda.get_device_name()))
    if path:
        report.write_json(path)


if __name__ == "__main__":
    main()
