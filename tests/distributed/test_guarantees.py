"""What a layer promises, for every kind of call of one list: it serves, it trains, it trains with a
number of rows.

A capability that is added to layers joins `KINDS`, or `GUARANTEES`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from exchanges import make_config
from helpers import randn, slow
from interrupted_steps import of_all
from rank_groups import group_of
from torch import Tensor, nn

from epmoe import (
    EPAbortedError,
    EPMismatchError,
    ExpertParallel,
    GroupedExperts,
    MoELayer,
    checkpoint,
)
from epmoe.local.recording import recording
from epmoe.local.spread import is_spread, local_view
from epmoe.training import TrainingExchange

E = 6
K = 2
D = 32
F = 24
T = 9
M = 16
GIVER = 1  # the rank on which something goes wrong
LONG_S = 300.0  # a test that passes has not run into a deadline
KINDS = {
    "serves": {},
    "serves with adapters": {"adapters": 2, "adapter_rank": 4},
    "serves and waits while idle": {},
    "trains": {"num_rows": "exact"},
    "trains with a number of rows": {"num_rows": 128},
}


BIAS = randn(E, seed=9)
SLOW = {"serves with adapters", "serves and waits while idle"}


class Weights(NamedTuple):
    """The weights of all experts."""

    router_weight: Tensor
    w_gate_up: Tensor
    w_down: Tensor


def weights_of(seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    router, up, down = (
        randn(*s, seed=seed + i) / 4 for i, s in enumerate(((E, D), (E, 2 * F, D), (E, D, F)))
    )
    return Weights(router, up.to(dtype), down.to(dtype))


class Bench:
    """Layers of one kind over all ranks, and calls of them."""

    def __init__(
        self, make_ep: Callable[..., ExpertParallel], kind: str, rank: int, size: int
    ) -> None:
        self.kind = kind
        self.rank = rank
        self.size = size
        self._make_ep = make_ep
        self.trains = "num_rows" in KINDS[kind]
        self.ep = self.open()

    def open(self, **options: object) -> ExpertParallel:
        given = {"experts": E, "top_k": K, "hidden": D, "max_tokens": M, "timeout_s": LONG_S}
        exchange = {"on_abort": "raise"}
        if "idle" in self.kind:
            exchange["idle"] = "wait"
        return self._make_ep(
            **given | {"exchange": exchange, "capacity": {"extra_bytes": 4}} | options
        )

    def layer(
        self, ep: ExpertParallel | None = None, seed: int = 0, dtype=torch.float32, **options
    ) -> MoELayer:
        ep = ep or self.ep
        return MoELayer.from_full(ep, *weights_of(seed, dtype), **KINDS[self.kind] | options)

    def x(self, seed: int = 0, tokens: int = T, dtype: torch.dtype = torch.float32) -> Tensor:
        return randn(tokens, D, seed=100 * seed + self.rank, dtype=dtype).to(self.ep.device)

    @contextmanager
    def calling(self) -> Iterator[None]:
        with torch.enable_grad() if self.trains else torch.no_grad():
            yield

    def y(self, layer: nn.Module, x: Tensor, *arguments: object, **options: object) -> Tensor:
        """A call, and the backward pass of its y where the kind has one."""
        with self.calling():
            y = layer(x, *arguments, **options)
            assert y.requires_grad == self.trains
            if self.trains and self.ep.device.type == "cuda":
                self.ep.check()  # the host would open a backward round before it hears of an abort
            if self.trains:
                y.float().square().sum().backward()
        return y.detach()

    def fails(self, call: Callable[[], object], error: type[Exception], message: str = "") -> None:
        """`GIVER` gets this error; the others hear of it."""
        if self.rank == GIVER:
            with pytest.raises(error, match=message):
                call()
        else:
            with pytest.raises(EPAbortedError, match=rf"rank\(s\) \[{GIVER}\] aborted") as caught:
                call()
                self.ep.check()
            assert caught.value.ranks == [GIVER]

    def gradients(self, layer: nn.Module) -> list[Tensor]:
        return [p.grad for p in layer.parameters() if p.grad is not None]


@pytest.fixture(params=[slow(kind) if kind in SLOW else kind for kind in KINDS])
def bench(make_ep, request, rank, size) -> Bench:
    return Bench(make_ep, request.param, rank, size)


def same(got: list[Tensor], want: list[Tensor], bits: bool = True) -> None:
    """This rank's parts are: no rank may decide by a number of all experts."""
    limits = {"rtol": 0, "atol": 0} if bits else {"rtol": 1e-5, "atol": 1e-6}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(local_view(a), local_view(b), **limits)


