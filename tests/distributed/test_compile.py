"""Compiled layers over several ranks: every rank its own T, eager ranks among compiled ones,
failures.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo as dynamo
from helpers import full_layer, randn, slow
from test_layers import D, E, K
from torch import Tensor, nn

import epmoe

pytestmark = pytest.mark.usefixtures("forget_graphs")


class Model(nn.Module):
    """Two layers that do not depend on each other, and yet run in one order on all ranks."""

    def __init__(self, ep: epmoe.ExpertParallel) -> None:
        super().__init__()
        self.layers = nn.ModuleList(full_layer(ep, seed=10 * n, bias=True)[0] for n in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.layers
        return b(x) + a(x).relu()


# inductor traces what the others trace, and then more of it.
@pytest.mark.parametrize("backend", [slow("eager"), slow("aot_eager"), "inductor"])
def test_every_rank_has_its_own_batches(make_ep, rank, size, device, backend):
    """Ranks meet with graphs for T = 0, 1 and any T in one round, and with a rank that is not
    compiled.
    """
    ep = make_ep(
        experts=E,
        top_k=K,
        hidden=D,
        max_tokens=40,
        timeout_s=120.0,  # ranks wait while another one compiles
        routing={"selection_bias": True},
    )
    model = Model(ep)
    step = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    # Even ranks bring the first number of tokens, odd ones the second. Now and then one is eager.
    for n, tokens in enumerate(((7, 5), (0, 3), (1, 40), (4, 0), (2, 1), (0, 0), (40, 9))):
        x = randn(tokens[rank % 2], D, seed=100 * n + rank).to(device)
        want = model(x)
        rounds = ep.health().rounds
        y = model(x) if n == rank + 3 else step(x)
        assert torch.equal(y, want) and ep.health().rounds == rounds + 2
    # Graphs for 0, 1 and any T, and no break in them.
    assert (
        not dynamo.utils.counters["graph_break"]
        and dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    )


def test_within_at_most(make_ep, rank, size, device):
    """Eager and compiled, over two nodes, with the bits of slabs of S rows; a slab that is too
    short is named.
    """
    if size % 2 or device.type == "cuda":
        pytest.skip("needs two nodes of CPUs")
    ep = make_ep(ranks_per_node=size // 2, experts=E, top_k=K, hidden=D)
    layer, _ = full_layer(ep)
    step = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = randn(2 + rank, D, seed=rank)
    # Slabs of any length have the same bits.
    want = layer(x)
    for n in (5, 7):  # one graph for both
        with ep.at_most(n):
            for call in (layer, step):
                assert torch.equal(call(x), want)
                assert ep.exchange.slabs.slab_rows == n
    # More rows than a slab holds.
    with (
        pytest.raises(epmoe.EPOverflowError, match="rows for one node, but at_most is 1:"),
        ep.at_most(1),
    ):
        layer(randn(9, D, seed=9))

    # Within the graph it is refused, and harms nothing.
    def within(x: Tensor) -> Tensor:
        with ep.at_most(1):
            return layer(x)

    with pytest.raises(Exception, match="outside of what torch.compile traces"):
        torch.compile(within, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(layer(x), want)
