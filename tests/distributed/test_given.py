"""Replayed routes under FSDP2, with checkpoints, over several ranks."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, randn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from epmoe import ExpertParallel, MoELayer, pack_routes, recording, replay
from epmoe.training import fully_shard

D = 32
F = 16
E = 6
K = 2
T = 5
BLOCKS = 2


class Block(nn.Module):
    def __init__(self, ep: ExpertParallel, number: int, seed: int) -> None:
        super().__init__()
        self.dense = nn.Linear(D, D, bias=False)
        with torch.no_grad():
            self.dense.weight.copy_(randn(D, D, seed=number) / D**0.5)
        up = randn(E, 2 * F, D, seed=10 + number) / D**0.5
        down = randn(E, D, F, seed=20 + number) / F**0.5
        self.moe = MoELayer.from_full(ep, randn(E, D, seed=seed + number), up, down)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.dense(nn.functional.layer_norm(x, (D,)))
        return h + self.moe(nn.functional.layer_norm(h, (D,)))


class Model(nn.Module):
    def __init__(self, ep: ExpertParallel, seed: int, again: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(ep, number, seed) for number in range(BLOCKS))
        self.again = again
        self.to(ep.device)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=self.again == "reentrant")
                if self.again != "no"
                else block(x)
            )
        return x


@pytest.mark.parametrize("ids_alone", [False, True])
@pytest.mark.parametrize("again", ["non-reentrant", "reentrant"])
def test_under_fsdp(make_ep, rank, again, ids_alone):
    ep = make_ep(experts=E, top_k=K, hidden=D)
    x = randn(T + rank, D, seed=rank).to(ep.device)
    # A rollout, whose routes are replayed.
    with torch.no_grad(), recording(rollout := Model(ep, 30, "no")) as record:
        want = rollout(x)
    routes = pack_routes(record, E) if ids_alone else record
    gradients = []
    # A sharded model without checkpoints, and one with them.
    for kind in ("no", again):
        model = Model(ep, 40, kind)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        given = x.clone().requires_grad_()
        with replay(model, routes), recording(model) as took:
            y = model(given)
        if ids_alone:
            assert all(
                torch.equal(took[name][0].ids, calls[0].ids) for name, calls in record.items()
            )
        else:
            assert_close(y.detach(), want)
        y.square().mean().backward()
        gradients.append([given.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(gradients[0]) == len(gradients[1]) == 1 + (3 + ids_alone) * BLOCKS
    # Their gradients have the same bits.
    for plain, twice in zip(*gradients, strict=True):
        plain, twice = (getattr(grad, "_local_tensor", grad) for grad in (plain, twice))
        assert torch.equal(plain, twice)