# Of three choices of two, each pair of choices comes in four combinations.
@pytest.mark.parametrize(
    ("bias", "on_input", "dtype"),
    [
        (None, False, torch.float32),
        (None, True, torch.bfloat16),
        (BIAS, False, torch.bfloat16),
        (BIAS, True, torch.float32),
        slow(None, False, torch.bfloat16),
        slow(None, True, torch.float32),
        slow(BIAS, False, torch.float32),
        slow(BIAS, True, torch.bfloat16),
    ],
)
def test_every_kind_of_call_has_the_bits_of_serving(bench, dtype, bias, on_input):
    if "adapters" in bench.kind and on_input:
        pytest.skip("weights would multiply the numbers of adapters, so it is refused")
    ep = bench.open(
        computes={"weights_on_input": on_input},
        routing={"selection_bias": bias is not None},
    )
    layer = bench.layer(ep, dtype=dtype, bias=bias)
    x = bench.x(dtype=dtype)
    # A batch, one token, none, and a batch of sequences.
    for tokens in (x, x[:1], x[:0], x[:8].view(2, 4, D)):
        with torch.no_grad():
            want = layer(tokens)
        assert torch.equal(bench.y(layer, tokens), want) and want.shape == tokens.shape


@pytest.mark.parametrize("shared", [False, True])
def test_padding(bench, shared):
    """Zeros, whatever it holds, and no gradient knows of it."""
    # Two layers with the same weights: one gets padding, the other real tokens alone.
    whole, short = (
        bench.layer(shared=nn.Linear(D, D) if shared else None).to(bench.ep.device)
        for _ in range(2)
    )
    whole.load_state_dict(short.state_dict())
    x = bench.x()
    real = 5
    want = bench.y(short, x[:real])
    # The padding is NaN and Inf.
    x[real:] = torch.tensor([torch.nan, torch.inf] * (D // 2))
    # The number of real tokens is an int, or a tensor on the device.
    for given in (real, torch.tensor(real, dtype=torch.int32, device=x.device)):
        whole.zero_grad()
        y = bench.y(whole, x, given)
        assert not y[real:].any()
        same([y[:real], *bench.gradients(whole)], [want, *bench.gradients(short)], bits=False)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_token_of_nan(bench, scoring):
    """It harms no other token, nor a gradient on any rank."""
    ep = bench.open(routing={"scoring": scoring, "renormalize": True})
    layer = bench.layer(ep)
    without = bench.layer(ep)
    x = bench.x()
    # One rank has a token of NaN; its other tokens are right without it.
    bad = 3 if bench.rank == GIVER else T
    want = bench.y(without, torch.cat([x[:bad], x[bad + 1 :]]))
    x[bad : bad + 1] = torch.nan
    y = bench.y(layer, x)
    # y of the token is zeros,
    assert not y[bad : bad + 1].any()
    # and nothing else has changed.
    same(
        [torch.cat([y[:bad], y[bad + 1 :]]), *bench.gradients(layer)],
        [want, *bench.gradients(without)],
        bits=False,
    )


WRONG = {
    "1-D": (lambda x: x[0], ValueError, r"got float32 \[32\]"),
    "4-D": (lambda x: x[None, None], ValueError, r"got float32 \[1, 1, 9, 32\]"),
    "None": (lambda x: None, TypeError, "got NoneType"),
    "list": (lambda x: x.tolist(), TypeError, "got list"),
    "fp64": (lambda x: x.double(), TypeError, r"got float64 \[9, 32\]"),
    "int32": (lambda x: x.int(), TypeError, r"got int32 \[9, 32\]"),
    "bf16": (
        lambda x: x.bfloat16(),
        TypeError,
        r"got bfloat16 \[9, 32\]: the experts take float32",
    ),
    "columns": (lambda x: x[:, 1:], ValueError, r"got float32 \[9, 31\]"),
    "columns of a batch": (lambda x: x[None, :, 1:], ValueError, r"got float32 \[1, 9, 31\]"),
    "device": (lambda x: x.to("meta"), ValueError, "must be on"),
    "many": (
        lambda x: x.repeat(2, 1),
        ValueError,
        "has 18 tokens, but capacity.max_num_tokens_per_rank is 16",
    ),
    "many of a batch": (
        lambda x: x.repeat(2, 1).view(2, 9, D),
        ValueError,
        "has 18 tokens, but capacity.max_num",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_x_on_one_rank(bench, dtype):
    """The layer may have another dtype than the config, be called first, or follow a layer in
    another dtype.
    """
    layer = bench.layer(dtype=dtype)
    other = bench.layer(seed=5)
    x = bench.x(dtype=dtype)
    # Each mistake follows the one before, without a new layer.
    for wrong, (make, error, message) in WRONG.items():
        if dtype == torch.bfloat16:
            message = message.replace("float32", "bfloat16")
            if wrong == "bf16":
                make = Tensor.float
                message = r"got float32 \[9, 32\]: the experts"
        # The rank that is wrong sends nothing.
        sent = bench.ep.health().rows_sent
        bench.fails(
            lambda make=make: bench.y(layer, make(x) if bench.rank == GIVER else x), error, message
        )
        assert bench.rank != GIVER or bench.ep.health().rows_sent == sent
        # The next round is whole, of another layer, too.
        bench.y(other, bench.x())
    with torch.no_grad():
        want = layer(x)
    assert torch.equal(bench.y(layer, x), want)


class Raising(nn.Module):
    """Raises in its forward or backward pass on `GIVER`, else returns what it gets."""

    def __init__(self, rank: int, where: str) -> None:
        super().__init__()
        self.raises = where if rank == GIVER else None

    def forward(self, x: Tensor) -> Tensor:
        if self.raises == "forward":
            raise ZeroDivisionError("forward")
        if self.raises == "backward" and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self._raise)
        return x

    def _raise(self, grad: Tensor) -> None:
        raise ZeroDivisionError("backward")


class Experts(nn.Module):
    """The experts of a layer, and something in front of them or behind them."""

    def __init__(self, experts: nn.Module, before: nn.Module, behind: nn.Module) -> None:
        super().__init__()
        self.inner = experts
        self.before = before
        self.behind = behind

    def forward(self, rows: Tensor, offsets: Tensor, scales: Tensor | None) -> Tensor:
        return self.behind(self.inner(self.before(rows), offsets, scales))


@pytest.mark.parametrize(
    "place", ["before the experts", "behind the experts", "between layers", "in the loss"]
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_exception(bench, place, direction):
    """The others hear of it in the round that is open or else in the next one, and the round behind
    it is whole.
    """
    if direction == "backward" and not bench.trains:
        pytest.skip("a call without gradients has no backward pass")
    if place == "in the loss" or (place, direction) == ("between layers", "forward"):
        pytest.skip(
            "nothing of the library runs there: the caller leaves the group, as docs/failures.md "
            "says"
        )
    # Two layers, and between or around the experts a module that raises on one rank.
    first = bench.layer()
    second = bench.layer(seed=3)
    plain = nn.Identity()
    raising = Raising(bench.rank, direction)
    experts = second.experts
    between = raising if place == "between layers" else plain
    if place != "between layers":
        second.experts = Experts(
            experts, *((raising, plain) if place.startswith("before") else (plain, raising))
        )
    model = nn.Sequential(first, between, second)
    # Twice: what the first exception has left harms no later pass.
    for _ in range(2):
        bench.fails(lambda: bench.y(model, bench.x()), ZeroDivisionError, direction)
        if bench.ep.device.type == "cuda":
            # Of a later round of the pass, which a host that runs ahead has launched.
            with suppress(EPAbortedError):
                bench.ep.check()
    # Without the module that raises all is as before.
    second.experts = experts
    raising.raises = None
    with torch.no_grad():
        want = model(bench.x())
    assert torch.equal(bench.y(model, bench.x()), want)


def test_tags_are_taken_once(bench):
    """Layers with and without an id never share a tag, whose rounds could then
    exchange their rows.
    """
    first = bench.layer()
    # An id that is a tag already, or becomes one, is refused.
    with pytest.raises(ValueError, match="tag 1 must belong to one layer"):
        bench.layer(layer_id=first.tag)
    with pytest.raises(ValueError, match="tag 1 must belong to one layer"):
        bench.layer(layer_id=first.tag + 32768)
    # No other layer of this process has it, as one that an exception keeps may have 2.
    of_tag_2 = 5 * 32768 + 2
    numbered = bench.layer(layer_id=of_tag_2)
    # A copy is a layer of its own.
    twin = copy.deepcopy(first)
    assert [first.tag, numbered.tag, twin.tag, bench.layer().tag] == [1, 2, 3, 4]
    # A layer that is gone gives its tag back.
    del numbered
    assert bench.layer(layer_id=of_tag_2).tag == 2, "it is free again"
    while bench.ep.next_tag < 32767:
        bench.ep.new_tag()
    bench.layer()
    with pytest.raises(ValueError, match="tags for 32767 layers"):
        bench.layer()


def test_ranks_in_different_layers(bench):
    """All hear of it, and no rank gets rows of another layer."""
    layers = [bench.layer(), bench.layer(seed=3)]
    with pytest.raises(EPMismatchError, match="tag"):
        bench.y(layers[bench.rank == GIVER], bench.x())
        bench.ep.check()
    if bench.ep.device.type == "cuda":
        return  # where a mismatch stays
    assert torch.equal(bench.y(layers[0], bench.x()), bench.y(layers[0], bench.x()))


def test_a_rank_whose_call_is_of_another_kind(bench):
    if "adapters" in bench.kind or "idle" in bench.kind:
        pytest.skip("such layers have one kind of call")
    layer = bench.layer()
    with (
        torch.set_grad_enabled(bench.trains != (bench.rank == GIVER)),
        pytest.raises(EPMismatchError),
    ):
        layer(bench.x())
        bench.ep.check()


CASTS = {
    "to": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "to a tensor's": (
        lambda m: m.to(next(m.parameters()).new_zeros((), dtype=torch.float16)),
        torch.float16,
    ),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "type": (lambda m: m.type(torch.bfloat16), torch.bfloat16),
}


# A model casts its layers by `_apply`, whichever cast it is.
@pytest.mark.parametrize(
    ("of_a_model", "cast"),
    [
        *((False, cast) for cast in CASTS),
        *((True, cast) if cast in ("to", "half") else slow(True, cast) for cast in CASTS),
    ],
)
def test_casts_reach_the_experts_only(bench, cast, of_a_model):
    """As serving stacks do: the choice of experts needs fp32."""
    ep = bench.open(routing={"logit_bias": True, "selection_bias": True})
    layer = bench.layer(ep, bias=randn(E, seed=1), logit_bias=randn(E, seed=2))
    router_weight = layer.router_weight.detach().clone()
    make, dtype = CASTS[cast]
    assert (make(nn.Sequential(layer))[0] if of_a_model else make(layer)) is layer
    assert torch.equal(layer.router_weight, router_weight) and layer.experts.dtype == dtype
    assert layer.router_weight.dtype == layer.bias.dtype == layer.logit_bias.dtype == torch.float32
    assert bench.y(layer, bench.x(dtype=dtype)).dtype == dtype


def test_autocast(bench):
    """x in another dtype is cast, and y cast back; without autocast it is an error that names x."""
    layer = bench.layer()
    x = bench.x()
    want = bench.y(layer, x.bfloat16().float())
    with torch.autocast(bench.ep.device.type, torch.bfloat16):
        y = bench.y(layer, x.bfloat16())
        same([bench.y(layer, x)], [bench.y(layer, x)])
    assert y.dtype == torch.bfloat16 and torch.equal(y, want.bfloat16())
    with (
        pytest.raises(TypeError, match="`x` must be float32"),
        nullcontext() if bench.trains else torch.no_grad(),
    ):
        layer(x.bfloat16())


def test_a_router_that_another_tool_has_cast(bench):
    """FSDP's mixed precision would choose other experts."""
    layer = bench.layer()
    layer.router_weight.data = layer.router_weight.data.bfloat16()
    if not bench.trains:
        pytest.skip("a server casts its router on purpose")
    with pytest.raises(
        TypeError, match="`router_weight` must be float32, as the layer was made, got bfloat16"
    ):
        layer(bench.x())


def test_deepcopy(bench):
    layer = bench.layer()
    x = bench.x()
    twin = copy.deepcopy(layer)
    before = bench.y(layer, x)
    assert torch.equal(bench.y(twin, x), before) and twin.ep is layer.ep and twin.tag != layer.tag
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    assert torch.equal(bench.y(layer, x), before) and not torch.equal(bench.y(twin, x), before)
    averaged = torch.optim.swa_utils.AveragedModel(nn.Sequential(layer))
    averaged.update_parameters(nn.Sequential(layer))
    assert torch.equal(bench.y(averaged.module, x), before)


class Block(nn.Module):
    """A block of a user's own, whose experts know their group through the exchange in it."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.exchange = TrainingExchange(layer.ep)
        self.mlp = nn.ModuleDict({"held": layer.experts})


def model_of(bench: Bench, ep: ExpertParallel, seed: int) -> nn.Module:
    layer = bench.layer(ep, seed)
    dense = nn.Linear(D, D)
    with torch.no_grad():
        dense.weight.copy_(randn(D, D, seed=seed + 7)), dense.bias.copy_(randn(D, seed=seed + 8))
    return nn.Sequential(layer, dense, Block(bench.layer(ep, seed + 20))).to(ep.device)


def test_a_state_dict_belongs_to_its_rank(bench):
    held = bench.layer().state_dict()
    all_held = of_all({key: value.cpu() for key, value in held.items()})
    with pytest.raises(ValueError, match="other ranks load what `full_state_dict`"):
        bench.layer().load_state_dict(all_held[(bench.rank + 1) % bench.size])
    bench.layer().load_state_dict(all_held[bench.rank])


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = p.detach() * 0.5
    optimizer.step()
    return optimizer


def test_an_optimizer_of_copies_is_refused(bench):
    if not bench.trains:
        pytest.skip("tests/distributed/test_checkpoints.py has copies that serve")
    model = model_of(
        bench, bench.open(placement={"num_redundant_experts": 3, "strategy": "round_robin"}), seed=0
    )
    with pytest.raises(
        ValueError, match=r"`state.0.experts.w_gate_up.exp_avg` of the optimizer must be a DTensor"
    ):
        checkpoint.sharded_state_dict(model, stepped(model))


@pytest.mark.parametrize("ranks", [None, 2, 1])
def test_checkpoints(bench, folder, ranks):
    """Full and sharded ones, with the state of an optimizer, on other numbers of ranks."""
    if not bench.trains:
        pytest.skip("tests/distributed/test_checkpoints.py has layers that serve")
    if bench.ep.device.type == "cuda" and ranks:
        pytest.skip("windows of other groups are tested on CPUs")
    # Save.
    model = model_of(bench, bench.ep, seed=0)
    optimizer = stepped(model)
    whole = checkpoint.full_state_dict(model)
    assert all(len(value) == E for key, value in whole.items() if "w_" in key)
    checkpoint.save(model, folder, optimizer)

    # Another group, of the same ranks or of parts of them.
    ep = bench.open()
    if ranks is not None:
        groups = [
            group_of(range(r, min(r + ranks, bench.size))) for r in range(0, bench.size, ranks)
        ]
        group = groups[bench.rank // ranks]
        config = make_config(
            group.size(), experts=E, top_k=K, hidden=D, max_tokens=M, capacity={"extra_bytes": 4}
        )
        ep = ExpertParallel(config, group, device="cpu")

    # It loads what was saved, sharded and whole.
    other = model_of(bench, ep, seed=50)
    again = stepped(other)
    checkpoint.load(other, folder, again)
    same_state(checkpoint.full_state_dict(other), whole)
    third = model_of(bench, ep, seed=70)
    checkpoint.load_full_state_dict(third, whole)
    same_state(checkpoint.full_state_dict(third), whole)
    # A step from there is the step of the one that was saved.
    for each, its in (
        (model, optimizer),
        (other, again),
    ):
        for p in each.parameters():
            p.grad = p.detach() * 0.25
        its.step()
    same_state(checkpoint.full_state_dict(other), checkpoint.full_state_dict(model))
    ep.close()


def same_state(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key].cpu(), value.cpu()), key


def test_experts_of_nobody_are_not_saved(bench):
    """Nothing says which ones they are, so that those of other ranks would be lost. DTensors say it
    themselves; experts with adapters, which only serve, are none.
    """
    spread = nn.Sequential(bench.layer().experts)
    if is_spread(spread[0].w_down):
        assert len(checkpoint.full_state_dict(spread)["0.w_down"]) == E
    model = nn.Sequential(
        GroupedExperts(*(local_view(p.detach()).clone() for p in spread.parameters()))
    )
    for call in (checkpoint.full_state_dict, checkpoint.sharded_state_dict):
        with pytest.raises(ValueError, match="`0` must belong to an ExpertParallel"):
            call(model)


@pytest.mark.parametrize(
    "frozen", ["experts", "router_weight", "experts.w_down", "experts.w_gate_up", "all"]
)
def test_frozen_parts(bench, frozen):
    """They get no gradients, and the others get the same ones."""
    if not bench.trains:
        pytest.skip("nothing has gradients")
    layer = bench.layer()
    free = bench.layer()
    for name, p in layer.named_parameters():
        p.requires_grad_(frozen != "all" and not name.startswith(frozen))
    # The same call of both.
    xs = [bench.x().requires_grad_() for _ in range(2)]
    for each, x in zip((layer, free), xs, strict=True):
        bench.y(each, x)
    same([xs[0].grad], [xs[1].grad])
    # Parts that are free have the same gradients.
    for (name, p), other in zip(layer.named_parameters(), free.parameters(), strict=True):
        assert (p.grad is None) == (frozen == "all" or name.startswith(frozen))
        same([p.grad] if p.grad is not None else [], [other.grad] if p.grad is not None else [])


def test_given_routes(bench):
    """A call that takes the routes of another call has its y, bit by bit. A record names routes by
    layer.
    """
    layer = bench.layer()
    x = bench.x()
    with bench.calling(), recording(nn.Sequential(layer)) as record:
        y, routes = layer(x, return_routing=True)
        again = layer(x, routing=(routes.ids, routes.weights.detach()))
    assert torch.equal(y, again) and routes.logits.shape == (T, E)
    # What was recorded of both calls.
    first, second = record["0"]
    assert torch.equal(first.ids, second.ids) and second.logits is None
    # Loads and losses of routes.
    if bench.trains:
        load = torch.zeros(E, dtype=torch.int32, device=x.device)
        load[bench.ep.placement.logical_experts(bench.rank)] = routes.tokens_per_expert
        dist.all_reduce(load)
        assert load.sum() == bench.size * T * K
        (routes.logits.logsumexp(1).square().mean() + y.sum()).backward()
        assert layer.router_weight.grad.abs().max() > 0
        again.sum().backward()


def test_a_wrong_x_beside_given_routes_of_another_length(bench):
    layer = bench.layer()
    x = bench.x()
    ids = torch.arange(T, dtype=torch.int32, device=x.device)[:, None] % E
    routing = ids, torch.ones(T, 1, device=x.device)
    bench.fails(
        lambda: bench.y(layer, x[:, 1:] if bench.rank == GIVER else x, routing=routing),
        ValueError,
        "`x` must",
    )
    assert bench.y(layer, x, routing=routing).isfinite().all()


WRONG_IDS = {
    "None": (lambda ids: None, TypeError, "got NoneType"),
    "list": (lambda ids: ids.tolist(), TypeError, "got list"),
    "fp32": (lambda ids: ids.float(), TypeError, r"got float32 \[9, 2\]"),
    "1-D": (lambda ids: ids[:, 0], ValueError, r"got int32 \[9\]"),
    "rows": (lambda ids: ids[1:], ValueError, r"must be int32 or int64 \[9, .*got int32 \[8, 2\]"),
    "columns": (lambda ids: ids.repeat(1, K), ValueError, r"\[9, 4\]"),
}


def test_wrong_ids_on_one_rank(bench):
    layer = bench.layer()
    x = bench.x()
    ids = torch.arange(T * K, dtype=torch.int32, device=x.device).view(T, K) % E
    weights = torch.ones(T, K).to(x.device)
    for make, error, message in WRONG_IDS.values():
        given = make(ids) if bench.rank == GIVER else ids
        bench.fails(lambda given=given: bench.y(layer, x, routing=(given, weights)), error, message)
        bench.y(layer, x, routing=(ids, weights))


def test_forward_mode_is_refused(bench):
    if not bench.trains:
        pytest.skip("without grad mode torch asks for no tangent")
    layer = bench.layer()
    x = bench.x()
    with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        torch.func.jvp(layer, (x,), (torch.ones_like(x),))
