"""Times forward and backward: the exchange alone, torch's all-to-all in its place, and a layer beside its experts.

On GPUs a CUDA graph of passes is replayed; all-to-all reads its counts on the host, so it runs eagerly, from events. On
the CPU all are wall times after a barrier. The gradients of a replay must equal an eager pass bit by bit, and those of
all-to-all must be close.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from epmoe.bench.graphs import SLEEP_CYCLES, slowest
from epmoe.bench.report import Job, Line, Report, microseconds
from epmoe.bench.sample import Sample
from epmoe.local.experts import GroupedExperts
from epmoe.native.arguments import FP8
from epmoe.service import ExpertParallel
from epmoe.training import TrainingExchange
from epmoe.training.exchange import Payload as TrainingPayload
from epmoe.training.exchange import WeightsOn

TOKENS = (1, 16, 128, 512, 4096)
_ROUNDS, _EAGER = 8, 5  # passes of a graph, and of an eager sample
_CAPTION = (
    "µs of forward and backward on the slowest rank, median. rows, combine: the exchange, with weights on rows or in "
    "combine; all-to-all: torch's, rows in the order of experts, eager; layer: dispatch, experts and combine, weights "
    "on both; experts: alone, on the same rows; share: of the exchange, of what the experts take"
)
_UNITS = {
    "tokens": "tokens of a rank",
    "rows": "µs of dispatch and combine, forward and backward, weights on rows",
    "combine": "the same with weights in combine",
    "all_to_all": "the same over torch.distributed's all_to_all_single, with a sort and weights behind it, eager",
    "layer": "µs of dispatch, experts and combine, forward and backward",
    "experts": "µs of the experts alone",
    "share": "rows / experts",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """One T; times in microseconds on the slowest rank. Those of experts are None without `model.intermediate_size`."""

    tokens: int
    rows: float
    combine: float
    all_to_all: float
    layer: float | None
    experts: float | None

    @property
    def share(self) -> float | None:
        """What the exchange takes, of what the experts take."""
        return None if self.experts is None else self.rows / self.experts


Pass = Callable[[], Sequence[Tensor]]
"""Forward and backward; returns gradients."""


class Case:
    """T tokens of this rank, their routing, and as many rows as arrive here."""

    def __init__(
        self,
        ep: ExpertParallel,
        sample: Sample,
        experts: GroupedExperts | None,
        group: dist.ProcessGroup,
        payload: TrainingPayload,
    ) -> None:
        self.exchange, self.experts = TrainingExchange(ep, payload=payload), experts
        self.group, self.sample, self.payload = group, sample, payload
        self.x, self.weights = sample.x_TD.requires_grad_(), sample.weights_TK.requires_grad_()
        self.ids = sample.ids_TK
        self.grad = torch.randn(sample.x_TD.shape, generator=torch.Generator().manual_seed(ep.rank)).to(self.x)
        with torch.no_grad():
            routed = self.exchange.dispatch(self.x, self.ids, self.weights, weights_on="rows")
            self.exchange.combine(routed.rows, routed)
        self.num_rows, self.rows, self.offsets = len(routed.rows), routed.rows, routed.expert_offsets
        self.row_weights = routed.row_weights
        self.grad_weights = torch.linspace(-1, 1, self.num_rows, device=ep.device)

    def exchanged(self, weights_on: WeightsOn) -> Sequence[Tensor]:
        """The exchange, whose experts return their rows."""
        routed = self.exchange.dispatch(self.x, self.ids, self.weights, weights_on=weights_on, num_rows=self.num_rows)
        y = self.exchange.combine(routed.rows, routed)
        if routed.row_weights is None:
            return torch.autograd.grad(y, (self.x, self.weights), self.grad)
        # What experts that apply the weights would say of these.
        outputs, gradients = (y, routed.row_weights), (self.grad, self.grad_weights)
        return torch.autograd.grad(outputs, (self.x, self.weights), gradients)

    def all_to_all(self) -> Sequence[Tensor]:
        """The exchange in torch's calls: a row for each pair, sorted by expert. Its counts go to the host."""
        E, R, K = self.sample.config.model.num_experts, dist.get_world_size(self.group), self.ids.shape[1]
        order = self.ids.flatten().argsort(stable=True)
        counts = torch.bincount(self.ids.flatten(), minlength=E).view(R, -1)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, come = counts.sum(1).tolist(), theirs.sum(1).tolist()
        by_pair = self.x[order // K]
        rows = all_to_all_single(by_pair.new_empty(sum(come), by_pair.shape[1]), by_pair, come, sent, group=self.group)
        local = torch.arange(theirs.shape[1], device=rows.device).repeat(R).repeat_interleave(theirs.flatten())
        arranged = local.argsort(stable=True)
        outputs = rows[arranged]  # of the experts, in their order
        back = torch.empty_like(rows).index_copy(0, arranged, outputs)
        pairs = all_to_all_single(torch.empty_like(by_pair), back, sent, come, group=self.group)
        weighted = pairs * self.weights.flatten()[order, None].to(pairs.dtype)
        y = torch.zeros_like(self.x).index_add(0, order // K, weighted)
        return torch.autograd.grad(y, (self.x, self.weights), self.grad)

    def layer(self) -> Sequence[Tensor]:
        """dispatch, experts and combine."""
        assert self.experts is not None
        routed = self.exchange.dispatch(self.x, self.ids, self.weights, weights_on="both", num_rows=self.num_rows)
        rows = self.experts(routed.rows, routed.expert_offsets, row_weights=routed.row_weights)
        y = self.exchange.combine(rows, routed)
        return torch.autograd.grad(y, (self.x, self.weights, *self.experts.parameters()), self.grad)

    def alone(self) -> Sequence[Tensor]:
        """The experts on the same rows."""
        assert self.experts is not None and self.row_weights is not None
        rows, weights = self.rows.requires_grad_(), self.row_weights.requires_grad_()
        out = self.experts(rows, self.offsets, row_weights=weights)
        return torch.autograd.grad(out, (rows, weights, *self.experts.parameters()), self.rows.detach())

    def check_all_to_all(self) -> None:
        """Raise RuntimeError unless it computes the gradients of the exchange, to the precision of its dtype."""
        limit = 64 * torch.finfo(self.x.dtype).eps
        if self.payload == "fp8":
            limit = max(limit, torch.finfo(FP8).eps)
        for got, want in zip(self.all_to_all(), self.exchanged("combine"), strict=True):
            if not torch.allclose(got, want, rtol=limit, atol=limit * float(want.abs().max() if len(want) else 0)):
                raise RuntimeError("all-to-all: its gradients are not those of the exchange")


def run(job: Job, payload: TrainingPayload = "auto") -> Report:
    """Measure each T. Collective. Raises RuntimeError if gradients are wrong, ValueError as `TrainingExchange` does."""
    config, group = job.config, job.group
    model = config.model
    results = []
    with ExpertParallel(config, group) as ep:
        experts = None
        if model.intermediate_size is not None:
            shapes = (2 * model.intermediate_size, model.hidden_size), (model.hidden_size, model.intermediate_size)
            drawn = (
                torch.randn(ep.num_local_experts, n, k, device=ep.device).to(model.torch_dtype) / k**0.5
                for n, k in shapes
            )
            experts = GroupedExperts(*drawn)
        for T in job.tokens:
            case = Case(ep, Sample(config, ep.rank, T, job.routing, ep.device), experts, group, payload)
            case.check_all_to_all()
            passes: list[Pass] = [lambda c=case: c.exchanged("rows"), lambda c=case: c.exchanged("combine")]  # type: ignore[misc]
            times = [_us(each, job, captured=ep.device.type == "cuda") for each in passes]
            times.append(_us(case.all_to_all, job, captured=False))
            whole = (
                [None, None]
                if experts is None
                else [_us(each, job, captured=ep.device.type == "cuda") for each in (case.layer, case.alone)]
            )
            ep.check()
            results.append(Result(T, *times, *whole))
            job.advance()
    return report(results)


def report(results: Sequence[Result]) -> Report:
    """The figures of `results`, in ascending T."""
    names = ("rows", "combine", "all_to_all", "layer", "experts")
    rows = [
        [f"{r.tokens}", *("–" if (us := getattr(r, n)) is None else microseconds(us) for n in names), _percent(r.share)]
        for r in results
    ]
    lines = [
        Line(name.replace("_", "-"), [(r.tokens, us) for r in results if (us := getattr(r, name)) is not None], f"C{i}")
        for i, name in enumerate(names)
    ]
    objects = [dataclasses.asdict(r) | {"share": r.share} for r in results]
    columns = ("T", "rows", "combine", "all-to-all", "layer", "experts", "share")
    content = {"units": _UNITS, "results": objects}
    drawn = [line for line in lines if line.points]
    return Report("training", content, columns, rows, drawn, _CAPTION, "forward + backward, µs")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _us(run: Pass, job: Job, *, captured: bool) -> float:
    """Microseconds of a pass: the median over replays, or over samples of a few passes, on the slowest rank."""
    wanted = [gradient.clone() for gradient in run()]
    on_gpu = wanted[0].is_cuda
    graph, last = None, None
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_ROUNDS):
                last = run()
    samples = []
    for _ in range(job.repeats):
        dist.barrier(job.group, device_ids=[torch.cuda.current_device()] if on_gpu else None)
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(5 * SLEEP_CYCLES)  # meanwhile the host enqueues an eager pass and the graph
            run()  # brings the ranks into step
            begin.record()
            if graph is not None:
                graph.replay()
            else:
                for _ in range(_EAGER):
                    run()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / (_ROUNDS if graph is not None else _EAGER))
        else:
            start = time.perf_counter()
            for _ in range(_EAGER):
                run()
            samples.append((time.perf_counter() - start) * 1e6 / _EAGER)
    if last is not None and not all(map(torch.equal, last, wanted)):
        raise RuntimeError("the gradients of a replayed pass differ from an eager one's")
    return slowest([statistics.median(samples)], job.group)[0]
