"""SGLang's MoE layers with experts that move, one layer after the other, as SGLang's own loop steps
them.

As a script: two ranks serve, and the first one to which an expert has come in part is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import sglang_host as host
import torch
import torch.distributed as dist
from helpers import randn
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port

from epmoe import EPTimeoutError, ExpertParallel
from epmoe.integrations.sglang import VARIABLE

E = 16
K = 4
D = 128
F = 64
REDUNDANT = 2  # experts, of all ranks
LAYERS = 2
VOCABULARY = 64
# The first token of the prompts of a phase. Prompts have few different tokens, so that few experts
# get most rows.
PHASES = (0, 40)
BATCH = 24  # prompts of a rank
DEVICE = torch.device("cuda" if host.CUDA else "cpu")
# Names of the shards of an expert in a checkpoint.
NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def start() -> None:
    """What SGLang does in each of its processes before it makes a model."""
    os.environ |= {
        VARIABLE: '{"live": {"every": 10, "staging_mb": 1}}',
        "EPMOE_EXCHANGE__TIMEOUT_S": "60",
        "EPMOE_EXCHANGE__WARMUP_TIMEOUT_S": "120",
    }
    host.load_plugins_of_epmoe()
    host.start(ep_num_redundant_experts=REDUNDANT)
    host.locate_experts(LAYERS + 1, E)  # dense layers count, too


def checkpoint(seed: int, width: int = F) -> list[dict[str, Tensor]]:
    """By layer, the weights of all experts, bf16: gate w1 and up w3 [E, width, D], down w2 [E, D,
    width].
    """
    shapes = {"w1": (E, width, D), "w3": (E, width, D), "w2": (E, D, width)}
    return [
        {
            shard: (randn(*shape, seed=seed + 10 * layer + i) / shape[-1] ** 0.5).bfloat16()
            for i, (shard, shape) in enumerate(shapes.items())
        }
        for layer in range(LAYERS)
    ]


class Model(nn.Module):
    """Tokens [T] → the next ones [T]: layers of SGLang's, each with a router, between an embedding
    and its transpose, which gets the layers' part.

    The experts are `width` wide.
    """

    def __init__(self, width: int = F) -> None:
        super().__init__()
        # With this seed, no token and no route of `PHASES` is near a tie.
        self.embedding = randn(VOCABULARY, D, seed=1051).to(DEVICE)
        self.routers = [randn(E, D, seed=1151 + i).to(DEVICE) / D**0.5 for i in range(LAYERS)]
        self.layers = nn.ModuleList(
            host.make_layer(E + REDUNDANT, K, D, width, layer_id=i) for i in range(LAYERS)
        )
        self.choices = [host.TopK(K, layer_id=i) for i in range(LAYERS)]
        self.load(checkpoint(100, width))

    def load(self, weights: list[dict[str, Tensor]]) -> None:
        """As SGLang's models load a checkpoint: each part of an expert by the loader
        of the layer.
        """
        for layer, shards in zip(self.layers, weights, strict=True):
            for shard, tensor in shards.items():
                parameter = layer.w2_weight if shard == "w2" else layer.w13_weight
                for expert in range(E):
                    name = f"experts.{expert}.{NAMES[shard]}.weight"
                    layer.weight_loader(
                        parameter, tensor[expert], name, shard_id=shard, expert_id=expert
                    )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        for i, (layer, router, choice) in enumerate(
            zip(self.layers, self.routers, self.choices, strict=True)
        ):
            where = ExpertLocationDispatchInfo.init_new(layer_id=i)
            x = x + layer(
                x.bfloat16(),
                choice.forward_native(x, x @ router.T, expert_location_dispatch_info=where),
            )
        return ((x - self.embedding[tokens]) @ self.embedding.T).argmax(-1)


class Runner(host.ModelRunner):
    """SGLang's own `forward`, before which a plugin's hook ticks, around a step of `model`."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.forward_pass_id = 0
        self.is_draft_worker = False
        self.enable_elastic_ep = False
        self.msprobe_debugger = self.canary_manager = self.eplb_manager = (
            self.decode_cuda_graph_runner
        ) = None

    @property
    def ep(self) -> ExpertParallel:
        return self.model.layers[0].dispatcher._ep

    def _forward_raw(self, batch: Any, *_: object) -> Any:
        return SimpleNamespace(tokens=self.model(batch.input_ids), can_run_graph=False)

    def step(self, tokens: Tensor) -> Tensor:
        with torch.inference_mode(), data_parallel():
            return self.forward(MagicMock(input_ids=tokens)).tokens


def prompts(first: int, step: int) -> Tensor:
    """A token of each prompt of this rank."""
    return (first + (torch.arange(BATCH) + step) % 3).to(DEVICE)


@contextmanager
def data_parallel() -> Iterator[None]:
    with host.data_parallel([BATCH] * dist.get_world_size()):
        yield


def serve(rank: int, deaths: Any) -> None:
    """Until a rank has died, of which `deaths` grants one."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    start()
    width = 4096
    runner = Runner(Model(width))
    step = 0
    try:
        while True:
            runner.step(prompts(PHASES[0], step))
            step += 1
            if runner.ep.live.moved_bytes % (3 * D * width * 2) and deaths.acquire(block=False):
                print("in the middle of a move dies rank", rank, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    except EPTimeoutError as error:
        print("the other one says:", str(error).replace("\n", " "), flush=True)


def main() -> None:
    os.environ |= {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
    }
    fork = multiprocessing.get_context("fork")
    deaths = fork.Semaphore(1)
    ranks = [fork.Process(target=serve, args=(rank, deaths)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    while multiprocessing.active_children():  # which reaps the one that has died
        time.sleep(0.01)
    print("exit codes", sorted(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
