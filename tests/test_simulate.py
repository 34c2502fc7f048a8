"""Routing simulators: the properties of each kind, and the same result for the same seed."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from epmoe.config.placement import Placement
from epmoe.local.simulate import Kind, simulate_logits, simulate_routing

KINDS = get_args(Kind)
CLEAN = tuple(kind for kind in KINDS if kind != "adversarial")
T = 512
E = 64
K = 8


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", CLEAN)
def test_clean_kinds_are_distinct_and_in_range(kind, id_dtype):
    ids, weights = simulate_routing(kind, T, E, K, id_dtype=id_dtype)
    assert ids.shape == weights.shape == (T, K)
    assert ids.dtype == id_dtype and weights.dtype == torch.float32
    assert ids.min() >= 0 and ids.max() < E
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all()
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(T))


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_the_same_routing(kind):
    torch.manual_seed(1)
    first = simulate_routing(kind, T, E, K, seed=3)
    state = torch.get_rng_state()
    again = simulate_routing(kind, T, E, K, seed=3)
    other = simulate_routing(kind, T, E, K, seed=4)
    assert torch.equal(first.ids, again.ids)
    torch.testing.assert_close(first.weights, again.weights, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(first.ids, other.ids)
    assert torch.equal(state, torch.get_rng_state())  # the global generator is not touched


def load(kind: Kind) -> torch.Tensor:
    """Tokens per expert, as shares of T."""
    return simulate_routing(kind, 4096, E, K).ids.flatten().bincount(minlength=E) / 4096


def test_popularity():
    mean = K / E
    assert load("uniform").max() < 1.3 * mean and load("uniform").min() > 0.7 * mean
    zipf = load("zipf").sort(descending=True).values
    normal = load("normal")
    assert zipf[0] > 5 * mean and zipf[-1] < mean / 2
    assert normal[E // 2] > 2 * mean and normal[0] < 0.05 * mean and normal[-1] < 0.05 * mean


def test_groups_are_limited():
    ids = simulate_routing("group_limited", T, E, K, num_expert_groups=8, top_groups=2).ids
    groups = torch.nn.functional.one_hot(ids.long() // (E // 8), 8).amax(dim=1)
    assert groups.sum(dim=1).max() <= 2
    assert groups.sum(dim=0).min() > 0


def test_one_rank_is_hot():
    placement = Placement.build(10, 4)
    ids = simulate_routing("hot_rank", T, 10, 3, ep_size=4, hot_rank=1).ids
    assert (placement.expert_map(1)[ids.long()] >= 0).all()
    ids = simulate_routing(
        "hot_rank", T, 10, 5, ep_size=4, hot_rank=1
    ).ids  # the rank owns only three experts
    assert ((placement.expert_map(1)[ids.long()] >= 0).sum(dim=1) == 3).all()


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_adversarial_has_every_kind_of_bad_value(id_dtype):
    ids, weights = simulate_routing("adversarial", T, E, K, id_dtype=id_dtype)
    # Ids that are no expert, and ids that come twice for a token.
    limits = torch.iinfo(id_dtype)
    for bad_id in (-1, E, limits.min, limits.max):
        assert (ids == bad_id).any()
    valid = (ids >= 0) & (ids < E)
    duplicates = (ids.sort(dim=1).values.diff(dim=1) == 0).any(dim=1)
    assert duplicates.any() and valid.any()
    # Some rows are valid throughout.
    assert (valid.all(dim=1) & ~duplicates & weights.isfinite().all(dim=1)).any()
    assert (
        weights.isnan().any()
        and weights.isposinf().any()
        and weights.isneginf().any()
        and (weights == 0).any()
    )
    # Ids that become valid when narrowed to 32 bits.
    if id_dtype == torch.int64:
        narrowed = ids.to(torch.int32)
        assert (~valid & (narrowed >= 0) & (narrowed < E)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_adversarial_logits(dtype):
    logits = simulate_logits("adversarial", T, E, dtype=dtype)
    assert logits.shape == (T, E) and logits.dtype == dtype
    for bad in (logits.isnan(), logits.isposinf(), logits.isneginf()):
        assert bad.all(dim=1).any() and (bad.sum(dim=1) == 1).any()
    assert (logits == 0).all(dim=1).any()  # ties
    assert 0.4 < logits.isfinite().all(dim=1).float().mean() < 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind):
    ids, weights = simulate_routing(kind, 0, E, K)
    assert ids.shape == weights.shape == (0, K)
