"""The references themselves: against torch on clean input, and against results by hand."""

from __future__ import annotations

import pytest
import torch
from helpers import distinct_ids, randn

from epmoe.local import reference


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_route_is_topk_of_scores(scoring):
    logits = randn(50, 37).double()
    want = getattr(torch, scoring)(logits, *([-1] if scoring == "softmax" else [])).topk(6)
    got = reference.route_reference(logits, 6, scoring=scoring)
    assert torch.equal(got.ids, want.indices.int())
    torch.testing.assert_close(got.weights, want.values)
    renormalised = reference.route_reference(logits, 6, scoring=scoring, renormalize=True, routed_scaling_factor=2.5)
    torch.testing.assert_close(renormalised.weights.sum(1), torch.full((50,), 2.5).double())


def test_route_groups_by_hand():
    """Two of three groups are chosen: without a bias by their best score, with a bias by the sum of their two best."""
    logits = torch.tensor([[5.0, -9.0, 3.0, 3.0, 4.0, -9.0]])
    groups = {"scoring": "sigmoid", "num_expert_groups": 3, "top_groups": 2}
    assert reference.route_reference(logits, 3, **groups).ids.tolist() == [[0, 4, 1]]
    bias = torch.zeros(6)
    assert reference.route_reference(logits, 3, bias=bias, **groups).ids.tolist() == [[0, 2, 3]]


def test_route_undefined_rows_by_hand():
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [[1.0, nan, 2.0, 0.0], [1.0, inf, 2.0, 0.0], [-inf, -inf, -inf, -inf], [-inf, 1.0, -0.0, 0.0]]
    )
    softmax = reference.route_reference(logits, 3)
    assert softmax.ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2, 3]]
    assert softmax.weights[:3].eq(0).all() and softmax.weights[3, 1] == softmax.weights[3, 2]
    sigmoid = reference.route_reference(logits, 3, scoring="sigmoid")
    assert sigmoid.ids.tolist() == [[2, 0, 3], [1, 2, 0], [0, 1, 2], [1, 2, 3]]


def test_permute_by_hand():
    """Three tokens, top-2, experts 0, 1 and 3 local; segments start at multiples of 4."""
    x = torch.tensor([[1.0], [2.0], [3.0]])
    ids = torch.tensor([[3, 0], [2, 3], [0, 7]], dtype=torch.int32)
    expert_map = torch.tensor([0, 1, -1, 2], dtype=torch.int32)
    dense = reference.permute_reference(x, ids, expert_map, 3)
    assert dense.rows[:, 0].tolist() == [1, 3, 1, 2]
    assert dense.expert_offsets.tolist() == [0, 2, 2, 4]
    assert dense.row_of_pair.tolist() == [[2, 0], [-1, 3], [1, -1]]
    gaps = reference.permute_reference(x, ids, expert_map, 3, alignment=4)
    assert gaps.rows[:, 0].tolist() == [1, 3, 0, 0, 1, 2, 0, 0]
    assert gaps.expert_offsets.tolist() == [0, 4, 4, 8] and gaps.tokens_per_expert.tolist() == [2, 0, 2]
    short = reference.permute_reference(x, ids, expert_map, 3, max_rows=3)
    assert short.rows[:, 0].tolist() == [1, 3, 1] and short.row_of_pair.tolist() == [[2, 0], [-1, -1], [1, -1]]


def test_stages_compose_to_the_dense_layer():
    """The sum over two ranks of permute, experts and finalize equals the layer on one rank."""
    T, E, K, D, F = 30, 7, 3, 16, 8
    x, weights = randn(T, D).double(), randn(T, K, seed=1).double()
    w_gate_up, w_down = randn(E, 2 * F, D, seed=2).double(), randn(E, D, F, seed=3).double()
    ids = distinct_ids(T, E, K)
    expert = reference.swiglu_reference(w_gate_up, w_down)
    y = torch.zeros(T, D, dtype=torch.float64)
    for local in (range(0, 4), range(4, 7)):
        expert_map = torch.full((E,), -1, dtype=torch.int32)
        expert_map[list(local)] = torch.arange(len(local), dtype=torch.int32)
        permuted = reference.permute_reference(x, ids, expert_map, len(local))
        ends = permuted.expert_offsets.tolist()
        out = torch.cat([expert(permuted.rows[ends[i] : ends[i + 1]], p) for i, p in enumerate(local)])
        y += reference.finalize_reference(out, permuted, weights)
    torch.testing.assert_close(y, reference.moe_reference(x, ids, weights, (w_gate_up, w_down)))


def test_invalid_and_zero_weight_pairs_contribute_nothing():
    x = torch.ones(1, 4)
    ids = torch.tensor([[0, 1, 2, -1]])
    weights = torch.tensor([[2.0, torch.nan, 0.0, 1.0]])
    y = reference.moe_reference(x, ids, weights, lambda rows, i: rows * (torch.nan if i else 3.0))
    assert y.tolist() == [[6.0] * 4]
