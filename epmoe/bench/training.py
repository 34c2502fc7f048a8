"""Times forward and backward passes: of the exchange alone, of a whole layer, and of the experts
alone. The exchange and the layer are also measured over torch's `all_to_all_single`.

On GPUs CUDA graphs of passes are replayed, and their gradients must have the same bits as those of
a pass without a graph. A `MoELayer` is also called without graphs, as most training loops do.
`all_to_all_single` needs counts on the host, so it runs without graphs. Its gradients must be close
to those of epmoe's exchange.
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
# Passes in a graph. The gradients of all passes share memory.
_CAPTURED = 8
# Passes in a sample without a graph.
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
    """The forward and backward passes that are measured for T tokens of this rank.

    A first round counts the rows that arrive, `num_rows`, and keeps them in `rows`. Each pass
    returns its gradients.
    """

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
        # Run a first round. Graphs later ask for as many rows, and `alone` takes the rows
        # themselves.
        with torch.no_grad():
            routed = self.exchange.dispatch(self.x, self.ids, self.weights, weights_on="rows")
            self.exchange.combine(routed.rows, routed)
        self.num_rows = len(routed.rows)
        self.rows = routed.rows
        self.offsets = routed.expert_offsets
        self.row_weights = routed.row_weights
        self.grad_weights = torch.linspace(-1, 1, self.num_rows, device=ep.device)

    def exchanged(self, weights_on: WeightsOn) -> Sequence[Tensor]:
        """Run dispatch and combine, forward and backward, with experts that return their rows
        unchanged. Returns the gradients of the tokens and of the weights.

        `weights_on` says whether the weights are applied by the experts ("rows") or in combine.
        """
        routed = self.exchange.dispatch(
            self.x, self.ids, self.weights, weights_on=weights_on, num_rows=self.num_rows
        )
        # The rows that arrived are the experts' outputs.
        y = self.exchange.combine(routed.rows, routed)
        if routed.row_weights is None:
            return torch.autograd.grad(y, (self.x, self.weights), self.grad)
        # Experts that apply the weights also return gradients for them: fixed values stand in.
        outputs = (y, routed.row_weights)
        gradients = (self.grad, self.grad_weights)
        return torch.autograd.grad(outputs, (self.x, self.weights), gradients)

    def all_to_all(self) -> Sequence[Tensor]:
        """Run the same passes over torch's `all_to_all_single`, as `AllToAll` describes it. Returns
        the gradients of the tokens and of the weights.
        """
        sent = self.pairs.sent(self.x, self.ids)
        y = self.pairs.summed(sent.rows, self.weights, sent)
        return torch.autograd.grad(y, (self.x, self.weights), self.grad)

    def alone(self) -> Sequence[Tensor]:
        """Run the experts alone on the rows that arrived. The rows also stand in for the gradients
        of the outputs. Returns the gradients of rows, weights and parameters.
        """
        assert self.experts is not None and self.row_weights is not None
        rows = self.rows.requires_grad_()
        weights = self.row_weights.requires_grad_()
        out = self.experts(rows, self.offsets, row_weights=weights)
        inputs = (rows, weights, *self.experts.parameters())
        return torch.autograd.grad(out, inputs, self.rows.detach())


def run(job: Job, payload: PayloadName = "auto") -> Report:
    """Measure all passes for each number of tokens. Collective.

    `payload` is the format of the rows of the forward pass. Raises RuntimeError if gradients are
    wrong, and the ValueErrors of `TrainingExchange`.
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
            # Time the exchange, epmoe's and that over torch's calls.
            ours = {"rows": _us(partial(passes.exchanged, "rows"), job)}
            ours["combine"] = _us(partial(passes.exchanged, "combine"), job)
            theirs = {"combine": _us(passes.all_to_all, job, captured=False)}
            # Time the experts, and a layer over each of the two exchanges.
            if experts is not None:
                ours["experts"] = _us(passes.alone, job)
                ours["share"] = ours["rows"] / ours["experts"]
                our_layer, their_layer = _layers(passes, experts, job, left_out)
                ours |= our_layer
                theirs |= their_layer
            ep.check()
            for side, figures in ((OURS, ours), (TORCH, theirs)):
                results.append({"tokens": T, "side": side, **figures})
                text = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                job.log(f"{T} tokens, {side}: {text}")
            # Free the memory of these graphs, which the next ones need.
            if job.on_gpus:
                torch.cuda.empty_cache()
            job.advance()
    plotted = [column.key for column in _TIMES]
    return Report(
        benchmark="training",
        columns=(TOKENS, SIDE, *_TIMES, *_FIGURES),
        results=results,
        left_out=left_out,
        plotted=plotted,
        what="forward + backward, µs",
    )


def _layers(
    passes: Passes, experts: GroupedExperts, job: Job, left_out: dict[str, str]
) -> Iterator[Figures]:
    """Measure a layer over epmoe's exchange, then one over torch's calls, and yield the figures of
    each. `left_out` gets the reasons why figures are missing.
    """
    layer = partial(TrainedLayer, sample=passes.sample, routing=job.routing, experts=experts)
    ours = layer("the layer", through=OverExchange(passes.exchange, experts))
    theirs = layer("the layer over all-to-all", through=over_all_to_all(passes.pairs, experts))
    # Check the second layer against the first. It always takes the first copy of an expert, so
    # with copies the gradients of the experts' weights differ. Then only y and the gradients of x
    # and of the router are compared.
    has_copies = passes.sample.placement.num_physical_experts > job.config.model.num_experts
    wanted = ours.results()
    got = theirs.results()
    if has_copies:
        got = got[:3]
    _check(theirs.name, got, wanted, passes, job)
    # Free the results, which may be gigabytes, before memory is measured.
    del wanted, got
    # Time both. The first layer also needs the memory of the windows.
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
    """Time a `MoELayer` without graphs. If the configuration's layer cannot be made, `left_out`
    gets the reason, and there are no figures.
    """
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
    """Raise RuntimeError on all ranks unless two lists of results agree on all ranks. Errors may be
    as large as the rounding of the rows' dtype and of the payload.
    """
    limit = max(4 * torch.finfo(passes.x.dtype).eps, 1e-4)
    element = TRAINING_FORMATS[passes.payload].element
    if element:
        limit = max(limit, torch.finfo(element).eps)

    def close(a: Tensor, b: Tensor) -> bool:
        error = (a - b).norm(dtype=torch.float32)
        norm = b.norm(dtype=torch.float32)
        # The constant allows for rounding where a gradient is 0. A comparison with NaN is False.
        return bool(error <= limit * norm + 1e-6)

    if not everywhere(all(map(close, got, wanted)), job.group):
        raise RuntimeError(f"{name}: its gradients are not those of the exchange")


def _us(run: Callable[[], Sequence[Tensor]], job: Job, *, captured: bool = True) -> float:
    """Time `run` in µs: a forward and a backward pass, which returns gradients."""
    side = Calls(name="a pass", out=run, back=in_memory_order, head_start_ms=5)
    return _timed(round_us, side, job, captured)


def _timed(time: Callable[..., _T], side: Side, job: Job, captured: bool) -> _T:
    """Time `side` by the function `time` of `epmoe.bench.timing`: with a CUDA graph if it is to be
    `captured` and runs on GPUs, otherwise without.
    """
    if job.on_gpus and captured:
        return time(side, job.repeats, job.group, rounds=_CAPTURED)
    how = "eager" if job.on_gpus else "cpu"
    return time(side, job.repeats, job.group, rounds=_EAGER, how=how)
