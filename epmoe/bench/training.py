"""Times forward and backward: the exchange alone, torch's all-to-all in its place, a layer, and the experts alone.

On GPUs CUDA graphs of passes are replayed, and their gradients must equal those of an eager pass bit by bit. all-to-all
reads its counts on the host, so it runs eagerly; its gradients must be close to those of the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.layer_sides import Precision, random_experts
from epmoe.bench.report import TOKENS, Column, Figures, Job, Report, microseconds
from epmoe.bench.sample import Sample
from epmoe.bench.sides import AllToAll, Calls
from epmoe.bench.timing import round_us
from epmoe.local.experts import GroupedExperts
from epmoe.native.formats import TRAINING_FORMATS, PayloadName
from epmoe.service import ExpertParallel
from epmoe.training import TrainingExchange
from epmoe.training.exchange import WeightsOn

DEFAULT_TOKENS = (1, 16, 128, 512, 4096)
_CAPTURED, _EAGER = 8, 5  # passes of a graph, and of an eager sample
_TIMES = (
    Column("rows", "rows", "µs of dispatch and combine, weights on rows, on the slowest rank, median", microseconds),
    Column("combine", "combine", "the same with weights in combine", microseconds),
    Column("all_to_all", "all-to-all", "the same over torch's all_to_all_single and a sort, eager", microseconds),
    Column("layer", "layer", "µs of dispatch, experts and combine, weights on both", microseconds),
    Column("experts", "experts", "µs of the experts alone, on the same rows", microseconds),
)
_SHARE = Column("share", "share", "rows / experts", "{:.1%}".format)

RunPass = Callable[[], Sequence[Tensor]]
"""Forward and backward; returns gradients."""


class Passes:
    """T tokens of this rank, their routing, and as many rows as arrive here."""

    def __init__(
        self,
        ep: ExpertParallel,
        sample: Sample,
        experts: GroupedExperts | None,
        group: dist.ProcessGroup,
        payload: PayloadName,
    ) -> None:
        self.exchange = TrainingExchange(ep, payload=payload)
        self.experts = experts
        self.payload = payload
        self.pairs = AllToAll(sample, group, "all-to-all")
        self.x = sample.x_TD.requires_grad_()
        self.weights = sample.weights_TK.requires_grad_()
        self.ids = sample.ids_TK
        self.grad = torch.randn(sample.x_TD.shape, generator=torch.Generator().manual_seed(ep.rank)).to(self.x)
        with torch.no_grad():
            routed = self.exchange.dispatch(self.x, self.ids, self.weights, weights_on="rows")
            self.exchange.combine(routed.rows, routed)
        self.num_rows = len(routed.rows)
        self.rows = routed.rows
        self.offsets = routed.expert_offsets
        self.row_weights = routed.row_weights
        self.grad_weights = torch.linspace(-1, 1, self.num_rows, device=ep.device)

    def exchanged(self, weights_on: WeightsOn) -> Sequence[Tensor]:
        """The exchange, whose experts return their rows."""
        routed = self.exchange.dispatch(self.x, self.ids, self.weights, weights_on=weights_on, num_rows=self.num_rows)
        y = self.exchange.combine(routed.rows, routed)
        if routed.row_weights is None:
            return torch.autograd.grad(y, (self.x, self.weights), self.grad)
        # What experts that apply the weights would say of these.
        outputs = (y, routed.row_weights)
        gradients = (self.grad, self.grad_weights)
        return torch.autograd.grad(outputs, (self.x, self.weights), gradients)

    def all_to_all(self) -> Sequence[Tensor]:
        """The exchange in torch's calls, which `AllToAll` tells."""
        sent = self.pairs.out()
        self.pairs.given = sent.rows
        return torch.autograd.grad(self.pairs.back(sent), (self.x, self.weights), self.grad)

    def layer(self) -> Sequence[Tensor]:
        assert self.experts is not None
        routed = self.exchange.dispatch(self.x, self.ids, self.weights, weights_on="both", num_rows=self.num_rows)
        rows = self.experts(routed.rows, routed.expert_offsets, row_weights=routed.row_weights)
        y = self.exchange.combine(rows, routed)
        return torch.autograd.grad(y, (self.x, self.weights, *self.experts.parameters()), self.grad)

    def alone(self) -> Sequence[Tensor]:
        assert self.experts is not None and self.row_weights is not None
        rows = self.rows.requires_grad_()
        weights = self.row_weights.requires_grad_()
        out = self.experts(rows, self.offsets, row_weights=weights)
        return torch.autograd.grad(out, (rows, weights, *self.experts.parameters()), self.rows.detach())

    def check_all_to_all(self) -> None:
        """Raise RuntimeError unless it computes the gradients of the exchange, to the precision of its dtype."""
        limit = 64 * torch.finfo(self.x.dtype).eps
        if element := TRAINING_FORMATS[self.payload].element:
            limit = max(limit, torch.finfo(element).eps)
        for got, want in zip(self.all_to_all(), self.exchanged("combine"), strict=True):
            if not torch.allclose(got, want, rtol=limit, atol=limit * float(want.abs().max() if len(want) else 0)):
                raise RuntimeError("all-to-all: its gradients are not those of the exchange")


def run(job: Job, payload: PayloadName = "auto") -> Report:
    """Measure each T. Collective. Raises RuntimeError if gradients are wrong, ValueError as `TrainingExchange` does."""
    config = job.config
    results = list[Figures]()
    with ExpertParallel(config, job.group) as ep:
        experts = None
        if config.model.intermediate_size is not None:
            experts = random_experts(config, ep.rank, ep.device, Precision.PLAIN_DEEP_GEMM).requires_grad_()
        for T in job.tokens:
            passes = Passes(ep, Sample(config, ep.rank, T, job.routing, ep.device), experts, job.group, payload)
            passes.check_all_to_all()
            times = {
                "rows": _us(partial(passes.exchanged, "rows"), job),
                "combine": _us(partial(passes.exchanged, "combine"), job),
                "all_to_all": _us(passes.all_to_all, job, captured=False),
            }
            if experts is not None:
                times |= {"layer": _us(passes.layer, job), "experts": _us(passes.alone, job)}
                times["share"] = times["rows"] / times["experts"]
            ep.check()
            results.append({"tokens": T, **times})
            job.advance()
    plotted = [column.key for column in _TIMES]
    return Report("training", (TOKENS, *_TIMES, _SHARE), results, {}, plotted, "forward + backward, µs")


def _us(run: RunPass, job: Job, *, captured: bool = True) -> float:
    """Microseconds of a pass. Its gradients stand for what a round puts out."""
    side = Calls(
        "a pass",
        run,
        lambda grads: _in_memory_order(grads[0]),
        lambda grads: [*map(_in_memory_order, grads[1:])],
        head_start_ms=5,
    )
    if job.on_gpus and captured:
        return round_us(side, job.repeats, job.group, rounds=_CAPTURED)
    return round_us(side, job.repeats, job.group, rounds=_EAGER, how="eager" if job.on_gpus else "cpu")


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The same memory, contiguous: a GEMM may return the gradient of a weight transposed."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
