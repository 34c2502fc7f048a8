"""Times forward and backward: the exchange alone, a whole layer, both over torch's all-to-all too,
and experts alone.

On GPUs CUDA graphs of passes are replayed, and their gradients must equal those of an eager pass
bit by bit. A `MoELayer` is called without graphs, too, as most training loops do. all-to-all reads
its counts on the host, so it runs eagerly; its gradients must be close to those of the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.layer_sides import Precision, random_experts
from epmoe.bench.report import SIDE, TOKENS, Column, Figures, Job, Report, microseconds
from epmoe.bench.sample import Sample
from epmoe.bench.sides import AllToAll, Calls, Side
from epmoe.bench.timing import chained_ways_us, everywhere, round_us, slowest, ways_us
from epmoe.bench.trained_layer import (
    EagerLayer,
    OverExchange,
    TrainedLayer,
    in_memory_order,
    over_all_to_all,
    pass_figures,
)
from epmoe.local.experts import GroupedExperts
from epmoe.native.formats import TRAINING_FORMATS, PayloadName
from epmoe.service import ExpertParallel
from epmoe.training import TrainingExchange
from epmoe.training.exchange import WeightsOn

DEFAULT_TOKENS = (1, 16, 128, 512, 4096)
# Passes of a graph, whose gradients share memory.
_CAPTURED = 8
# Passes of an eager sample.
_EAGER = 5
_TIMES = (
    Column(
        "rows",
        "rows",
        "µs of dispatch and combine, weights on rows, on the slowest rank, median",
        microseconds,
    ),
    Column("combine", "combine", "the same with weights in combine", microseconds),
    Column(
        "layer",
        "layer",
        "µs of router, dispatch, experts and combine, weights on both",
        microseconds,
    ),
    Column("experts", "experts", "µs of the experts alone, on as many rows", microseconds),
)
_FIGURES = (
    Column("share", "share", "rows / experts", "{:.1%}".format),
    Column(
        "forward",
        "forward",
        "µs of the layer's forward pass, from graphs with events between",
        microseconds,
    ),
    Column("backward", "backward", "µs of its backward pass", microseconds),
    Column(
        "eager_forward",
        "eager forward",
        "µs of a MoELayer's forward pass without graphs, called one after the other: what the "
        "slower of host and GPU takes",
        microseconds,
    ),
    Column("eager_backward", "eager backward", "µs of its backward pass", microseconds),
    Column(
        "forward_tflops",
        "forward, TFLOP/s",
        "of the experts' three products of T·K rows on each rank",
        "{:.3g}".format,
    ),
    Column("backward_tflops", "backward, TFLOP/s", "of their six products", "{:.3g}".format),
    Column(
        "memory",
        "memory",
        (
            "GB of a GPU that the layer takes at most: weights, gradients, what autograd keeps, "
            "and epmoe's windows"
        ),
        "{:.1f}".format,
    ),
)
OURS = "epmoe"
TORCH = "all_to_all_single"
_T = TypeVar("_T")


class Passes:
    """T tokens of this rank, their routing, and as many rows as arrive on it."""

    def __init__(
        self,
        ep: ExpertParallel,
        sample: Sample,
        experts: GroupedExperts | None,
        group: dist.ProcessGroup,
        payload: PayloadName,
    ) -> None:
        self.sample = sample
        self.exchange = TrainingExchange(ep, payload=payload)
        self.experts = experts
        self.payload = payload
        self.pairs = AllToAll(sample, group, "all-to-all")
        self.x = sample.x_TD.requires_grad_()
        self.weights = sample.weights_TK.requires_grad_()
        self.ids = sample.ids_TK
        generator = torch.Generator().manual_seed(ep.rank)
        self.grad = torch.randn(sample.x_TD.shape, generator=generator).to(self.x)
        # A first round counts the rows that arrive. Graphs take as many, and experts alone theirs.
        with torch.no_grad():
            routed = self.exchange.dispatch(self.x, self.ids, self.weights, weights_on="rows")
            self.exchange.combine(routed.rows, routed)
        self.num_rows = len(routed.rows)
        self.rows = routed.rows
        self.offsets = routed.expert_offsets
        self.row_weights = routed.row_weights
        self.grad_weights = torch.linspace(-1, 1, self.num_rows, device=ep.device)

    def exchanged(self, weights_on: WeightsOn) -> Sequence[Tensor]:
        """Run the exchange with experts that return their rows."""
        routed = self.exchange.dispatch(
            self.x, self.ids, self.weights, weights_on=weights_on, num_rows=self.num_rows
        )
        # Experts that return their rows.
        y = self.exchange.combine(routed.rows, routed)
        if routed.row_weights is None:
            return torch.autograd.grad(y, (self.x, self.weights), self.grad)
        # The gradients that experts would return if they applied the weights.
        outputs = (y, routed.row_weights)
        gradients = (self.grad, self.grad_weights)
        return torch.autograd.grad(outputs, (self.x, self.weights), gradients)

    def all_to_all(self) -> Sequence[Tensor]:
        """The exchange in torch's calls, which `AllToAll` tells."""
        sent = self.pairs.sent(self.x, self.ids)
        y = self.pairs.summed(sent.rows, self.weights, sent)
        return torch.autograd.grad(y, (self.x, self.weights), self.grad)

    def alone(self) -> Sequence[Tensor]:
        """The experts on the rows that arrived, whose gradients are the rows themselves."""
        assert self.experts is not None and self.row_weights is not None
        rows = self.rows.requires_grad_()
        weights = self.row_weights.requires_grad_()
        out = self.experts(rows, self.offsets, row_weights=weights)
        inputs = (rows, weights, *self.experts.parameters())
        return torch.autograd.grad(out, inputs, self.rows.detach())


