"""Training beside FSDP's collectives: all but the experts is sharded, and ranks run askew in both directions."""

from __future__ import annotations

import time
from random import Random

import torch
import torch.distributed as dist
from helpers import assert_close
from tool_models import D, E, K, Model, tokens, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from epmoe import ExpertParallel
from epmoe.local.spread import is_spread
from epmoe.training import fully_shard

MOST_S, STEPS = 0.03, 3


class Asleep(torch.autograd.Function):
    """x, after a while; and its gradient, after a while."""

    @staticmethod
    def forward(ctx, x: Tensor, random: Random) -> Tensor:
        ctx.random = random
        time.sleep(MOST_S * random.random())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(MOST_S * ctx.random.random())
        return grad, None


def train(model: Model, ep: ExpertParallel, averages: bool) -> list[float]:
    """The losses. `averages`: the gradients of all but the experts are averaged here, since FSDP does not."""
    losses, optimiser = [], torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    for step in range(STEPS):
        x = tokens(step, ep.rank).to(ep.device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        for parameter in model.parameters():
            if averages and not is_spread(parameter):
                dist.all_reduce(parameter.grad)
            if averages:
                parameter.grad /= ep.size
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def test_sharded_parts_and_ranks_that_run_askew(make_ep, size):
    """No round waits for a collective that waits for the round, and gradients are those without FSDP."""
    options = {"experts": E, "top_k": K, "hidden": D, "max_tokens": 16, "timeout_s": 20.0}
    ep = make_ep(**options, routing={"renormalize": True})
    alone, sharded = (Model("grouped", ep).to(ep.device) for _ in range(2))
    for block in sharded.blocks:
        random = Random(ep.rank)
        block.register_forward_pre_hook(lambda _, args, random=random: (Asleep.apply(*args, random),))
    mesh = init_device_mesh(ep.device.type, (size,))
    for module in (*sharded.blocks, sharded):
        fully_shard(module, mesh=mesh)
    want, got = train(alone, ep, True), train(sharded, ep, False)
    assert_close(torch.tensor(got), torch.tensor(want).double(), slack=16)
    values = whole(sharded)
    for name, value in whole(alone).items():
        assert_close(values[name].cpu(), value.double().cpu(), slack=16)
    ep.check()
