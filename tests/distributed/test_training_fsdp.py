"""Training beside FSDP's collectives: all but the experts is sharded, and ranks run askew in both
directions.
"""

from __future__ import annotations

import copy
import time
import weakref
from functools import partial
from random import Random

import pytest
import torch
import torch.distributed as dist
from helpers import alone, assert_close, randn
from tool_models import D, E, K, Model, tokens, train_alone, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from epmoe import ExpertParallel, MoELayer
from epmoe.local.spread import is_spread, local_view
from epmoe.training import fully_shard, spread

MOST_S = 0.03
STEPS = 3
sgd = partial(torch.optim.SGD, lr=0.5, foreach=False)


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


def train(model: Model, ep: ExpertParallel, averages: bool) -> dict[str, Tensor]:
    """The parameters after steps. `averages`: the gradients are averaged here, since
    FSDP does not.
    """
    optimiser = sgd(model.parameters())
    for step in range(STEPS):
        x = tokens(step, ep.rank).to(ep.device)
        optimiser.zero_grad()
        (model(x) - x).square().mean().backward()
        # Gradients of experts are sums over all ranks already.
        for parameter in model.parameters() if averages else ():
            if not is_spread(parameter):
                dist.all_reduce(parameter.grad)
            parameter.grad /= ep.size
        optimiser.step()
    return {name: value.cpu() for name, value in whole(model).items()}


@pytest.mark.parametrize("kind", ["grouped", "own"])
def test_sharded_parts_and_ranks_that_run_askew(make_ep, size, kind):
    """No round waits for a collective that waits for the round. Steps are those of one process,
    also without FSDP.
    """
    options = {"experts": E, "top_k": K, "hidden": D, "max_tokens": 16, "timeout_s": 20.0}
    ep = make_ep(**options, routing={"renormalize": True})
    plain, sharded = (Model(kind, ep).to(ep.device) for _ in range(2))
    # Each rank sleeps in front of blocks, as long as it likes.
    for block in sharded.blocks:
        random = Random(ep.rank)
        block.register_forward_pre_hook(
            lambda _, args, random=random: (Asleep.apply(*args, random),)
        )
    mesh = init_device_mesh(ep.device.type, (size,))
    for module in (*sharded.blocks, sharded):
        fully_shard(module, mesh=mesh)
    alone = Model(kind)
    # Both have the numbers of one process.
    want = train_alone(alone, sgd(alone.parameters()), steps=range(STEPS))
    for model, averages in ((plain, True), (sharded, False)):
        for name, value in train(model, ep, averages).items():
            assert_close(value, want[name].double())
    ep.check()


@pytest.mark.filterwarnings("error:.*returned a view tensor")
@pytest.mark.parametrize("shape", [(6, D), (2, 3, D)])
def test_operations_in_place_on_the_y_of_a_sharded_layer(make_ep, shape):
    """FSDP's hooks of y stay. A view would lose them."""
    ep = make_ep(experts=E, top_k=K, hidden=D, max_tokens=6, timeout_s=20.0)
    weights = (
        randn(E, D, seed=1),
        randn(E, 2 * D, D, seed=2) / D**0.5,
        randn(E, D, D, seed=3) / D**0.5,
    )
    layer = fully_shard(MoELayer.from_full(ep, *weights))
    # A machine with GPUs may have a layer on CPUs.
    assert layer.router_weight.device_mesh.device_type == ep.device.type
    # All gradients, of an addition to y and of one in place.
    found = []
    for add in (torch.Tensor.add, torch.Tensor.add_):
        x = randn(*shape, seed=ep.rank).to(ep.device).requires_grad_()
        layer.zero_grad()
        add(layer(x), x).square().mean().backward()
        found.append([x.grad, *(local_view(value.grad).clone() for value in layer.parameters())])
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


