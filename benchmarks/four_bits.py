"""Experts of 4 bits beside fp8, bf16 and another library: the experts alone, and whole layers.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.four_bits MODEL [RESULT.json]

MODEL is `qwen3` (Qwen3-30B-A3B) or `gpt_oss` (gpt-oss-120b, with biases and its activation). All
experts of a layer are on the ranks of the run, each on a GPU of its own. They have the same weights
in every format, drawn in MXFP4. Times are µs, the median of replays by turns, on the slowest rank.
A graph has several routings, so that weights are cold. Outputs of all are compared with those in
bf16. fp8 has blocks of 128, so that gpt-oss's D and F are padded with zeros.
"""

from __future__ import annotations

import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import render, results
from benchmarks.humming_experts import HummingExperts
from epmoe import EPConfig, ExpertParallel, GroupedExperts
from epmoe.bench.sides import poison
from epmoe.bench.timing import captured, elapsed_us, everywhere, slowest
from epmoe.local.quantize import quantize_weights
from epmoe.local.simulate import simulate_logits
from epmoe.native import ops
from epmoe.native.arguments import FP8

TOKENS = (1, 4, 16, 64, 128, 512, 4096)
REPLAYS = 9
# Up to so many tokens some experts have no rows, and a graph needs more routings to be cold.
FEW_TOKENS = 64
# The largest difference of y from that of bf16, over its norm.
MOST_OFF = 0.15
# The largest one between two calls: humming-kernels adds parts of a sum as they come, and between
# the products the numbers are fp8.
MOST_BETWEEN_CALLS = 0.05
# How long a GPU sleeps while the host enqueues a sample, about 4 ms.
HEAD_START_CYCLES = 8_000_000
GPT_OSS = {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


class Model(NamedTuple):
    title: str
    E: int
    K: int
    D: int
    F: int
    is_gpt_oss: bool = False


MODELS = {
    "qwen3": Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    "gpt_oss": Model("gpt-oss-120b", 128, 4, 2880, 2880, is_gpt_oss=True),
}


class Who(NamedTuple):
    """One of those that are compared."""

    name: str
    rows: str
    """what travels, and what is multiplied"""
    ep: ExpertParallel
    experts: Callable[[int], Any]
    """makes the experts for calls of T tokens a rank"""


def drawn_experts(model: Model, e: int, rank: int) -> GroupedExperts:
    """Random experts in MXFP4, which make outputs about as large as rows."""
    draw = torch.Generator("cuda").manual_seed(rank)
    given: dict[str, Any] = {}
    for name, n, k in (("gate_up", 2 * model.F, model.D), ("down", model.D, model.F)):
        shape = (e, n, k // 2)
        codes = torch.randint(256, shape, generator=draw, device="cuda", dtype=torch.uint8)
        middle = 127 - round(torch.tensor(k).log2().item() / 2)
        scales = torch.randint(
            middle - 3, middle, (e, n, k // 32), generator=draw, device="cuda", dtype=torch.uint8
        )
        given[f"w_{name}"] = codes.view(torch.float4_e2m1fn_x2)
        given[f"{name}_scales"] = scales.view(torch.float8_e8m0fnu)
        if model.is_gpt_oss:
            bias = torch.randn(e, n, generator=draw, device="cuda")
            given[f"{name}_bias"] = bias.bfloat16() / 4
    return GroupedExperts(**given, **(GPT_OSS if model.is_gpt_oss else {}))


def plain_weights(experts: GroupedExperts) -> dict[str, Tensor]:
    """The weights in bf16, which has all their values."""
    return {
        name: ops.dequantize_mxfp4(
            getattr(experts, f"w_{name}"), getattr(experts, f"{name}_scales")
        )
        for name in ("gate_up", "down")
    }


def as_bf16(experts: GroupedExperts, model: Model) -> GroupedExperts:
    plain = plain_weights(experts)
    return GroupedExperts(
        plain["gate_up"],
        plain["down"],
        gate_up_bias=experts.gate_up_bias,
        down_bias=experts.down_bias,
        **(GPT_OSS if model.is_gpt_oss else {}),
    )


def padded(n: int) -> int:
    """The next multiple of a block of fp8."""
    return -(-n // 128) * 128


def as_fp8(experts: GroupedExperts, model: Model) -> GroupedExperts:
    """In blocks of 128 × 128, with zeros behind D and F."""
    D = padded(model.D)
    width = padded(model.F)
    given: dict[str, Any] = {}
    for name, plain in plain_weights(experts).items():
        n, k = (2 * width, D) if name == "gate_up" else (D, width)
        blocks = [
            quantize_weights(F.pad(of_expert, (0, k - plain.shape[2], 0, n - plain.shape[1])))
            for of_expert in plain
        ]
        given[f"w_{name}"] = torch.stack([codes.view(torch.uint8) for codes, _ in blocks]).view(FP8)
        given[f"{name}_scales"] = torch.stack([scales for _, scales in blocks])
        bias = getattr(experts, f"{name}_bias")
        if bias is not None:
            given[f"{name}_bias"] = F.pad(bias, (0, n - bias.shape[1]))
    return GroupedExperts(**given, **(GPT_OSS if model.is_gpt_oss else {}))


def make_ep(model: Model, payload: str, D: int) -> ExpertParallel:
    config = EPConfig(
        model={
            "num_experts": model.E,
            "num_experts_per_tok": model.K,
            "hidden_size": D,
            "dtype": "bfloat16",
        },
        topology={"ep_size": dist.get_world_size(), "ranks_per_node": dist.get_world_size()},
        capacity={"max_num_tokens_per_rank": max(TOKENS)},
        exchange={"payload": payload},
    )
    return ExpertParallel(config, device="cuda")


def contenders(model: Model, stack: ExitStack) -> Iterator[Who]:
    """All that are compared, that in bf16 first."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    experts = drawn_experts(model, model.E // size, rank)
    plain = stack.enter_context(make_ep(model, "auto", model.D))
    fp8 = stack.enter_context(make_ep(model, "fp8", model.D))
    bf16 = as_bf16(experts, model)
    yield Who("**epmoe**", "bf16, bf16", plain, lambda T: bf16)
    in_fp8 = as_fp8(experts, model)
    wide = fp8
    if padded(model.D) != model.D:
        wide = stack.enter_context(make_ep(model, "fp8", padded(model.D)))
    yield Who("**epmoe**", "fp8, fp8", wide, lambda T: in_fp8)
    yield Who("**epmoe**", "bf16, MXFP4", plain, lambda T: experts)
    yield Who("**epmoe**", "fp8, MXFP4", fp8, lambda T: experts)
    yield from of_humming(experts, model, plain)


def of_humming(experts: GroupedExperts, model: Model, ep: ExpertParallel) -> Iterator[Who]:
    """humming-kernels, where it is installed and computes a layer."""
    group = dist.group.WORLD
    assert group is not None
    for quantizes in (False, True):
        problem = ""
        try:
            theirs = HummingExperts(experts, in_fp8=quantizes)
            counts = [T * model.K for T in TOKENS]
            theirs.compile(counts)
            for count in counts:
                theirs.try_rows(count)
            who = Who(
                f"humming-kernels {theirs.version()}",
                "bf16, then fp8, MXFP4" if quantizes else "bf16, MXFP4",
                ep,
                partial(call_of, theirs, model.K, ep.size * model.K),
            )
        except Exception as error:
            # Whatever a library raises, the benchmark continues without it.
            problem = repr(error)
            traceback.print_exc()
        if everywhere(not problem, group):
            yield who
        elif dist.get_rank() == 0:
            print("humming-kernels was left out:", problem, flush=True)


def call_of(theirs: HummingExperts, K: int, most: int, T: int) -> Any:
    """Of a call with K rows for each of T tokens on average, and at most `most` for each."""
    return theirs.of_rows(T * K, T * most)


class Layers:
    """The layer of one contender with T tokens a rank, for several routings."""

    def __init__(self, who: Who, model: Model, T: int) -> None:
        self.who = who
        self.D = model.D
        self.experts = who.experts(T)
        self.logits: list[Tensor] = []
        self.x: list[Tensor] = []
        size = dist.get_world_size()
        own = slice(who.ep.rank * T, (who.ep.rank + 1) * T)
        for seed in range(8 if T <= FEW_TOKENS else 2):
            logits = simulate_logits("uniform", size * T, model.E, seed=seed)[own]
            x = torch.randn(size * T, model.D, generator=torch.Generator().manual_seed(seed))[own]
            self.logits.append(logits.cuda())
            wide = who.ep.config.model.hidden_size
            self.x.append(F.pad(x, (0, wide - model.D)).bfloat16().cuda())

    def layers(self) -> list[Tensor]:
        """y of each routing."""
        found = []
        ep = self.who.ep
        for logits, x in zip(self.logits, self.x, strict=True):
            routing = ep.route(logits)
            d = ep.dispatch(x, routing.ids, routing.weights, aligned=self.experts.alignment > 1)
            found.append(
                ep.combine(self.experts(d.rows, d.expert_offsets, d.scales, **d.segments), d)
            )
        return found

    def alone(self) -> Callable[[], list[Tensor]]:
        """The experts on copies of the rows that have arrived."""
        ep = self.who.ep
        calls = []
        for logits, x in zip(self.logits, self.x, strict=True):
            routing = ep.route(logits)
            d = ep.dispatch(x, routing.ids, routing.weights, aligned=self.experts.alignment > 1)
            n = int(d.expert_offsets[-1])
            given = d.segments | {"tokens_per_expert": d.tokens_per_expert.clone()}
            scales = None if d.scales is None else d.scales[:n].clone()
            # Rows that lie in wider ones keep their stride.
            rows = d.rows.new_empty(n, d.rows.stride(0))[:, : d.rows.shape[1]]
            rows.copy_(d.rows[:n])
            calls.append(partial(self.experts, rows, d.expert_offsets.clone(), scales, **given))
            ep.combine(self.experts(d.rows, d.expert_offsets, d.scales, **d.segments), d)
        return lambda: [call() for call in calls]

    def y(self) -> Tensor:
        return torch.cat([y[:, : self.D] for y in self.layers()]).float()


class Played(NamedTuple):
    """A graph of calls, what it writes, and what it must write."""

    name: str
    calls: Callable[[], list[Tensor]]
    graph: torch.cuda.CUDAGraph
    outputs: list[Tensor]
    wanted: list[Tensor]

    @classmethod
    def of(cls, name: str, calls: Callable[[], list[Tensor]]) -> Played:
        wanted = [out.clone() for out in calls()]
        graph, outputs = captured(calls)
        poison(outputs)
        return cls(name, calls, graph, outputs, wanted)

    def sample_us(self, group: dist.ProcessGroup) -> float:
        """The time of a replay, behind calls that bring the ranks into step."""
        dist.barrier(group, device_ids=[torch.cuda.current_device()])
        torch.cuda._sleep(HEAD_START_CYCLES)
        self.calls()
        return elapsed_us(self.graph.replay)

    def check(self, group: dist.ProcessGroup) -> None:
        """Raise RuntimeError on all ranks unless a replay has written what calls do."""
        off = max(map(difference, self.outputs, self.wanted))
        if not everywhere(off <= MOST_BETWEEN_CALLS, group):
            raise RuntimeError(f"{self.name}: outputs of a graph are off by {off:.3g}")


def difference(got: Tensor, wanted: Tensor) -> float:
    """Over the norm. NaN counts as a difference."""
    if not wanted.numel():
        return 0.0
    return float(((got.float() - wanted.float()).norm() / wanted.float().norm()).nan_to_num(1.0))


def us_of(who: list[Who], model: Model, T: int) -> list[float]:
    """Of each contender its layer, and then its experts alone."""
    group = dist.group.WORLD
    assert group is not None
    layers = [Layers(one, model, T) for one in who]
    ys = [each.y() for each in layers]
    for one, y in zip(who, ys, strict=True):
        off = difference(y, ys[0])
        if not everywhere(off <= MOST_OFF, group):
            raise RuntimeError(f"{one.name}, {one.rows}, {T} tokens: y is off by {off:.3g}")
    played = [
        Played.of(f"{each.who.name}, {each.who.rows}, {T} tokens", calls)
        for each in layers
        for calls in (each.layers, each.alone())
    ]
    samples = [[each.sample_us(group) for each in played] for _ in range(REPLAYS)]
    for each in played:
        each.check(group)
    count = len(layers[0].logits)
    return slowest([statistics.median(times) / count for times in zip(*samples, strict=True)])


def main() -> None:
    """Measure, print the table, and write the JSON file that the command line names."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.set_grad_enabled(False)
    name, *file = sys.argv[1:]
    model = MODELS[name]
    with ExitStack() as stack:
        who = list(contenders(model, stack))
        columns = []
        for T in TOKENS:
            columns.append(list(map(results.figure, us_of(who, model, T))))
            if dist.get_rank() == 0:
                print(f"{T} tokens:", *columns[-1], flush=True)
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            rows = [
                [what, one.name, one.rows] for one in who for what in ("layer", "experts alone")
            ]
            render.publish(
                f"-m benchmarks.four_bits {name}",
                f"experts of 4 bits, {model.title}",
                (
                    "µs of route, dispatch, experts and combine, and of the experts alone, on all "
                    f"{model.E} experts. A graph has several routings, so that weights are cold."
                ),
                [
                    *({"name": column} for column in ("what", "who", "rows and weights")),
                    *results.columns(TOKENS),
                ],
                [
                    [*row, *figures]
                    for row, figures in zip(rows, zip(*columns, strict=True), strict=True)
                ],
                next(map(Path, file), None),
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
