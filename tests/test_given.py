"""Routes and adapters that reach all layers of a model: `replay` and `adapters_of` around a model
of transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import adapter_models
import pytest
import torch
from helpers import TINY_MODEL, alone, assert_close, randn
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import epmoe
from epmoe import ExpertParallel, MoELayer, adapters_of, recording, replay

E = 8
K = 2
D = 64
F = 32
NAMES = ["model.layers.0.mlp", "model.layers.1.mlp"]


@pytest.fixture(scope="module")
def ep() -> Iterator[ExpertParallel]:
    with ExpertParallel(alone(max_tokens=64, capacity={"extra_bytes": 4})) as ep:
        yield ep


def model_of(ep: ExpertParallel, seed: int = 0, **options: object) -> nn.Module:
    """A model of transformers whose MoE blocks are MoELayers. Routers follow from `seed`, all else
    is the same.
    """
    # A tiny model. Of its keys Qwen3 takes those that it knows.
    torch.manual_seed(0)
    known = Qwen3MoeConfig().to_dict().keys() & TINY_MODEL.keys()
    config = Qwen3MoeConfig(
        **{key: TINY_MODEL[key] for key in known}, mlp_only_layers=[], decoder_sparse_step=1
    )
    model = AutoModelForCausalLM.from_config(config)
    # A layer in place of each MoE block.
    for i, name in enumerate(NAMES):
        weights = (
            randn(E, D, seed=9 * seed + i),
            randn(E, 2 * F, D, seed=2 + i) / 8,
            randn(E, D, F, seed=4 + i) / 8,
        )
        model.set_submodule(name, MoELayer.from_full(ep, *weights, **options))
    return model


def prompt(batch: int = 2, length: int = 5) -> Tensor:
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def run(model: nn.Module, tokens: Tensor | None = None) -> Tensor:
    return model(input_ids=prompt() if tokens is None else tokens, use_cache=False).logits


@pytest.fixture
def rollout(ep) -> tuple[dict, Tensor]:
    """Routes of a model with other routers, and its outputs."""
    model = model_of(ep, seed=1)
    with torch.no_grad(), recording(model) as record:
        y = run(model)
    return record, y


def checkpointed(reentrant: bool) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        if reentrant:
            model.enable_input_require_grads()

    return prepare


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad
        for name, p in model.named_parameters()
        if p.grad is not None and "router" not in name
    }


def test_a_forward_pass_takes_the_routes_of_another(ep, rollout):
    record, want = rollout
    model = model_of(ep)
    before = run(model)
    # Within the context it has the outputs of the other model, and records its routes.
    with replay(model, record), recording(model) as again:
        assert torch.equal(run(model), want)
    assert torch.equal(run(model), before) and not torch.equal(before, want)
    for name in NAMES:
        assert all(
            torch.equal(got, of)
            for got, of in zip(again[name][0][:2], record[name][0][:2], strict=True)
        )
    # Contexts of parts name layers from there.
    one, other = model.model.layers
    with replay(one.mlp, {"": record[NAMES[0]]}), replay(other, {"mlp": record[NAMES[1]][0]}):
        assert torch.equal(run(model), want)


@pytest.mark.parametrize("prepare", [checkpointed(False), checkpointed(True)])
def test_a_checkpoint_takes_them_again_after_the_context(ep, rollout, prepare):
    """Two forward passes with routes of their own, before their backward passes."""
    record, _ = rollout
    other = {
        name: (routes[0].ids.roll(1, 0), routes[0].weights.roll(1, 0))
        for name, routes in record.items()
    }

    def step(model: nn.Module) -> dict[str, Tensor]:
        with replay(model, record):
            first = run(model).square().mean()
        with replay(model, other):
            second = run(model).square().mean()
        second.backward()
        first.backward()
        run(model).square().mean().backward()
        return gradients(model)

    # Gradients with checkpoints are those without.
    plain = model_of(ep)
    again = model_of(ep)
    plain.train()
    prepare(again)
    want = step(plain)
    got = step(again)
    assert got.keys() == want.keys()
    for name in want:
        assert (got[name] - want[name]).abs().max() <= 1e-6 * want[name].abs().max(), name
    assert not any(layer.mlp.contexts for layer in again.model.layers), (
        "nothing keeps a context once its graph is gone"
    )


@pytest.mark.parametrize("prepare", [lambda model: model.train(), checkpointed(False)])
def test_ids_alone_have_the_weights_of_the_own_router(ep, rollout, prepare):
    record, _ = rollout
    ids = {name: routes[0].ids for name, routes in record.items()}
    # One model replays ids; the other one gets them by each call.
    model = model_of(ep)
    patched = model_of(ep)
    prepare(model)
    with replay(model, ids):
        y = run(model)
    for name in NAMES:
        layer = patched.get_submodule(name)
        layer.forward = partial(layer.forward, routing=(ids[name], None))
    want = run(patched.train())
    assert torch.equal(y, want)
    # Routers get the same gradients.
    for loss in (y, want):
        loss.square().mean().backward()
    for name in NAMES:
        got, of = (each.get_submodule(name).router_weight.grad for each in (model, patched))
        assert got.any() and torch.equal(got, of)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_alone_that_are_no_experts_of_a_token(ep, rollout, dtype):
    """A token with an id twice, or with one that is no expert, takes its own router's choice, as in
    records.
    """
    record, _ = rollout
    # What the routers would choose.
    model = model_of(ep)
    with torch.no_grad(), recording(model) as own:
        run(model)
    own_choice = own[NAMES[0]][0].ids[:3]
    # Other ids, but for three tokens of each layer with an id twice, −1 or E.
    other = {name: (routes[0].ids + 1) % E for name, routes in record.items()}
    for name in NAMES:
        other[name][0, 1] = other[name][0, 0]
        other[name][1, 0] = -1
        other[name][2, 0] = E
    given = {name: ids.to(dtype) for name, ids in other.items()}
    # In the first layer these three take its own choice, and all others the given ids.
    for grad_mode in (torch.no_grad, torch.enable_grad):
        with grad_mode(), replay(model, given), recording(model) as again:
            run(model)
        first, second = (again[name][0].ids for name in NAMES)
        assert torch.equal(first[:3], own_choice.to(first.dtype))
        for ids, name in ((first, NAMES[0]), (second, NAMES[1])):
            assert torch.equal(ids[3:], other[name][3:].to(ids.dtype))


@pytest.mark.parametrize("inside", ["offloaded", "two calls", "one without"])
def test_a_checkpoint_that_does_not_say_its_call(ep, rollout, inside):
    """It would take the experts of the router in silence."""
    record, _ = rollout
    model = model_of(ep)
    checkpointed(False)(model)
    if inside == "two calls":
        record = {name: 2 * routes for name, routes in record.items()}
    # Calls whose recomputation does not know which one it is.
    with replay(model, record):
        with save_on_cpu() if inside == "offloaded" else nullcontext():
            loss = run(model).sum()
        if inside == "two calls":
            loss = loss + run(model).sum()
    if inside == "one without":
        loss = loss + run(model).sum()
    with pytest.raises(epmoe.EPStateError, match="a checkpoint computes a layer's call again"):
        loss.backward()
    assert run(model).isfinite().all()


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("how", ["argument", "closure", "keyword"])
def test_a_checkpoint_whose_x_is_no_argument(ep, how, needs_grad):
    """A frozen front gives x, and its gradient is awaited all the same."""
    layer = MoELayer.from_full(
        ep, randn(E, D), randn(E, 2 * F, D, seed=1) / 8, randn(E, D, F, seed=2) / 8
    )
    x = randn(6, D, seed=3).requires_grad_(needs_grad)
    ids = torch.stack([randn(E, seed=10 + i).topk(K).indices for i in range(6)]).int()

    def gradients_of(call: Callable[[], Tensor]) -> dict[str, Tensor]:
        layer.zero_grad()
        with replay(layer, {"": ids}):
            loss = call().square().sum()
        loss.backward()
        return gradients(layer)

    calls = {
        "argument": lambda: checkpoint(layer, x, use_reentrant=False),
        "closure": lambda: checkpoint(lambda: layer(x), use_reentrant=False),
        "keyword": lambda: checkpoint(lambda x: layer(x), use_reentrant=False, x=x),
    }
    # x must be an argument of the checkpoint, or the backward pass raises.
    want = gradients_of(lambda: layer(x))
    if how != "argument":
        with pytest.raises(epmoe.EPStateError, match="computes a layer's call again"):
            gradients_of(calls[how])
        return
    got = gradients_of(calls[how])
    for name, value in want.items():
        assert_close(got[name], value)


def test_a_frozen_layer_stays_without_gradients(ep):
    layer = MoELayer.from_full(
        ep, randn(E, D), randn(E, 2 * F, D, seed=1) / 8, randn(E, D, F, seed=2) / 8
    ).requires_grad_(False)
    ids = randn(6, E).topk(K).indices
    with replay(layer, {"": ids}):
        y = layer(randn(6, D))
    assert not y.requires_grad


def test_a_context_within_a_checkpoint(ep, rollout):
    record, _ = rollout
    model = model_of(ep)
    model.train()
    found = []
    # Without a checkpoint and within one.
    for wrapped in (
        lambda call, x: call(x),
        lambda call, x: checkpoint(call, x, use_reentrant=False),
    ):

        def call(x: Tensor) -> Tensor:
            with replay(model, record):
                return model(inputs_embeds=x, use_cache=False).logits.square().mean()

        x = randn(2, 5, D).requires_grad_()
        wrapped(call, x).backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_versions_of_saved_tensors_are_checked(ep, rollout):
    record, _ = rollout
    model = model_of(ep)
    with replay(model, record):
        x = randn(3).requires_grad_()
        y = x.exp()
        z = y.sin().sum()
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def adapted(ep: ExpertParallel) -> nn.Module:
    model = model_of(ep, adapters=2, adapter_rank=4).eval()
    for i, layer in enumerate(model.model.layers):
        factors = adapter_models.draw(E, D, F, 4, seed=i + 1)
        layer.mlp.adapters.put_local(1, adapter_models.adapter_of(factors, E, list(range(E)), 2.0))
    return model


@torch.no_grad()
def test_adapters_of_sequences_and_tokens(ep):
    model = adapted(ep)
    plain = run(model)
    # A number for each sequence; contexts within contexts.
    with adapters_of(model, torch.tensor([1, 1])):
        both = run(model)
        with adapters_of(model, torch.tensor([-1, 1])):
            second = run(model)
        with adapters_of(model, torch.ones(2, 5, dtype=torch.int32)):
            assert torch.equal(run(model), both)
        assert torch.equal(run(model), both)
    assert torch.equal(run(model), plain)
    # Each sequence has its own.
    assert_close(second, torch.stack([plain[0], both[1]]))
    assert (plain - both).abs().amax((1, 2)).min() > 0.01


@torch.no_grad()
def test_generate(ep):
    """A number for each sequence holds for the prompt and for each token after it."""
    model = adapted(ep)
    tokens = prompt()

    def generate(tokens: Tensor) -> Tensor:
        return model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None)

    # Without adapters, with the same one, and mixed, which is recorded.
    plain = generate(tokens)
    with adapters_of(model, torch.tensor([1, 1])):
        both = generate(tokens)
    with adapters_of(model, torch.tensor([1, -1])), recording(model) as record:
        mixed = generate(tokens)
    assert torch.equal(mixed, torch.stack([both[0], plain[1]])) and not torch.equal(both, plain)
    # The record replays the same tokens, and has as many calls as they took.
    with adapters_of(model, torch.tensor([1, -1])), replay(model, record):
        assert torch.equal(generate(tokens), mixed)
    with replay(model, record):
        generate(tokens)
        with pytest.raises(ValueError, match="6 calls of a layer, which is called once more"):
            generate(tokens)


@torch.no_grad()
def test_each_thread_has_its_own(ep):
    """Threads that take turns: the context of one is not that of the other, nor that of an
    exception.
    """
    model = adapted(ep)
    turn = threading.Barrier(2)
    results = {}
    # What each adapter gives.
    want = {number: None for number in (-1, 1)}
    for number in want:
        with adapters_of(model, torch.tensor([number, number])):
            want[number] = run(model)
    one_at_a_time = threading.Lock()

    @torch.no_grad()
    def serve(number: int) -> None:
        for _ in range(10):
            with adapters_of(model, torch.tensor([number, number])):
                turn.wait()
                with one_at_a_time:
                    results.setdefault(number, []).append(run(model))

    # Two threads take turns within their contexts.
    threads = [threading.Thread(target=serve, args=(number,)) for number in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(y, want[number]) for number in want for y in results[number])
    # An exception leaves its context, too.
    with pytest.raises(ZeroDivisionError), adapters_of(model, torch.tensor([1, 1])):
        raise ZeroDivisionError
    assert torch.equal(run(model), want[-1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_record_has_the_calls_of_its_own_pass_and_thread(ep, reentrant):
    """Not those that a checkpoint makes again, nor those of another thread, which may
    record, too.
    """
    model = model_of(ep)
    records = []
    began = threading.Event()
    ended = threading.Event()
    checkpointed(reentrant)(model)

    @torch.no_grad()
    def serve() -> None:
        with recording(model) as record:
            records.append(record)
            run(model)
            began.set()
            assert ended.wait(20.0)
            run(model)

    with recording(model) as record:
        thread = threading.Thread(target=serve)
        thread.start()
        assert began.wait(20.0)
        run(model).square().mean().backward()
    # The other thread calls once more when this record has ended.
    ended.set()
    thread.join()
    assert [[len(calls) for calls in each.values()] for each in (record, *records)] == [
        [1, 1],
        [2, 2],
    ]
    assert not any(layer.mlp.recorders for layer in model.model.layers)


@torch.no_grad()
def test_arguments_of_a_call_come_first(ep):
    layer = adapted(ep).model.layers[0].mlp
    x = randn(6, D)
    ones = torch.ones(6, dtype=torch.int32)
    ids, weights = ep.route(layer.logits(x.flip(0)))
    want = layer(x, routing=(ids, weights))
    with adapters_of(layer, ones), replay(layer, {"": ep.route(layer.logits(x))[:2]}):
        assert torch.equal(layer(x, routing=(ids, weights), adapter_ids=-ones), want)


@torch.no_grad()
def test_wrong_calls_give_their_round_up(ep):
    layer = adapted(ep).model.layers[0].mlp
    x = randn(6, D)
    ids, weights = ep.route(layer.logits(x))
    for context, says in [
        (adapters_of(layer, torch.zeros(5, dtype=torch.int32)), "`adapter_ids` must be"),
        (replay(layer, {"": []}), "0 calls of a layer, which is called once more"),
        (replay(layer, {"": (ids[:5], weights[:5])}), "`ids` must be"),
    ]:
        with context, pytest.raises(ValueError, match=says):
            layer(x)
        layer(x)


def test_what_they_refuse(ep):
    model = model_of(ep)
    pair = torch.zeros(3, K, dtype=torch.int32), torch.ones(3, K)
    # Adapters of a model without any, and numbers that are no tensor.
    with (
        pytest.raises(ValueError, match="no MoELayer with `adapters`"),
        adapters_of(model, torch.zeros(3)),
    ):
        raise AssertionError
    with pytest.raises(TypeError, match="`ids` must be a tensor"), adapters_of(adapted(ep), [0, 1]):
        raise AssertionError
    # Records of layers, and what is wrong with them.
    for of_each, error, says in [
        ({}, ValueError, "each of 2 layers, but 'model.layers.0.mlp' has none"),
        (dict.fromkeys([*NAMES, "x"], pair), ValueError, "'x' is no layer"),
        (dict.fromkeys(NAMES, 1), TypeError, "must be `Routes`, ids and weights, or ids, got int"),
        (dict.fromkeys(NAMES, pair[0][:, :1]), ValueError, r"ids and weights \[T, 2\], got int32"),
        (dict.fromkeys(NAMES, (pair[0], pair[1][:2])), ValueError, r"ids and weights \[T, 2\]"),
        (dict.fromkeys(NAMES, [pair, ()]), TypeError, "must be `Routes`"),
    ]:
        with pytest.raises(error, match=says), replay(model, of_each):
            raise AssertionError
    # No layer is left in a context.
    assert not any(layer.mlp.contexts for layer in model.model.layers)


@pytest.mark.parametrize("wrap", ["as DDP does", "compile"])
def test_names_without_wrappers(ep, rollout, wrap):
    record, want = rollout
    model = model_of(ep)
    wrapped = (
        torch.compile(model, backend="eager")
        if wrap == "compile"
        else nn.ModuleDict({"module": model})
    )
    with torch.no_grad(), replay(wrapped, record):
        assert torch.equal(run(model), want)


@pytest.mark.slow
@pytest.mark.usefixtures("forget_graphs")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_calls(ep, fullgraph):
    """A graph would keep what it was traced with: the call is eager, or refused in one graph."""
    layer = adapted(ep).model.layers[0].mlp
    x = randn(6, D)
    ones = torch.ones(6, dtype=torch.int32)
    want = layer(x, adapter_ids=ones)
    plain = layer(x)
    # Outside of a context the graph runs.
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=fullgraph)
    assert torch.equal(compiled(x), plain)
    refused = pytest.raises(Exception, match="between graphs") if fullgraph else nullcontext()
    with adapters_of(layer, ones), refused:
        assert torch.equal(compiled(x), want)
    assert torch.equal(compiled(x), plain)
