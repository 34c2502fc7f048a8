"""route: unique ids and finite weights for every bit pattern, and agreement with the reference."""

from __future__ import annotations

from random import Random

import pytest
import torch
from helpers import FLOATS, WEIGHT_TOLERANCE, generator, randn, random_bits
from torch import Tensor

import epmoe
from epmoe.local.reference import route_reference

POISON = {"nan": torch.nan, "+inf": torch.inf, "-inf": -torch.inf}
SCORINGS = ["softmax", "sigmoid"]
# E and K. E selects the CUDA kernel and its variant: a power of two, a multiple of 64, or any other
# number.
SIZES = [(6, 3), (6, 4), (8, 3), (8, 8), (16, 4), (16, 8), (100, 8), (128, 8), (192, 6), (256, 8)]


def assert_sound(routing: epmoe.Routing, num_experts: int) -> None:
    """What holds for every bit pattern: ids are unique and in [0, E), weights are finite."""
    ids_TK = routing.ids.long().cpu()
    weights_TK = routing.weights.cpu()
    assert weights_TK.dtype == torch.float32 and weights_TK.isfinite().all()
    assert ((ids_TK >= 0) & (ids_TK < num_experts)).all()
    ordered = ids_TK.sort(1).values
    assert (ordered[:, 1:] != ordered[:, :-1]).all(), "duplicate ids"


def assert_agrees(got: epmoe.Routing, want: epmoe.Routing) -> None:
    assert torch.equal(got.ids.cpu(), want.ids.cpu())
    torch.testing.assert_close(
        got.weights.double().cpu(), want.weights.cpu(), rtol=WEIGHT_TOLERANCE, atol=1e-37
    )


