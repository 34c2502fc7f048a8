"""Records of routes: packed from a rollout, padded, and replayed by ids alone through
whole models.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from helpers import alone, randn
from test_given import E, K, checkpointed, model_of, prompt
from torch import Tensor, nn

import epmoe
from epmoe import pack_routes, pad_routes, recording, replay

NEW = 6


@pytest.fixture(scope="module")
def ep() -> Iterator[epmoe.ExpertParallel]:
    with epmoe.ExpertParallel(alone(max_tokens=64)) as ep:
        yield ep


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """A token's logits have the same bits in all calls, of generate and of a trainer."""
    monkeypatch.setattr(
        "test_given.MoELayer.from_full", partial(epmoe.MoELayer.from_full, batch_invariant=True)
    )


def written(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Sequences that a model writes, and the record of their tokens but the last."""
    with torch.no_grad(), recording(model) as record:
        tokens = model.generate(prompt(), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return tokens, pack_routes(record, E, batch=2)


def ids_of(
    model: nn.Module, tokens: Tensor, routes: Tensor | None, **options: object
) -> tuple[Tensor, Tensor]:
    """Logits of a forward pass that replays, and the experts [B, tokens, layers, K] that its layers
    took.
    """
    with recording(model) as record:
        if routes is None:
            y = model(input_ids=tokens, use_cache=False).logits
        else:
            with replay(model, routes):
                y = model(input_ids=tokens, use_cache=False).logits
    return y, pack_routes(record, E, batch=len(tokens))


def test_a_trainer_replays_what_was_written(ep):
    """Other routers replay the record, and take their own choice where there is none: the last
    token, and a prompt.
    """
    tokens, routes = written(model_of(ep))
    assert routes.dtype == torch.uint8 and routes.shape == (2, tokens.shape[1] - 1, 2, K)
    other = model_of(ep, seed=1)
    # What the other model would choose.
    _, own = ids_of(other, tokens, None)
    # Also where the first tokens have no routes.
    for cached in (0, 3):
        padded = pad_routes(routes[:, cached:], tokens.shape[1], cached)
        y, took = ids_of(other, tokens, padded)
        assert torch.equal(took[:, cached:-1], routes[:, cached:])
        assert torch.equal(took[:, :cached, 0], own[:, :cached, 0]) and torch.equal(
            took[:, -1, 0], own[:, -1, 0]
        )
        # Zeros in place of 255 mean the same.
        zeros = torch.where(padded == 255, 0, padded).to(torch.int64)  # as engines fill in
        assert torch.equal(ids_of(other, tokens, zeros)[0], y)
        y.square().mean().backward()
        assert all(layer.mlp.router_weight.grad.any() for layer in other.model.layers)


def test_arrays_of_numpy(ep):
    """As engines hand them out."""
    model = model_of(ep)
    other = model_of(ep, seed=1)
    tokens, routes = written(model)
    padded = pad_routes(routes, tokens.shape[1])
    assert torch.equal(pad_routes([each.numpy() for each in routes], tokens.shape[1]), padded)
    assert torch.equal(ids_of(other, tokens, padded.numpy())[0], ids_of(other, tokens, padded)[0])


def test_the_own_record_changes_no_bit(ep):
    model = model_of(ep)
    tokens, routes = written(model)
    plain, took = ids_of(model, tokens, None)
    assert torch.equal(took[:, :-1], routes), (
        "generate and a forward pass choose the same, token by token"
    )
    replayed, _ = ids_of(model, tokens, pad_routes(routes, tokens.shape[1]))
    assert torch.equal(replayed, plain)
    with torch.no_grad():
        assert torch.equal(ids_of(model, tokens, pad_routes(routes, tokens.shape[1]))[0], plain)


def test_generate_takes_the_next_tokens(ep):
    model = model_of(ep)
    other = model_of(ep, seed=1)
    _, routes = written(model)

    def generate() -> Tensor:
        return other.generate(prompt(), max_new_tokens=NEW, do_sample=False, eos_token_id=None)

    with torch.no_grad(), replay(other, routes), recording(other) as record:
        generate()
        assert torch.equal(pack_routes(record, E, batch=2), routes)
        with pytest.raises(
            ValueError, match="`routes` has 0 tokens left, in each of 2 sequences, but .* 10 in all"
        ):
            generate()


def test_a_checkpoint_takes_them_again(ep):
    tokens, routes = written(model_of(ep))
    routes = pad_routes(routes, tokens.shape[1])
    found = []
    # Without a checkpoint, and with one of either kind.
    for prepare in (lambda model: model.train(), checkpointed(False), checkpointed(True)):
        prepare(model := model_of(ep, seed=1))
        with replay(model, routes):
            loss = model(input_ids=tokens, use_cache=False).logits.square().mean()
        loss.backward()
        found.append([layer.mlp.router_weight.grad for layer in model.model.layers])
    for again in found[1:]:
        assert all(torch.equal(*both) for both in zip(found[0], again, strict=True))
    # Two calls, of which a checkpoint cannot tell which one it computes.
    checkpointed(False)(model := model_of(ep))
    with replay(model, routes):
        loss = sum(
            model(input_ids=part, use_cache=False).logits.sum()
            for part in (tokens[:, :4], tokens[:, 4:])
        )
    with pytest.raises(epmoe.EPStateError, match="a checkpoint computes a layer's call again"):
        loss.backward()


def test_bytes_that_cannot_name_all_experts_are_refused():
    with pytest.raises(TypeError, match="`routes` must be int16"):
        epmoe.local.records.unpack_routes(
            torch.zeros(3, 1, 2, dtype=torch.uint8), 1, 257, 2, torch.device("cpu")
        )


@pytest.mark.parametrize(
    "experts, top_k, dtype",
    [(255, 1, torch.uint8), (256, 1, torch.int16), (256, 2, torch.uint8), (257, 2, torch.int16)],
)
def test_the_smallest_dtype_that_can_say_none(experts, top_k, dtype):
    ids = torch.arange(3 * top_k, dtype=torch.int32).view(3, top_k)
    ids[1] = experts - 1 - torch.arange(top_k)
    ids[2] = experts  # padding
    packed = pack_routes({"a": [epmoe.Routes(ids, randn(3, top_k), None, None)]}, experts)
    assert packed.dtype == dtype
    [read] = epmoe.local.records.unpack_routes(packed, 1, experts, top_k, torch.device("cpu"))
    assert torch.equal(read[0, :2], ids[:2]) and (read[0, 2] == epmoe.local.route.OWN_CHOICE).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint16])
def test_dtypes_of_other_engines(ep, dtype):
    """Those that `pad_routes` takes, also as arrays."""
    model = model_of(ep)
    other = model_of(ep, seed=1)
    tokens, routes = written(model)
    want = ids_of(other, tokens, pad_routes(routes, tokens.shape[1], 1))
    padded = pad_routes(routes.to(dtype), tokens.shape[1], 1)
    assert padded.dtype == dtype
    for given in (padded, padded.numpy()):
        got = ids_of(other, tokens, given)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_int8_cannot_name_all_of_129_experts():
    for experts, error in ((128, None), (129, TypeError)):
        routes = torch.arange(6, dtype=torch.int8).view(3, 1, 2)
        if error is None:
            epmoe.local.records.unpack_routes(routes, 1, experts, 2, torch.device("cpu"))
            continue
        with pytest.raises(error, match="`routes` must be uint8 or int16 or uint16 or int32 or"):
            epmoe.local.records.unpack_routes(routes, 1, experts, 2, torch.device("cpu"))


def test_a_row_with_an_expert_twice_is_no_record():
    rows = [[3, 5, 3], [5, 3, 3], [3, 3, 5], [4, 5, 3]]
    ids = torch.tensor(rows, dtype=torch.int32)
    packed = pack_routes({"a": [epmoe.Routes(ids, randn(4, 3), None, None)]}, 8)
    for routes in (packed, ids[None, :, None]):
        [got] = epmoe.local.records.unpack_routes(routes, 1, 8, 3, torch.device("cpu"))
        assert got[0].tolist() == [[epmoe.local.route.OWN_CHOICE] * 3] * 3 + [[4, 5, 3]]


def test_what_is_refused(ep):
    model = model_of(ep)
    tokens, routes = written(model)
    call = epmoe.Routes(torch.zeros(3, K, dtype=torch.int32), randn(3, K), None, None)
    # No record.
    with (
        pytest.raises(TypeError, match="must be a mapping, a tensor or an array, got list"),
        replay(model, [routes]),
    ):
        raise AssertionError

    # Records without a common number of calls have no tensor.
    for record, batch in (
        ({}, 1),
        ({"a": []}, 1),
        ({"a": [call]}, 2),
        ({"a": [call], "b": [call, call]}, 1),
    ):
        with pytest.raises(ValueError, match="`record` must have the same calls of each layer"):
            pack_routes(record, E, batch=batch)
    # Records that do not fit into one tensor.
    with pytest.raises(
        ValueError, match="a record of 10 tokens from 2 on must fit into 11 positions"
    ):
        pad_routes(routes, 11, 2)
    with pytest.raises(TypeError, match="`records` must be tensors of one dtype"):
        pad_routes([routes[0], routes[1].short()], 20)
    with pytest.raises(ValueError, match="`records` must have the same layers and K"):
        pad_routes([routes[0], routes[1, :, :1]], 20)
    # Tensors that do not suit the model, its calls, or its tokens.
    with pytest.raises(ValueError, match="`routes` has 2 sequences, but a call of a layer has 1"):
        ids_of(model, tokens[:1, :8], routes)
    for odd, error in (
        (routes[..., :1], ValueError),
        (routes[:, :, :1], ValueError),
        (routes.float(), TypeError),
    ):
        with pytest.raises(error, match="`routes` must be uint8 or .*"), replay(model, odd):
            raise AssertionError
    with (
        pytest.raises(ValueError, match="`routes` has 10 tokens left"),
        torch.no_grad(),
        replay(model, routes),
    ):
        model(input_ids=tokens)


def test_ids_alone_have_the_bits_of_the_choice():
    """Also with groups and a bias, and with a given token between."""
    options = {
        "scoring": "sigmoid",
        "renormalize": True,
        "routed_scaling_factor": 2.5,
        "num_expert_groups": 2,
    }
    logits = randn(50, E, seed=1)
    bias = randn(E, seed=2)
    want = epmoe.route(logits, K, bias=bias, **options)
    ids = want.ids.clone()
    ids[::2] = epmoe.local.route.OWN_CHOICE
    got = epmoe.training.route(logits.clone().requires_grad_(), K, ids=ids, bias=bias, **options)
    assert torch.equal(got.ids, want.ids) and torch.equal(got.weights.detach(), want.weights)