@pytest.mark.parametrize("is_spread_over_ranks", [True, False])
@pytest.mark.parametrize("within", [True, False])
def test_experts_of_another_dtype_than_the_router(make_ep, device, is_spread_over_ranks, within):
    """FSDP wants one dtype of what it shards together. It shards experts of one rank, too."""
    if is_spread_over_ranks:
        ep = make_ep(experts=E, top_k=K, hidden=D, max_tokens=6, dtype="bfloat16", timeout_s=20.0)
    else:
        of_one, _ = dist.new_subgroups(1)
        ep = ExpertParallel(alone(E, K, D, "bfloat16", 6), of_one, device=device)
    weights = (
        randn(E, D, seed=1),
        randn(E, 2 * D, D, seed=2, dtype=torch.bfloat16) / D**0.5,
        randn(E, D, D, seed=3, dtype=torch.bfloat16) / D**0.5,
    )
    plain = MoELayer.from_full(ep, *weights)
    layer = MoELayer.from_full(ep, *weights)
    if within:
        linear = torch.nn.Linear(D, D, dtype=torch.bfloat16, device=device)
        fully_shard(torch.nn.Sequential(layer, linear))
    else:
        fully_shard(layer)
    # Ranks bring the same tokens, so that averages over ranks are the gradients of each.
    x_TD = randn(6, D, seed=1, dtype=torch.bfloat16).to(device)
    want = plain(x_TD)
    got = layer(x_TD)
    assert torch.equal(got, want)
    want.float().square().mean().backward()
    got.float().square().mean().backward()
    router = layer.router_weight.grad
    assert_close(router.full_tensor(), plain.router_weight.grad, slack=4)
    if not is_spread_over_ranks:
        ep.close()


class CallsItself(torch.nn.Module):
    """Experts of one's own, in two passes."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(experts, width))

    def forward(self, x: torch.Tensor, passes: int = 2) -> torch.Tensor:
        y = x * self.weight
        return y if passes == 1 else self(y, passes - 1)


def test_own_experts_that_call_themselves(make_ep):
    """The parameters are DTensors again, and have the gradients of both passes."""
    ep = make_ep(experts=4 * dist.get_world_size())
    e = ep.num_local_experts
    module = spread(CallsItself(e, 3).to(ep.device), ep)
    x = torch.full((e, 3), 2.0, device=ep.device)
    for _ in range(2):
        module(x).sum().backward()
        assert all(is_spread(parameter) for parameter in module.parameters())
    assert torch.equal(module.weight.grad.to_local(), torch.full_like(x, 8.0))


class Recomputes(torch.nn.Module):
    """Experts of one's own, with a checkpoint around what they and a part of theirs compute."""

    def __init__(self, experts: int, width: int, reentrant: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((experts, width), 3.0))
        self.part = CallsItself(experts, width)
        self.reentrant = reentrant
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = checkpoint(self.compute, x, use_reentrant=self.reentrant)
        return checkpoint(self.part, y, use_reentrant=self.reentrant)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            least = self.weight.amin()
        return x * self.weight * (self.weight / least)


@pytest.mark.parametrize("is_parametrized", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_within_own_experts(make_ep, size, reentrant, is_parametrized):
    """It computes again with this rank's rows, where the parameters are DTensors. Gradients arrive
    once.
    """
    ep = make_ep(experts=4 * size)
    e = ep.num_local_experts
    alone, module = (Recomputes(e, 3, reentrant).to(ep.device) for _ in range(2))
    spread(module, ep)
    for each in (alone, module) if is_parametrized else ():
        torch.nn.utils.parametrize.register_parametrization(each, "weight", torch.nn.Tanh())
    x = randn(e, 3, seed=ep.rank).to(ep.device).requires_grad_()
    # Spread experts have the gradients of experts that are not.
    for calls in (1, 2):
        module(x).square().sum().backward()
        alone(x.detach().requires_grad_()).square().sum().backward()
        assert all(is_spread(parameter) for parameter in module.parameters())
        assert module.calls == calls
    for got, want in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(got.grad.to_local(), want.grad)
    if not is_parametrized:
        # A copy computes again by itself, and leaves no cycle.
        other = copy.deepcopy(module)
        y = other(x)
        assert (module.calls, other.calls) == (2, 3) and torch.equal(y, module(x))
        gone = weakref.ref(other)
        del other, y
        assert gone() is None, "no cycle keeps its memory"