def run(job: Job, payload: PayloadName = "auto") -> Report:
    """Measure each T. Collective. Raises RuntimeError if gradients are wrong, ValueError as
    `TrainingExchange` does.
    """
    config = job.config
    results = list[Figures]()
    left_out = dict[str, str]()
    with ExpertParallel(config, job.group) as ep:
        experts = None
        if config.model.intermediate_size is not None:
            made = random_experts(config, ep.rank, ep.device, Precision.PLAIN_DEEP_GEMM)
            experts = made.requires_grad_()
        for T in job.tokens:
            sample = Sample(config, ep.rank, T, job.routing, ep.device)
            passes = Passes(ep, sample, experts, job.group, payload)
            _check("all-to-all", passes.all_to_all(), passes.exchanged("combine"), passes, job)
            # The exchange, over ours and over torch's calls.
            ours = {"rows": _us(partial(passes.exchanged, "rows"), job)}
            ours["combine"] = _us(partial(passes.exchanged, "combine"), job)
            theirs = {"combine": _us(passes.all_to_all, job, captured=False)}
            # The experts, and a layer over each.
            if experts is not None:
                ours["experts"] = _us(passes.alone, job)
                ours["share"] = ours["rows"] / ours["experts"]
                our_layer, their_layer = _layers(passes, experts, job, left_out)
                ours |= our_layer
                theirs |= their_layer
            ep.check()
            for side, figures in ((OURS, ours), (TORCH, theirs)):
                results.append({"tokens": T, "side": side, **figures})
                words = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                job.log(f"{T} tokens, {side}: {words}")
            # The graphs' pools would leave the next ones too little memory.
            if job.on_gpus:
                torch.cuda.empty_cache()
            job.advance()
    plotted = [column.key for column in _TIMES]
    return Report(
        "training",
        (TOKENS, SIDE, *_TIMES, *_FIGURES),
        results,
        left_out,
        plotted,
        "forward + backward, µs",
    )


def _layers(
    passes: Passes, experts: GroupedExperts, job: Job, left_out: dict[str, str]
) -> Iterator[Figures]:
    """Measure a layer over our exchange, and one over torch's calls."""
    layer = partial(TrainedLayer, sample=passes.sample, routing=job.routing, experts=experts)
    ours = layer("the layer", through=OverExchange(passes.exchange, experts))
    theirs = layer("the layer over all-to-all", through=over_all_to_all(passes.pairs, experts))
    # `all_to_all` takes the first copy of an expert.
    has_copies = passes.sample.placement.num_physical_experts > job.config.model.num_experts
    wanted = ours.results()
    got = theirs.results()
    # Then gradients of weights differ by copy: y and those of x and of the router are left.
    if has_copies:
        got = got[:3]
    _check(theirs.name, got, wanted, passes, job)
    # Gigabytes.
    del wanted, got
    for side, captured, windows in (
        (ours, True, passes.exchange.ep.memory_plan().total_bytes),
        (theirs, False, 0),
    ):
        figures = pass_figures(side, *_timed(ways_us, side, job, captured))
        if job.on_gpus:
            figures |= {"memory": slowest([side.memory_bytes() + windows], job.group)[0] / 1e9}
        if side is ours:
            figures |= _eager(ours, passes, experts, job, left_out)
        yield figures


def _eager(
    layer: TrainedLayer,
    passes: Passes,
    experts: GroupedExperts,
    job: Job,
    left_out: dict[str, str],
) -> Figures:
    """Measure a `MoELayer` without graphs, or say why there are no figures."""
    try:
        eager = EagerLayer(layer, passes.exchange, experts, passes.num_rows)
    except ValueError as error:
        left_out["eager"] = str(error)
        return {}
    forward, backward = chained_ways_us(eager, job.repeats, job.group, on_gpus=job.on_gpus)
    return {"eager_forward": forward, "eager_backward": backward}


def _check(
    name: str, got: Sequence[Tensor], wanted: Sequence[Tensor], passes: Passes, job: Job
) -> None:
    """Raise RuntimeError on all ranks unless results agree, to the precision of rows and of the
    payload.
    """
    limit = max(4 * torch.finfo(passes.x.dtype).eps, 1e-4)
    element = TRAINING_FORMATS[passes.payload].element
    if element:
        limit = max(limit, torch.finfo(element).eps)

    def close(a: Tensor, b: Tensor) -> bool:
        error = (a - b).norm(dtype=torch.float32)
        norm = b.norm(dtype=torch.float32)
        # Where a gradient vanishes, only rounding is left. A NaN compares as False.
        return bool(error <= limit * norm + 1e-6)

    if not everywhere(all(map(close, got, wanted)), job.group):
        raise RuntimeError(f"{name}: its gradients are not those of the exchange")


def _us(run: Callable[[], Sequence[Tensor]], job: Job, *, captured: bool = True) -> float:
    """Microseconds of `run`, a forward and backward pass that returns gradients."""
    return _timed(round_us, Calls("a pass", run, in_memory_order, head_start_ms=5), job, captured)


def _timed(time: Callable[..., _T], side: Side, job: Job, captured: bool) -> _T:
    """What `time` of `epmoe.bench.timing` says of `side`."""
    if job.on_gpus and captured:
        return time(side, job.repeats, job.group, rounds=_CAPTURED)
    return time(side, job.repeats, job.group, rounds=_EAGER, how="eager" if job.on_gpus else "cpu")