def clean_logits(T: int, E: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return randn(T, E, dtype=dtype, seed=seed) * 3


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("kind", POISON)
@pytest.mark.parametrize("dtype", FLOATS)
def test_poisoned_rows(device, dtype, kind, scoring):
    """Poisoned rows get unique ids and finite weights. Clean rows of the same batch are not
    affected.
    """
    for E, K in SIZES:
        logits = clean_logits(24, E, dtype, seed=E).to(device)
        # A whole row, single values, every second one, and all but one.
        logits[0] = POISON[kind]  # everywhere
        logits[3, 0] = logits[6, E - 1] = POISON[kind]
        logits[9, ::2] = POISON[kind]
        logits[12, 1:] = POISON[kind]
        routing = epmoe.route(logits, K, scoring=scoring)
        assert_sound(routing, E)
        assert_agrees(routing, route_reference(logits, K, scoring=scoring))
        if kind == "nan":
            assert routing.ids[0].tolist() == list(range(K)) and routing.weights[0].eq(0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_agrees_with_the_reference(device, scoring, dtype):
    for E, K in [(1, 1), (2, 2), (7, 3), (64, 6), (100, 100), (257, 8), (1000, 32), (4096, 9)]:
        logits = clean_logits(50, E, dtype, seed=E).to(device)  # bf16 has many ties
        for renormalize, scale in [(False, 1.0), (True, 2.5)]:
            options = {
                "scoring": scoring,
                "renormalize": renormalize,
                "routed_scaling_factor": scale,
            }
            if device.type == "cuda" and K > 32:
                continue
            assert_agrees(epmoe.route(logits, K, **options), route_reference(logits, K, **options))
        # Weights are the largest scores.
        scores = logits.double().softmax(1) if scoring == "softmax" else logits.double().sigmoid()
        weights = epmoe.route(logits, min(K, 32), scoring=scoring).weights.double()
        torch.testing.assert_close(
            weights, scores.topk(min(K, 32)).values, rtol=WEIGHT_TOLERANCE, atol=1e-37
        )


@pytest.mark.parametrize(
    ("logits", "ids"),
    [
        ([0.0, -0.0, 0.0, 1.0], [3, 0, 1, 2]),
        ([-0.0, 0.0, -1.0, 0.0], [0, 1, 3, 2]),
        ([-300.0, -200.0, 0.0, -250.0], [2, 1, 3, 0]),
    ],
    ids=["a tie", "signed zeros", "scores that underflow"],
)
def test_logits_decide_and_ties_go_to_the_lower_id(device, logits, ids):
    for scoring in SCORINGS:
        assert epmoe.route(
            torch.tensor([logits], device=device), 4, scoring=scoring
        ).ids.tolist() == [ids]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_bias_changes_the_choice_only(device, scoring):
    for E, K in [(16, 4), (100, 8), (256, 8)]:
        logits = clean_logits(40, E, seed=E).to(device)
        # Steps of 2 are far above the rounding error of a score, so the choice is exact.
        bias = (torch.randperm(E, generator=generator(E)) * 2.0).to(device)
        routing = epmoe.route(logits, K, scoring=scoring, bias=bias)
        assert_agrees(routing, route_reference(logits, K, scoring=scoring, bias=bias))
        assert torch.equal(routing.ids, bias.argsort(descending=True)[:K].int().expand(40, -1))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_bias_near_ties_lie_within_rounding(device, scoring):
    E = 64
    K = 6
    logits = clean_logits(400, E).to(device)
    bias = (randn(E, seed=1) * 0.3).to(device)
    got = epmoe.route(logits, K, scoring=scoring, bias=bias)
    want = route_reference(logits, K, scoring=scoring, bias=bias)
    assert_sound(got, E)
    # What is chosen is as good as the choice in fp64.
    keys = (
        logits.double().softmax(-1) if scoring == "softmax" else logits.double().sigmoid()
    ) + bias.double()
    gap = keys.gather(1, got.ids.long()) - keys.gather(1, want.ids.long())
    assert gap.abs().max() < 1e-6 and (got.ids == want.ids).float().mean() > 0.99


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_in_sixteen_bits_is_added_in_fp32(device, dtype, scoring):
    """The choice is that of the same values in fp32, also for other bits than numbers, a stride and
    gradients.
    """
    logits = clean_logits(60, 64).to(device)
    # Numbers, any bits, and a bias with a stride.
    for bias in (
        randn(64, dtype=dtype, seed=1),
        random_bits(64, dtype=dtype, seed=2),
        randn(128, dtype=dtype)[::2],
    ):
        options = {"scoring": scoring, "renormalize": True, "num_expert_groups": 8, "top_groups": 4}
        want = epmoe.route(logits, 6, bias=bias.float().to(device), **options)
        for routing in (epmoe.route, epmoe.training.route):
            got = routing(logits, 6, bias=bias.to(device), **options)
            assert torch.equal(got.ids, want.ids) and torch.equal(got.weights, want.weights)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -3.4e38, 3.4e38])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_non_finite_and_huge_bias(device, scoring, value):
    """Experts are ordered as in the reference and never duplicated, also under a bias of ±Inf, NaN
    or ±3.4e38.
    """
    for groups, top_groups in [(1, 1), (4, 2)]:
        logits = clean_logits(6, 16).to(device)
        logits[2] = torch.nan
        # The first experts, all, or the last ones.
        for where in (slice(0, 5), slice(None), slice(11, 16)):
            bias = torch.arange(16.0).mul(4).to(device)
            bias[where] = value
            options = {
                "scoring": scoring,
                "num_expert_groups": groups,
                "top_groups": top_groups,
                "bias": bias,
            }
            routing = epmoe.route(logits, 8, **options)
            assert_sound(routing, 16)
            assert_agrees(routing, route_reference(logits, 8, **options))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("E", "groups", "top_groups", "K"),
    [(256, 8, 4, 8), (16, 8, 2, 4), (100, 4, 2, 9), (12, 3, 2, 5), (8, 8, 3, 3), (100, 4, 1, 9)],
)
def test_groups(device, E, groups, top_groups, K, with_bias):
    """Rated by the usual number of scores and by others, also by K // top_groups, as in Megatron,
    whose formula this is.
    """
    logits = clean_logits(60, E, seed=E).to(device)
    logits[5] = torch.nan
    logits[7, : E // 2] = -torch.inf
    # With this bias, sums of two scores differ by more than rounding.
    bias = (randn(E, seed=1) * 100).to(device) if with_bias else None
    size = E // groups
    usual = 2 if with_bias and size > 1 else 1
    for scoring in SCORINGS:
        scores = logits.double().softmax(1) if scoring == "softmax" else logits.double().sigmoid()
        biased = scores.nan_to_num(0.0).float() + (bias if with_bias else 0)
        for count in {None, 1, min(2, size), min(3, size), K // top_groups, size}:
            options = {
                "scoring": scoring,
                "num_expert_groups": groups,
                "top_groups": top_groups,
                "bias": bias,
            }
            options["scores_per_group"] = count
            routing = epmoe.route(logits, K, **options)
            assert_sound(routing, E)
            assert_agrees(routing, route_reference(logits, K, **options))
            rated = biased.view(60, groups, size).topk(count or usual).values.sum(-1)
            chosen = torch.zeros_like(rated).scatter(1, rated.topk(top_groups).indices, 1.0)
            assert chosen.gather(1, routing.ids.long() // size)[8:].all()


@pytest.mark.parametrize("epsilon", [1e-20, 1e-6, 1e-12, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_epsilon_of_renormalised_weights(device, dtype, epsilon):
    """Weights are those of DeepSeek's formula, which vanish where all scores are far
    below epsilon.
    """
    logits = torch.linspace(-110, 10, 61)[:, None].add(torch.arange(8.0)).to(dtype).to(device)
    options = {
        "scoring": "sigmoid",
        "renormalize": True,
        "renormalize_epsilon": epsilon,
        "routed_scaling_factor": 2.5,
    }
    got = epmoe.route(logits, 4, **options)
    scores = logits.double().sigmoid().topk(4).values
    want = scores / (scores.sum(1, keepdim=True) + epsilon) * 2.5
    assert torch.equal(route_reference(logits, 4, **options).weights, want)
    # Scores may be denormal.
    torch.testing.assert_close(got.weights.double(), want, rtol=WEIGHT_TOLERANCE, atol=1e-24)
    assert got.weights[0].max() < 1e-20


@pytest.mark.parametrize("scale", [1.0, 0.0])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (8, 8), (8, 4), (8, 1)])
def test_ties_under_a_bias_go_to_the_lower_id(device, groups, top_groups, scale):
    """Logits have 4 values, so ties occur within a lane, across lanes and across groups. With scale
    0 all are ties.
    """
    for E in (16, 32, 64, 128, 256, 512):
        logits = torch.randint(4, (200, E), generator=generator(E)).float().mul(scale).to(device)
        bias = torch.zeros(E, device=device)
        options = {
            "scoring": "sigmoid",
            "bias": bias,
            "num_expert_groups": groups,
            "top_groups": top_groups,
        }
        # At most as many experts as the best groups have.
        for K in (1, 2, 5, 8, 31):
            if E // groups * top_groups >= K:
                assert_agrees(
                    epmoe.route(logits, K, **options), route_reference(logits, K, **options)
                )


@pytest.mark.parametrize("dtype", FLOATS)
def test_sigmoid_over_its_range(device, dtype):
    """Weights agree with fp64, with and without a bias, for logits from −85, near
    underflow, to 40.
    """
    logits = torch.linspace(-85, 40, 64 * 50).view(50, 64).to(dtype).to(device)
    bias = (torch.randperm(64, generator=generator(0)) * 2.0).to(device)
    for b in (None, bias):
        options = {"scoring": "sigmoid", "bias": b}
        got = epmoe.route(logits, 8, **options)
        want = route_reference(logits, 8, **options)
        torch.testing.assert_close(
            got.weights.double().cpu(), want.weights.cpu(), rtol=WEIGHT_TOLERANCE, atol=1e-37
        )
        assert torch.equal(got.ids.cpu(), want.ids.cpu())


def any_bits(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Uniform random bits, and in every fourth place ±0, a subnormal, one of the largest numbers,
    ±Inf or NaN.
    """
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.tiny * info.eps, info.max, info.min, torch.inf, -torch.inf, torch.nan]
    special = torch.tensor(values, dtype=dtype)[
        torch.randint(len(values), shape, generator=generator(seed))
    ]
    return random_bits(*shape, dtype=dtype, seed=seed).where(
        torch.rand(shape, generator=generator(seed)) < 0.75, special
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_random_bits(device, dtype):
    """Any bits as logits and as bias, under drawn options."""
    random = Random(0)
    for seed in range(200):
        groups = random.choice((1, 1, 2, 4, 8))
        size = random.choice((random.randint(1, 12), 16, 32))
        top_groups = random.randint(1, groups)
        E = groups * size
        K = random.randint(1, min(size * top_groups, 32))  # at most 32 on CUDA
        options = {
            "scoring": random.choice(SCORINGS),
            "bias": random.choice((None, any_bits(E, dtype=torch.float32, seed=seed).to(device))),
            "renormalize": random.random() < 0.5,
            "renormalize_epsilon": random.choice((0.0, 1e-45, 1e-20)),
            "scores_per_group": random.choice((None, random.randint(1, size))),
            "num_expert_groups": groups,
            "top_groups": top_groups,
        }
        logits = any_bits(50, E, dtype=dtype, seed=seed + 1).to(device)
        routing = epmoe.route(logits, K, **options)
        assert_sound(routing, E)
        # Otherwise fp32 sums decide, which may tie.
        if options["bias"] is None and options["scores_per_group"] in (None, 1):
            assert torch.equal(routing.ids, route_reference(logits, K, **options).ids)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "real"), [(0, 0), (1, 1), (9, 9), (10, 10), (11, 10), (-3, 0), (2**31 - 1, 10)]
)
def test_padding_rows_hold_no_expert(device, num_tokens, real, as_tensor):
    logits = clean_logits(10, 12).to(device)
    logits[real:] = torch.nan
    n = torch.tensor(num_tokens, dtype=torch.int32, device=device) if as_tensor else num_tokens
    routing = epmoe.route(logits, 4, num_tokens=n)
    assert routing.ids[real:].eq(12).all() and routing.weights[real:].eq(0).all()
    assert_agrees(routing, route_reference(logits, 4, num_tokens=num_tokens))


@pytest.mark.parametrize("dtype", FLOATS)
def test_row_stride(device, dtype):
    wide = clean_logits(20, 3 * 17, dtype).to(device)
    for logits in (
        wide[:, :17],
        wide[::2, 5:22],
        wide.view(60, 17)[::3],
        wide[:1, :17].expand(20, -1),
    ):
        assert_agrees(epmoe.route(logits, 4), route_reference(logits, 4))
    assert_agrees(epmoe.route(wide[:, ::3], 4), route_reference(wide[:, ::3], 4))


def test_int64_ids_and_no_tokens(device):
    logits = clean_logits(20, 16).to(device)
    wide = epmoe.route(logits, 4, id_dtype=torch.int64, num_tokens=12)
    assert wide.ids.dtype == torch.int64
    assert torch.equal(wide.ids, epmoe.route(logits, 4, num_tokens=12).ids.long())
    empty = epmoe.route(logits[:0], 4)
    assert empty.ids.shape == empty.weights.shape == (0, 4)
