"""Training beside FSDP's collectives: all but the experts is sharded, and ranks run askew in both directions."""

from __future__ import annotations

import time
from random import Random

import torch
import torch.distributed as dist
from helpers import assert_close, randn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from epmoe import ExpertParallel, GroupedExperts, MoELayer

D, F, E, K, T, BLOCKS, STEPS = 32, 16, 6, 2, 5, 3, 3
MOST_S = 0.03


class Asleep(torch.autograd.Function):
    """x, after a while; and its gradient, after a while."""

    @staticmethod
    def forward(ctx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Block(nn.Module):
    def __init__(self, ep: ExpertParallel, number: int) -> None:
        super().__init__()
        self.dense = nn.Linear(D, D, bias=False)
        with torch.no_grad():
            self.dense.weight.copy_(randn(D, D, seed=number) / D**0.5)
        held = ep.placement.logical_experts(ep.rank)
        up, down = randn(E, 2 * F, D, seed=10 + number) / D**0.5, randn(E, D, F, seed=20 + number) / F**0.5
        experts = GroupedExperts(up[held], down[held])
        self.moe = MoELayer(ep, randn(E, D, seed=30 + number), experts, num_rows=128)

    def forward(self, x: Tensor, seconds: float) -> Tensor:
        h = x + self.dense(nn.functional.layer_norm(Asleep.apply(x, seconds), (D,)))
        return h + self.moe(nn.functional.layer_norm(h, (D,)))


class Model(nn.Module):
    def __init__(self, ep: ExpertParallel) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(ep, number) for number in range(BLOCKS))
        self.to(ep.device)

    def forward(self, x: Tensor, most_s: float, random: Random) -> Tensor:
        for block in self.blocks:
            x = block(x, most_s * random.random())
        return x

    def experts(self) -> list[nn.Parameter]:
        return [p for block in self.blocks for p in block.moe.experts.parameters()]


def train(model: Model, ep: ExpertParallel, most_s: float) -> list[float]:
    """Without FSDP, the gradients of all but the experts are averaged here."""
    experts, losses, random = {id(p) for p in model.experts()}, [], Random(ep.rank)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    for step in range(STEPS):
        x = randn(T + ep.rank, D, seed=100 * step + ep.rank).to(ep.device)
        loss = (model(x, most_s, random) - x).square().mean()
        loss.backward()
        if not most_s:
            for parameter in model.parameters():
                if id(parameter) not in experts:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= ep.size
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def test_sharded_parts_and_ranks_that_run_askew(make_ep, size):
    """No round waits for a collective that waits for the round, and gradients are those without FSDP."""
    options = {"experts": E, "top_k": K, "hidden": D, "max_tokens": 16, "timeout_s": 20.0}
    ep = make_ep(**options, routing={"renormalize": True})
    alone, sharded = Model(ep), Model(ep)
    mesh = init_device_mesh(ep.device.type, (size,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh, ignored_params=set(block.moe.experts.parameters()))
    fully_shard(sharded, mesh=mesh, ignored_params=set(sharded.experts()))
    want, got = train(alone, ep, 0.0), train(sharded, ep, MOST_S)
    assert_close(torch.tensor(got), torch.tensor(want).double(), slack=16)
    for first, second in zip(alone.experts(), sharded.experts(), strict=True):
        assert_close(second.detach().cpu(), first.detach().double().cpu(), slack=16)
    ep.check()
