"""Host time of MoELayer, eager and compiled, on one rank: `python -m epmoe.bench.compiled [cpu|cuda] [MODE]`.

MODE is that of torch.compile, such as `reduce-overhead`. The experts return their rows, and one token travels, so that
little but the host's work is left. A figure is CPU time of the calling thread, in microseconds: the median over
repetitions, which take turns. Entering a compiled program costs once a call, whatever it holds. The slope is what each
further layer of a model costs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from epmoe.config.config import EPConfig
from epmoe.layer import MoELayer
from epmoe.service import ExpertParallel

E, K, D, LAYERS = 64, 8, 256, 9
CALLS, REPETITIONS = 10, 100


def measure(device: torch.device, mode: str | None) -> dict[str, float]:
    """The time of one layer and of `LAYERS` layers, eager and compiled, by name. Raises if the outputs differ."""
    config = EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": 1},
        capacity={"max_num_tokens_per_rank": 16},
    )
    x = torch.randn(1, D, device=device)
    with ExpertParallel(config, device=device) as ep, torch.inference_mode():
        layers = [
            MoELayer(ep, torch.randn(E, D, device=device), lambda rows, offsets, scales: rows) for _ in range(LAYERS)
        ]
        models: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        for n in (1, LAYERS):
            eager = models[f"eager, {n}"] = nn.Sequential(*layers[:n])
            compiled = models[f"compiled, {n}"] = torch.compile(eager, fullgraph=True, dynamic=True, mode=mode)
            for _ in range(3):  # a CUDA graph is recorded in the second call
                if not torch.equal(compiled(x), eager(x)):
                    raise AssertionError("the compiled layer has other bits than the eager one")
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(REPETITIONS):
            for name, model in models.items():
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # a full queue would make the host wait
                start = time.thread_time()
                for _ in range(CALLS):
                    model(x)
                times[name].append((time.thread_time() - start) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main(device: str = "cpu", mode: str | None = None) -> None:
    """Print a line for each side."""
    us = measure(torch.device(device), mode)
    print(f"{'µs of the host':<16}{'1 layer':>10}{f'{LAYERS} layers':>10}{'slope':>10}")
    for side in ("eager", "compiled"):
        one = us[f"{side}, 1"]
        many = us[f"{side}, {LAYERS}"]
        print(f"{side:<16}{one:>10.1f}{many:>10.1f}{(many - one) / (LAYERS - 1):>10.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
