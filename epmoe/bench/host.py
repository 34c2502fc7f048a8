"""Measures what the host does in a call of a layer without a CUDA graph: the time that it takes,
and the operators and kernels that it starts.

nn.Linear is measured beside it, because hardly a module of torch does less. On GPUs the stream is
kept busy, so that the host waits for no kernel, and the time is that of the host's own work. On
CPUs the time includes the computing, so there the number of operators is the figure to look at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from epmoe.bench.layer_sides import Precision, random_experts
from epmoe.bench.report import SIDE, TOKENS, Column, Figures, Job, Report, microseconds
from epmoe.bench.sides import Calls
from epmoe.bench.timing import host_us
from epmoe.layer import MoELayer
from epmoe.service import ExpertParallel

DEFAULT_TOKENS = (1, 64)
_WARM_CALLS = 3  # the first ones choose algorithms and fill caches
_COLUMNS = (
    TOKENS,
    SIDE,
    Column("forward", "forward", "µs of the host on the slowest rank", microseconds),
    Column("backward", "backward", "the same; forward + backward is a step", microseconds),
    Column(
        "operators",
        "operators",
        "of torch and epmoe that a step calls, outermost ones",
        "{:,}".format,
    ),
    Column("launches", "launches", "of kernels in a step, on GPUs", "{:,}".format),
)
_NAME_OF_OPERATOR = re.compile(r"(?!torch::)\w+::\w+")


class Started(NamedTuple):
    """What a call makes torch start."""

    operators: int
    """the number of operators, without those that other operators call"""
    launches: int
    """the number of kernel launches on GPUs"""


def started(call: Callable[[], object]) -> Started:
    """Run `call` once, and count the operators and kernels that it starts, by torch's profiler. The
    profiler does not change how the call runs.
    """
    on_gpus = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU]
    if on_gpus:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        call()
        if on_gpus:
            torch.cuda.synchronize()
    events = recorded.events() or []
    operators = 0
    launches = 0
    for event in events:
        # Operators that other operators call do not count.
        if _is_operator(event) and not any(map(_is_operator, _parents(event))):
            operators += 1
        if event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel")):
            launches += 1
    return Started(operators, launches)


def run(job: Job) -> Report:
    """Measure a layer with random experts, and nn.Linear with the same tokens, for each number of
    tokens. Collective.

    Raises ValueError if `model.intermediate_size` is unset, and the errors of `MoELayer`.
    """
    config = job.config
    if config.model.intermediate_size is None:
        raise ValueError("`model.intermediate_size` must be set, to the width of the experts")
    results = list[Figures]()
    with ExpertParallel(config, job.group) as ep:
        experts = random_experts(config, ep.rank, ep.device, Precision.PLAIN_DEEP_GEMM)
        for T in job.tokens:
            layer = trained_layer(ep, experts, T)
            linear = nn.Linear(
                config.model.hidden_size,
                config.model.hidden_size,
                device=ep.device,
                dtype=config.model.torch_dtype,
            )
            for name, module in (("MoELayer", layer), ("nn.Linear", linear)):
                for figures in _figures(name, module, T, ep, job):
                    results.append({"tokens": T, **figures})
            ep.check()
            job.advance()
    return Report(
        "host", _COLUMNS, results, plotted=("forward", "backward"), what="host of a call, µs"
    )


def trained_layer(ep: ExpertParallel, experts: nn.Module, tokens: int) -> MoELayer:
    """Make a layer that trains, with room for all rows that may arrive if each rank brings `tokens`
    tokens.
    """
    model = ep.config.model
    router_ED = torch.randn(model.num_experts, model.hidden_size, device=ep.device)
    pairs = ep.size * tokens * min(model.num_experts_per_tok, ep.num_local_experts)
    # Leave no room for gaps between segments, unless the configuration asks for them: the layer
    # would spend time on zeroing the rows of gaps.
    alignment = ep.config.capacity.alignment or 1
    rows = pairs + ep.num_local_experts * (alignment - 1)
    num_rows = -(-rows // alignment) * alignment
    layer = MoELayer(ep, router_ED.to(model.torch_dtype), experts, num_rows=num_rows)
    return layer.requires_grad_()


def _served(module: nn.Module, x_TD: Tensor) -> Tensor:
    """Call `module` without gradients. Returns y [T, D]."""
    with torch.inference_mode():
        y_TD: Tensor = module(x_TD)
        return y_TD


def _gradients(
    module: nn.Module, x_TD: Tensor, grad_TD: Tensor, y_TD: Tensor
) -> tuple[Tensor, ...]:
    """Run the backward pass from the gradient of y. Returns the gradients of x and of all
    parameters.
    """
    return torch.autograd.grad(y_TD, (x_TD, *module.parameters()), grad_TD)


def _figures(
    name: str, module: nn.Module, tokens: int, ep: ExpertParallel, job: Job
) -> Iterator[Figures]:
    """Measure `module`, first in calls without gradients, then with a backward pass. Yields the
    figures of each. Collective.
    """
    model = ep.config.model
    x_TD = torch.randn(tokens, model.hidden_size, device=ep.device).to(model.torch_dtype)
    grad_TD = torch.randn_like(x_TD)

    trained_TD = x_TD.clone().requires_grad_()
    step_back = partial(_gradients, module, trained_TD, grad_TD)
    sides = (
        (f"{name}, serving", Calls("serving", partial(_served, module, x_TD))),
        (f"{name}, training", Calls("training", partial(module, trained_TD), step_back)),
    )
    for side, calls in sides:
        for _ in range(_WARM_CALLS):
            _step(calls)
        counts = started(partial(_step, calls))
        forward_us, backward_us = host_us(calls, job.group, on_gpus=job.on_gpus)
        trains = calls.back is step_back
        figures = {
            "side": side,
            "forward": forward_us,
            "backward": backward_us if trains else None,
            "operators": counts.operators,
            "launches": counts.launches if job.on_gpus else None,
        }
        job.log(f"{tokens} tokens, {side}: {forward_us:.0f} µs, {counts.operators} operators")
        yield figures


def _step(calls: Calls) -> None:
    """Run one forward pass, and the backward pass if there is one."""
    calls.back(calls.out())


def _is_operator(event: object) -> bool:
    """Whether an event of a profile is the call of an operator, such as aten::mm."""
    return _NAME_OF_OPERATOR.fullmatch(getattr(event, "name", "")) is not None


def _parents(event: object) -> Iterator[object]:
    """The events of a profile within which `event` ran, the innermost first."""
    parent = getattr(event, "cpu_parent", None)
    while parent is not None:
        yield parent
        parent = getattr(parent, "cpu_parent", None)
