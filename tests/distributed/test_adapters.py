"""LoRA adapters of experts, over several ranks: each token gets its own, wherever its
experts are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import adapter_models
import pytest
import torch
import torch.distributed as dist
from helpers import ON_GPUS, ON_THE_CPU, assert_close, captured, randn
from interrupted_steps import of_all, steps_until_whole
from rank_groups import group_of

from epmoe import (
    EPAbortedError,
    EPStateError,
    ExpertParallel,
    GroupedExperts,
    LoRA,
    MoELayer,
    checkpoint,
)
from epmoe.checkpoint.adapters import StoredAdapter
from epmoe.checkpoint.put_adapter import put_on_all_ranks

E = 6
K = 2
D = 64
F = 64
T = 9
M = 16
BLOCK = "model.layers.3.mlp"
FACTORS = {
    number: adapter_models.draw(E, D, F, rank, seed=number + 1)
    for number, rank in enumerate((4, 2))
}
SCALING = {number: 8 / rank for number, rank in enumerate((4, 2))}
ADAPTERS = {number: (FACTORS[number], SCALING[number]) for number in FACTORS}
ROUTER, GATE_UP, DOWN = (
    randn(*s, seed=i) / 4 for i, s in enumerate(((E, D), (E, 2 * F, D), (E, D, F)))
)

pytestmark = pytest.mark.usefixtures("serving")


@pytest.fixture
def open_ep(make_ep) -> Callable[..., ExpertParallel]:
    def build(**options: object) -> ExpertParallel:
        given = {
            "experts": E,
            "top_k": K,
            "hidden": D,
            "max_tokens": M,
            "capacity": {"extra_bytes": 4},
        }
        return make_ep(**given | {"exchange": {"on_abort": "raise"}} | options)

    return build


def make_layer(
    ep: ExpertParallel, dtype: torch.dtype = torch.float32, **options: object
) -> MoELayer:
    weights = ROUTER, GATE_UP.to(dtype), DOWN.to(dtype)
    layer = MoELayer.from_full(ep, *weights, **{"adapters": 3, "adapter_rank": 5} | options)
    if layer.adapters is not None:
        for number, (factors, scaling) in ADAPTERS.items():
            held = ep.logical_experts(layer.tag)
            layer.adapters.put_local(
                number, adapter_models.adapter_of(factors, E, [max(x, 0) for x in held], scaling)
            )
    return layer


def inputs(
    ep: ExpertParallel, seed: int = 0, tokens: int = T, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """x, and adapters of which −1, 2 and 99 add nothing."""
    x = randn(tokens, D, seed=10 * seed + ep.rank, dtype=dtype)
    numbers = torch.tensor([0, 1, -1, 1, 2, 0, 99])[torch.arange(ep.rank, ep.rank + tokens) % 7]
    return [x.to(ep.device), numbers.to(ep.device, torch.int16)]


def want(layer: MoELayer, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    ids, weights = (value.cpu() for value in layer.ep.route(layer.logits(x)))
    base = GATE_UP.to(x.dtype), DOWN.to(x.dtype)
    return adapter_models.merged_reference(x.cpu(), ids, weights, base, ADAPTERS, numbers.cpu())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"placement": {"num_redundant_experts": 3, "strategy": "round_robin"}},
        {"capacity": {"extra_bytes": 40, "alignment": 8, "gap_rows": "undefined"}},
        {"ranks_per_node": 1},
    ],
)
def test_each_token_gets_its_adapter(open_ep, device, rank, options):
    """Also where a rank brings no tokens, or padding of NaN, and beside a layer
    without adapters.
    """
    if device.type == "cuda" and "ranks_per_node" in options:
        pytest.skip("NCCL takes two nodes of one machine by tests/two_gpu_nodes.sh only")
    ep = open_ep(**options)
    layer = make_layer(ep)
    plain = make_layer(ep, adapters=None)
    # Some tokens, none on rank 0, and as many as there is room for.
    for seed, tokens in enumerate((T, 0 if rank == 0 else 5, M)):
        x, numbers = inputs(ep, seed, tokens)
        assert_close(layer(x, adapter_ids=numbers), want(layer, x, numbers), slack=4)
        # Numbers without an adapter add nothing.
        none = layer(x) if rank == 0 else layer(x, adapter_ids=torch.full_like(numbers, -1))
        assert torch.equal(none, plain(x))
        # Padding of NaN with an adapter.
        real = tokens - 2 if tokens else 0
        x[real:] = torch.nan
        numbers[real:] = 1
        y = layer(x, real, adapter_ids=numbers.long())
        assert_close(y[:real], want(layer, x[:real], numbers[:real]), slack=4)
        assert not y[real:].any()
    # A batch of sequences.
    x, numbers = inputs(ep, 5, 8)
    y = layer(x.view(2, 4, D), adapter_ids=numbers.view(2, 4))
    assert y.shape == (2, 4, D) and torch.equal(y.view(8, D), layer(x, adapter_ids=numbers))


def test_experts_that_move_take_their_adapters_along(open_ep, size, rank):
    """Each rank loads what its slots hold; then every expert changes its rank."""
    S = -(-E // size) + 1
    live = {
        "live": True,
        "slots_per_rank": min(S, E),
        "layers": 1,
        "staging_mb": 1,
        "most_copies": 2,
    }
    ep = open_ep(placement=live)
    layer = make_layer(ep, layer_id=1)
    x, numbers = inputs(ep)
    before = want(layer, x, numbers)
    assert_close(layer(x, adapter_ids=numbers), before, slack=4)
    if size == 1:
        return
    # All experts go to the next rank. Sums are right on the way,
    slots = ep.slots.view(1, size, -1)
    moves = ep.replace(slots.roll(1, dims=1).flatten(1))
    while True:  # until all are: a rank may know of it a round before another one
        assert_close(layer(x, adapter_ids=numbers), before, slack=4)
        ep.poll()
        done = torch.tensor(float(moves.done))
        torch.distributed.all_reduce(done, torch.distributed.ReduceOp.MIN)
        if done:
            break
    # and behind it.
    ep.apply()
    assert moves.done and sorted(ep.logical_experts(1)) == sorted(
        slots[0, (rank - 1) % size].tolist()
    )
    assert_close(layer(x, adapter_ids=numbers), before, slack=4)


def test_adapters_are_no_part_of_checkpoints(open_ep):
    ep = open_ep()
    layer = make_layer(ep)
    plain = make_layer(ep, adapters=None)
    # One rank's state dict shares the memory of the layer.
    state = {key: value.clone() for key, value in checkpoint.full_state_dict(layer).items()}
    assert state.keys() == checkpoint.full_state_dict(plain).keys()
    x, numbers = inputs(ep)
    before = layer(x, adapter_ids=numbers)
    with torch.no_grad():
        layer.experts.w_down.zero_()
    checkpoint.load_full_state_dict(layer, state)
    assert torch.equal(layer(x, adapter_ids=numbers), before)


@pytest.fixture
def folder(tmp_path) -> Path:
    """It has a folder of PEFT for each adapter, of which one has a lower rank than there is room
    for.
    """
    for number, factors in FACTORS.items():
        adapter_models.save(tmp_path / str(number), factors, BLOCK, r=(4, 2)[number])
    return tmp_path


@pytest.fixture
def loaded(open_ep, folder) -> tuple[MoELayer, Path, torch.Tensor]:
    """A layer with both adapters of files, the folder, and what it computes of
    `inputs` with them.
    """
    layer = make_layer(open_ep())
    x, numbers = inputs(layer.ep)
    before = layer(x, adapter_ids=numbers)
    for number in ADAPTERS:
        layer.put_adapter(number, None)
    assert torch.equal(layer(x, adapter_ids=numbers), layer(x))
    for number in FACTORS:
        layer.load_adapter(number, folder / str(number), BLOCK)
    assert torch.equal(layer(x, adapter_ids=numbers), before), "each rank reads its own experts"
    return layer, folder, before


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda layer, folder: (0, folder / "none", BLOCK), "cannot be read"),
        (lambda layer, folder: (0, folder / "0", BLOCK), "`digest` is"),
        (lambda layer, folder: (1, folder / "1", BLOCK), "`number` is 0 on rank 0 and 1 on rank"),
        (lambda layer, folder: (7, folder / "1", BLOCK), "from 0 to 2, got 7"),
        (
            lambda layer, folder: (0, folder / "1", "model"),
            "parts that are not served|nothing for `model.experts`",
        ),
    ],
)
def test_one_rank_loads_another_adapter(loaded, rank, size, wrong, says):
    """Nothing changes on any rank."""
    layer, folder, before = loaded
    x, numbers = inputs(layer.ep)
    call = wrong(layer, folder) if rank == size - 1 else (0, folder / "1", BLOCK)
    if size == 1 and "is" in says:
        pytest.skip("one rank differs from no other")
    with pytest.raises(ValueError, match=says):
        layer.load_adapter(*call)
    assert torch.equal(layer(x, adapter_ids=numbers), before)


def test_factors_of_its_own(loaded, rank, size):
    """A rank that gives others, or takes away what others give, changes nothing on any."""
    layer, _, before = loaded
    x, numbers = inputs(layer.ep)
    # The adapters as tensors.
    mine = {
        n: adapter_models.adapter_of(FACTORS[n], E, list(range(E)), SCALING[n]) for n in FACTORS
    }
    # The last rank gives others, or none.
    for other in (None, mine[0], LoRA(mine[1].gate_up, None)) if size > 1 else ():
        with pytest.raises(ValueError, match="`digest` is"):
            layer.put_adapter(0, other if rank == size - 1 else mine[1])
        assert torch.equal(layer(x, adapter_ids=numbers), before)
    # Factors of too few experts.
    with pytest.raises(ValueError, match=r"`gate_up a` must be .* \[6, r, 64\]"):
        layer.put_adapter(0, LoRA((mine[0].gate_up[0][1:], mine[0].gate_up[1]), None))
    # Taken away and put again.
    for number in mine:
        layer.put_adapter(number, None)
    assert torch.equal(layer(x, adapter_ids=numbers), layer(x))
    for number, adapter in mine.items():
        layer.put_adapter(number, adapter)
    assert torch.equal(layer(x, adapter_ids=numbers), before)


def test_loading_takes_the_turn(loaded, rank, size):
    """Another thread's call, such as a step of moves, would put factors of one expert into the slot
    of another.
    """
    layer, folder, before = loaded
    x, numbers = inputs(layer.ep)
    taken = threading.Event()
    done = threading.Event()

    def hold() -> None:
        taken.set()
        done.wait()

    # The last rank has another thread in a call.
    thread = threading.Thread(target=lambda: layer.ep.exchange.run(hold))
    if rank == size - 1:
        thread.start()
        taken.wait()
    with pytest.raises(RuntimeError, match="another thread is in a call"):
        layer.load_adapter(0, folder / "1", BLOCK)
    # Nothing has changed.
    done.set()
    if rank == size - 1:
        thread.join()
    assert torch.equal(layer(x, adapter_ids=numbers), before)


def test_a_rank_that_fails_while_all_load(loaded, rank, size, monkeypatch):
    """Ranks that have the adapter do not serve it with those that have it not."""
    layer, folder, _ = loaded
    x, numbers = inputs(layer.ep)
    plain = layer(x)
    # The last rank fails behind the checks.
    if rank == size - 1:
        monkeypatch.setattr(type(layer.adapters), "_zero", lambda self, number: 1 / 0)
    with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero"):
        layer.load_adapter(0, folder / "1", BLOCK)
    monkeypatch.undo()
    # No rank serves the adapter, and all serve without one.
    with pytest.raises(EPStateError, match=r"adapter\(s\) \[0\] are not whole"):
        layer(x, adapter_ids=numbers)
    assert torch.equal(layer(x), plain)
    # Loaded again, it serves.
    layer.load_adapter(0, folder / "0", BLOCK)
    assert_close(layer(x, adapter_ids=numbers), want(layer, x, numbers), slack=4)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("live", [False, True])
def test_another_group(open_ep, rank, size, live, copies, folder):
    """All ranks lose all adapters where one gets an expert without its weights, and keep them
    otherwise.
    """
    if size == 1:
        pytest.skip("one rank leaves no other")
    placement = {"num_redundant_experts": (copies - 1) * E, "strategy": "round_robin"}
    if live:
        placement = {
            "live": True,
            "slots_per_rank": -(-copies * E // size),
            "layers": 1,
            "most_copies": 2,
        }
    ep = open_ep(placement=placement)
    layer = make_layer(ep, layer_id=1)
    x, numbers = inputs(ep)
    # The same group again: nothing changes.
    before = layer(x, adapter_ids=numbers)
    ep.resume()
    assert torch.equal(layer(x, adapter_ids=numbers), before)

    # The last rank leaves.
    group = group_of(range(size - 1), backend="gloo")
    if rank == size - 1:
        ep.close()
        return
    moves = ep.resume(group, spread_lost=True)
    held = [max(expert, 0) for expert in ep.logical_experts(1)]
    layer.experts = GroupedExperts(GATE_UP[held].to(ep.device), DOWN[held].to(ep.device))

    # Copies of all its experts were elsewhere: the adapters stay.
    if live and copies == 2:
        assert not moves
        assert_close(layer(x, adapter_ids=numbers), want(layer, x, numbers), slack=4)
        return

    # Otherwise all adapters are lost, until each was loaded or removed.
    with pytest.raises(EPStateError, match=r"adapter\(s\) \[0, 1\] are not whole"):
        layer(x, adapter_ids=numbers)
    layer.load_adapter(1, folder / "1", BLOCK)
    layer.put_adapter(0, None)
    numbers.masked_fill_(numbers == 0, -1)
    assert_close(layer(x, adapter_ids=numbers), want(layer, x, numbers), slack=4)
    layer.load_adapter(0, folder / "0", BLOCK)
    x, numbers = inputs(ep)
    assert_close(layer(x, adapter_ids=numbers), want(layer, x, numbers), slack=4)


def test_while_experts_move(open_ep, size, folder):
    if size == 1:
        pytest.skip("experts of one rank have nowhere to go")
    live = {"live": True, "slots_per_rank": E, "layers": 1, "staging_mb": 1, "most_copies": 2}
    layer = make_layer(ep := open_ep(placement=live), layer_id=1)
    ep.replace(ep.slots.view(1, size, -1).roll(1, dims=1).flatten(1))
    with pytest.raises(EPStateError, match="experts are moving"):
        layer.load_adapter(0, folder / "1", BLOCK)
    ep.apply()
    layer.load_adapter(1, folder / "1", BLOCK)
    x, numbers = inputs(ep)
    assert_close(layer(x, adapter_ids=numbers), want(layer, x, numbers), slack=4)


def dist_any(value: bool) -> bool:
    on_any = torch.tensor(float(value))
    dist.all_reduce(on_any, dist.ReduceOp.MAX)
    return bool(on_any)


@pytest.mark.slow
@ON_THE_CPU
@pytest.mark.parametrize("seed", range(4))
def test_a_storm(open_ep, rank, size, seed, folder):
    """Loads, right ones and wrong ones, moves, other groups and calls of another thread, in any
    order: each token has the adapter that its number has by then, or its call is refused. The
    `extra` of other rounds is their own.
    """
    if size == 1:
        pytest.skip("one rank leaves no other")
    live = {"live": True, "slots_per_rank": E, "layers": 1, "staging_mb": 1, "most_copies": 2}
    ep = open_ep(placement=live)
    random = Random(seed)
    held = dict(ADAPTERS)
    layer = make_layer(ep)

    def load() -> None:
        # One rank at most is given a folder that does not exist.
        number = random.randrange(3)
        file = random.randrange(2)
        bad = random.choice([None, *range(size)])
        refused = (
            nullcontext() if bad is None else pytest.raises(ValueError, match="cannot be read")
        )
        with refused:
            layer.load_adapter(number, folder / ("none" if rank == bad else str(file)), BLOCK)
            held[number] = ADAPTERS[file]

    def move() -> None:
        # Each expert on one or two ranks.
        slots = torch.full((1, size * E), -1)
        for x in range(E):
            for to in random.sample(range(size), random.randint(1, min(2, size))):
                slots[0, to * E + x] = x

        # Rounds while they move, then what is left of the moves.
        ep.replace(slots)
        for _ in range(random.randrange(4)):
            serve()
            ep.poll()
        ep.apply()

    def regroup() -> None:
        """The last rank leaves, and another one comes in its place."""
        nonlocal ep, layer
        others = group_of(range(size - 1), backend="gloo")
        lost = False
        if rank == size - 1:
            config = ep.config
            _ = ep.close()
            ep = ExpertParallel(config, device=ep.device)
            layer = make_layer(ep)
        else:
            lost = bool(ep.resume(others, spread_lost=True))
            experts = [max(x, 0) for x in ep.logical_experts(1)]
            layer.experts = GroupedExperts(GATE_UP[experts], DOWN[experts])
            ep.resume()

        # Where a rank has lost experts, no rank serves adapters until they were loaded again.
        x, numbers = inputs(ep)
        if dist_any(lost):
            with pytest.raises(EPStateError if layer.adapters.lost else EPAbortedError):
                layer(x, adapter_ids=numbers)
        for number in range(3):
            layer.put_adapter(number, None)
            layer.load_adapter(number, folder / str(number % 2), BLOCK)
            held[number] = ADAPTERS[number % 2]

    def clear() -> None:
        number = random.randrange(3)
        layer.put_adapter(number, None)
        held.pop(number, None)

    def from_another_thread() -> None:
        got = []
        thread = threading.Thread(
            target=lambda: got.append(pytest.raises(RuntimeError, layer.ep.loads))
        )
        ep.exchange.run(lambda: (thread.start(), thread.join()))
        assert got

    def bring_extra() -> None:
        x = inputs(ep)[0]
        ids = torch.arange(T)[:, None].expand(T, K) % E
        weights = torch.ones(T, K)
        d = ep.dispatch(
            x,
            ids[:, :1].contiguous(),
            weights[:, :1].contiguous(),
            tag=1,
            extra=x[:, :1].contiguous(),
        )
        n = int(d.expert_offsets[-1])
        assert torch.equal(d.extra.view(-1)[:n], d.rows[:n, 0])
        ep.combine(d.rows.clone(), d)

    def serve() -> None:
        x, _ = inputs(ep, random.randrange(99))
        numbers = torch.tensor([random.choice([-1, 0, 1, 2, 5]) for _ in range(T)]).roll(rank)
        ids, weights = ep.route(layer.logits(x))
        y = adapter_models.merged_reference(x, ids, weights, (GATE_UP, DOWN), held, numbers)
        assert_close(layer(x, adapter_ids=numbers), y, slack=4)

    for _ in range(60):
        random.choice([load, load, move, regroup, clear, from_another_thread, bring_extra])()
        serve()


def test_a_wrong_call_on_one_rank(open_ep, rank, size):
    """The others hear of it, and the next round is whole."""
    layer = make_layer(open_ep())
    x, numbers = inputs(layer.ep)
    for wrong, error, says in [
        (
            numbers[:-1],
            ValueError,
            r"`adapter_ids` must be int16 or int32 or int64 \[9\], got int16 \[8\]",
        ),
        (numbers.float(), TypeError, "`adapter_ids` must be"),
        ([0] * T, TypeError, "`adapter_ids` must be"),
    ]:
        if rank == 0:
            with pytest.raises(error, match=says):
                layer(x, adapter_ids=wrong)
        else:
            with pytest.raises(EPAbortedError, match=r"rank\(s\) \[0\] aborted"):
                layer(x, adapter_ids=numbers)
                layer.ep.check()
        assert_close(layer(x, adapter_ids=numbers), want(layer, x, numbers), slack=4)


@ON_GPUS
@pytest.mark.parametrize("gemm", ["auto", "torch"])
@pytest.mark.parametrize("tokens", [T, M])
def test_in_graphs(open_ep, gemm, tokens):
    """Replays read the adapters of tokens anew, and adapters that were put meanwhile. Nothing looks
    at the host.
    """
    layer = make_layer(open_ep(dtype="bfloat16", ll_max_tokens=12), torch.bfloat16, gemm=gemm)
    x, numbers = inputs(layer.ep, dtype=torch.bfloat16, tokens=tokens)
    replay, y = captured(lambda: layer(x, adapter_ids=numbers))
    # Other adapters of the tokens,
    for _ in range(3):
        numbers.copy_(numbers.roll(1))
        x.copy_(x.roll(2, dims=0))
        replay()
        replayed = y.clone()
        assert_close(replayed, want(layer, x, numbers), slack=4)
        assert torch.equal(replayed, layer(x, adapter_ids=numbers))
    # and no adapters any more.
    layer.put_adapter(0, None)
    layer.put_adapter(1, None)
    replay()
    without = y.clone()
    assert torch.equal(without, layer(x))
    layer.ep.check()


@ON_THE_CPU
def test_an_adapter_wherever_a_handler_raises(open_ep, rank):
    """All ranks have the adapter, or nobody."""
    layer = make_layer(open_ep())
    factors, scaling = ADAPTERS[0]
    adapter = adapter_models.adapter_of(factors, E, list(range(E)), scaling)

    def step(begun: Callable[[], None]) -> None:
        layer.put_adapter(0, None)

        def read(sizes: Any, _: bool) -> StoredAdapter:
            begun()
            return StoredAdapter.from_lora(adapter, sizes)

        put_on_all_ranks(layer, "put_adapter", 0, "", read)

    for _ in steps_until_whole(rank, step):
        is_usable = 0 in layer.adapters.numbers and 0 not in layer.adapters.lost
        assert len(set(of_all(is_usable))) == 1
