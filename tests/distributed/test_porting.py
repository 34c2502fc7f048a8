"""The lines of docs/porting.md where answers differ give what the other libraries would."""

from __future__ import annotations

import pytest
import torch
from helpers import ROOT, distinct_ids
from test_docs import blocks_of

import epmoe
from epmoe.balance import fresh, shares_of

E = 12
K = 4
T = 6


def test_the_lines_give_what_the_page_says(make_ep, rank, size):
    ep = make_ep(experts=E, top_k=K, max_tokens=8)
    e = torch.arange(E).tensor_split(size)[rank]
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(rank))
    # What may go wrong: a token of NaN, one score of Inf, and weights that add up to 0.
    logits[0] = torch.nan
    logits[1, 5] = torch.inf
    ids = distinct_ids(T, E, K, seed=rank)
    weights = torch.full((T, K), 0.25)
    weights[2] = 0.0

    # Run the lines of the page with these names.
    inputs = {"logits": logits, "x": torch.ones(T, 64), "ids": ids, "weights": weights}
    names = {
        "torch": torch,
        "epmoe": epmoe,
        "ep": ep,
        "fresh": fresh,
        "shares_of": shares_of,
        "K": K,
        "R": size,
        "loads": torch.ones(E),
        **{name: tensor.to(ep.device) for name, tensor in inputs.items()},
    }
    (block,) = blocks_of(ROOT / "docs" / "porting.md")
    with torch.inference_mode():
        exec(compile(block.code, "docs/porting.md", "exec"), names)
    rated, broken = (
        epmoe.Routing(*(tensor.cpu() for tensor in names[name])) for name in ("rated", "broken")
    )
    even = names["even"].cpu()
    local = names["local"].cpu()
    counts = names["d"].recv.counts.tolist()

    # Experts come of the two best groups.
    groups = logits[2:].sigmoid().view(-1, 4, E // 4).topk(2).values.sum(-1).topk(2).indices
    assert (rated.ids[2:, :, None] // (E // 4) == groups[:, None]).any(-1).all()
    # A token of NaN has even weights, and a score of Inf is never chosen.
    assert even[0].tolist() == [1 / K] * K and torch.equal(even[1:], broken.weights[1:])
    assert 5 not in broken.ids[1] and int(epmoe.route(logits, K, scoring="sigmoid").ids[1, 0]) == 5

    # Each token came once, with the numbers that its experts have on this rank.
    first = int(e[0])
    last = int(e[-1])
    assert counts[rank] == int(((ids >= first) & (ids <= last)).any(1).sum()) and counts[rank] >= 1
    for source, count in enumerate(counts):
        there = distinct_ids(T, E, K, seed=source)
        there = there[((there >= first) & (there <= last)).any(1)]
        assert torch.equal(
            local[source, :count],
            torch.where((there >= first) & (there <= last), there - first, -1),
        )
        assert (local[source, count:] == -1).all()
    # The shares come of sweeps.
    assert names["shares"].view(size, -1).sum(1).tolist() == pytest.approx(
        [E / size] * size, rel=1e-8
    )
