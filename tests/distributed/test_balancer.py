"""`Balancer`: the busiest rank takes less, and what a model says does not change while its experts
move.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event

import pytest
import torch
import torch.distributed as dist
from helpers import Interrupted, generator, randn, slow
from interrupted_steps import of_all, steps_until_whole
from torch import Tensor
from waits import AT_ONCE_S

from epmoe import Balancer, EPStateError, ExpertParallel, MoELayer, Placement, balance, route
from epmoe.config.deadlines import Deadlines
from epmoe.integrations import balancing
from epmoe.live import balancer as balancer_module
from epmoe.live import experts, moves
from epmoe.live.balance import Plan, fresh
from epmoe.live.layout import Word
from epmoe.local.reference import moe_reference

pytestmark = pytest.mark.usefixtures("serving")

E = 16
K = 2
D = 32
L = 2
VOCABULARY = 48
STEPS = 160


@pytest.fixture
def ep(make_ep, size) -> ExpertParallel:
    live = {"live": True, "slots_per_rank": min(-(-E // size) + 1, E), "layers": L, "staging_mb": 1}
    made = make_ep(
        experts=E, top_k=K, hidden=D, max_tokens=8, placement=live, routing={"renormalize": True}
    )
    made.exchange.plan.sizes["few_tokens"] = 0  # otherwise GPUs balance copies, and not rows
    return made


class Model:
    """A decoder of a few layers without attention, whose routers drift from step to step."""

    def __init__(self, ep: ExpertParallel) -> None:
        self.embedding = randn(VOCABULARY, D, seed=1).to(ep.device)
        self.routers = [randn(E, D, seed=10 + layer) for layer in range(L)]
        self.later = [randn(E, D, seed=20 + layer) for layer in range(L)]
        self.experts = [
            (randn(E, 2 * D, D, seed=30 + layer) / D**0.5, randn(E, D, D, seed=40 + layer) / D**0.5)
            for layer in range(L)
        ]
        self.ep = ep
        self.load = torch.zeros(STEPS, L, E)
        self.layers = [
            MoELayer.from_full(ep, router.clone(), *weights)
            for router, weights in zip(self.routers, self.experts, strict=True)
        ]

    def router(self, layer: int, step: int) -> Tensor:
        """Its bias towards some experts moves, too: by the mean of x, which is large."""
        part = step / STEPS
        hot = 3.0 * torch.roll(torch.linspace(1, -1, E) ** 3, int(4 * part))
        return (1 - part) * self.routers[layer] + part * self.later[layer] + hot[:, None] / D**0.5

    def decode(self, tokens: Tensor, step: int) -> Tensor:
        h = self.embedding[tokens] + 1
        for number, layer in enumerate(self.layers):
            layer.router_weight.copy_(self.router(number, step))
            h = h + layer(h)
        return ((h - 1) @ self.embedding.T).argmax(dim=1)

    def decode_alone(self, tokens: Tensor, step: int) -> Tensor:
        embedding = self.embedding.cpu()
        h = (embedding[tokens] + 1).double()
        for number, weights in enumerate(self.experts):
            routing = route(h.float() @ self.router(number, step).T, K, renormalize=True)
            self.load[step, number] = torch.bincount(routing.ids.flatten(), minlength=E)
            h = h + moe_reference(h.float(), routing.ids, routing.weights, weights)
        return ((h.float() - 1) @ embedding.T).argmax(dim=1)


def test_tokens_stay_those_of_one_process_while_experts_move(ep, size, rank):
    """The routing drifts. The busiest rank takes less than it would where experts stay, and tokens
    are the same.
    """
    model = Model(ep)
    balancer = Balancer(ep, every=8)
    tokens = torch.randint(VOCABULARY, (8,), generator=generator(rank))
    own_rows = []
    # Each step: the tokens are those of one process, and this rank counts its rows.
    for step in range(STEPS):
        before = ep.health().tokens_per_expert
        got = model.decode(tokens.to(ep.device), step).cpu()
        assert torch.equal(got, model.decode_alone(tokens, step))
        own_rows.append(sum(ep.health().tokens_per_expert) - sum(before))
        balancer.tick()
        tokens = (got + step + rank) % VOCABULARY  # no fixed point
    balancer.finish()
    # Where the rows would have gone without moves, and where they went.
    rows = of_all(own_rows)
    dist.all_reduce(model.load)
    where = torch.tensor(Placement.build(E, size).owners)
    stay = torch.zeros(size).index_add_(0, where, model.load[STEPS // 4 :].sum((0, 1)))
    moving = torch.tensor(rows)[:, STEPS // 4 :].sum(1).float()
    # The busiest rank is nearer to the mean.
    if size > 1:
        assert len(balancer.history) > 3 and sum(step.moves for step in balancer.history) > 0
        assert busiest(moving) - 1 < 0.6 * (busiest(stay) - 1), (busiest(moving), busiest(stay))
    balancer.close()


def busiest(rows: Tensor) -> float:
    """The rows of the busiest rank over the mean."""
    return float(rows.max() / rows.mean())


def test_a_plan_that_one_rank_refuses_is_dropped_on_all(ep, size, rank):
    """`tick` raises there, and nowhere else. The balancer goes on with the next plan."""
    model = Model(ep)
    fails = rank == size - 1
    # The last rank cannot hand out the weights of the first plan.
    balancer = Balancer(
        ep,
        every=4,
        weights=lambda tag, slot: [1 // 0] if fails else ep.live.weights[tag](tag, slot),
    )
    tokens = torch.randint(VOCABULARY, (8,), generator=generator(rank))
    for step in range(STEPS // 2):
        got = model.decode(tokens.to(ep.device), step).cpu()
        assert torch.equal(got, model.decode_alone(tokens, step))
        try:
            balancer.tick()
        except ZeroDivisionError:
            assert fails
            fails = False
        tokens = (got + step + rank) % VOCABULARY
    balancer.finish()
    # All have the same history, without that plan.
    if size > 1:
        history = of_all([step.moves for step in balancer.history])
        assert sum(history[0]) and history == [history[0]] * size
        assert ep.health().refused_plans == 1 and not fails
    balancer.close()


def test_a_checkpoint_holds_the_experts_wherever_they_are(ep, size):
    model = Model(ep)
    before = [layer.full_state_dict() for layer in model.layers]
    loads = torch.ones(L, E)
    loads[:, : E // size] = 3
    moves = ep.replace(balance(loads, ep.slots, ep_size=size).slots)
    # Not in the middle of a move,
    if size > 1:
        with pytest.raises(EPStateError, match="experts are moving"):
            model.layers[0].full_state_dict()
        assert moves.count
    ep.apply()
    dist.barrier()
    # but behind it, the same weights, which load where the experts are now.
    for layer, state in zip(model.layers, before, strict=True):
        after = layer.full_state_dict()
        assert after.keys() == state.keys() and all(
            torch.equal(after[key], state[key]) for key in state
        )
        layer.load_full_state_dict(state)
    tokens = torch.arange(8)
    assert torch.equal(model.decode(tokens.to(ep.device), 0).cpu(), model.decode_alone(tokens, 0))


class Planned:
    """A policy whose plans are the best for loads that are drawn anew each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, loads: Tensor, slots: Tensor, *, ep_size: int, **limits: float) -> Plan:
        self.calls += 1
        return balance(torch.rand(L, E, generator=generator(self.calls)), slots, ep_size=ep_size)


def tick_until(balancer: Balancer, done: Callable[[], bool]) -> None:
    while not done():
        balancer.tick()


def test_finish_takes_up_a_plan_where_the_last_one_has_not_been_seen_to_end(ep, size, rank):
    """Rank 0 sees the end of the first moves and sends a second plan; the others look again only in
    `finish`.
    """
    model = Model(ep)
    policy = Planned()
    balancer = Balancer(ep, every=1, policy=policy)
    # A first plan, whose moves end everywhere.
    model.decode(torch.arange(8, device=ep.device), 0)
    tick_until(balancer, lambda: ep.live.moves is not None)
    moves = ep.live.moves
    # Each rank sends loads for the second one.
    model.decode(torch.arange(8, device=ep.device), 1)
    balancer.tick()  # sends the loads for the second plan
    while moves.version < moves.last:
        ep.poll()
    ep.live.mail.flush()
    dist.barrier()
    # Rank 0 alone sees the end, and plans.
    if rank == 0:
        tick_until(balancer, lambda: len(balancer.history) == 2)
        ep.live.mail.flush()
    dist.barrier()
    assert rank == 0 or not moves.done
    # The others learn both now.
    balancer.finish()
    assert len(balancer.history) == 2 and (rank or policy.calls == 2)
    balancer.close()


def test_a_plan_stays_until_all_ranks_have_taken_it_up(ep, size, rank):
    """Otherwise a rank that reads a plan, which another one has refused, reads parts of the next
    plan.
    """
    if size < 3:
        pytest.skip("rank 0 plans, one rank refuses, and one is late")
    model = Model(ep)
    policy = Planned()
    may_publish = Event()

    def slow_policy(*arguments: Tensor, **limits: float) -> Plan:
        plan = policy(*arguments, **limits)
        assert may_publish.wait(50)
        return plan

    # Rank 1 refuses every plan: it cannot read weights.
    weights = (lambda tag, slot: [1 // 0]) if rank == 1 else None
    balancer = Balancer(ep, every=1, policy=slow_policy, weights=weights)

    # Loads of two steps. Rank 0 computes a plan from the first, and holds it back.
    for step in range(2):  # the second one's loads are for a second plan
        model.decode(torch.arange(8, device=ep.device), step)
        balancer.tick()
        ep.live.mail.flush()
        dist.barrier()
        if rank == 0:
            tick_until(balancer, lambda: policy.calls == 1)
        dist.barrier()

    # It publishes the plan, and takes it up. Rank 1 refuses it, the last rank has not looked yet.
    if rank == 0:
        may_publish.set()
        tick_until(balancer, lambda: balancer.plan is not None)
        ep.live.mail.flush()
    dist.barrier()
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            tick_until(balancer, lambda: False)
    ep.live.mail.flush()
    dist.barrier()

    # Rank 0 has computed a second plan, which must not replace the first one yet.
    if rank == 0:
        tick_until(balancer, lambda: policy.calls == 2)
        for _ in range(20):
            balancer.tick()
            time.sleep(1e-3)
    ep.live.mail.flush()
    dist.barrier()

    # So the late rank still reads the first one.
    if rank == size - 1:
        while (words := ep.live.mail.words()) is None:
            pass
        assert words[0][Word.PLANNED] == 1 and ep.live.calls == 0
    balancer.finish()
    balancer.close()
    assert ep.live.calls == 1 and not balancer.history


@pytest.mark.parametrize("ticks", [0, 3])
def test_a_rank_that_leaves_tick_out_is_named(ep, size, rank, monkeypatch, caplog, ticks):
    """From the first tick on, or later. Once it ticks again, there is a plan."""
    if size == 1:
        pytest.skip("a rank that others wait for")
    late = size - 1
    model = Model(ep)
    balancer = Balancer(ep, every=4, policy=Planned())
    monkeypatch.setattr(ep.exchange, "deadlines", Deadlines(0.05, 0.05, lambda: 2))

    def step(tick: bool) -> None:
        model.decode(torch.arange(8, device=ep.device), 0)
        if tick:
            balancer.tick()
        ep.live.mail.flush()
        dist.barrier()

    # One rank leaves `tick` out, and the others name it.
    for _ in range(ticks):
        step(tick=True)
    for _ in range(4):
        step(tick=rank != late)
    if rank != late:
        tick_until(balancer, lambda: balancer.stalls >= 2)
        assert late in balancer.waits_for() and ep.live.stalled_plans >= 2
        assert f"rank(s) [{late}] have sent no loads" in caplog.text
        assert not balancer.history

    # It ticks again.
    dist.barrier()
    monkeypatch.undo()
    while ep.live.ticks < 12:
        balancer.tick()
    ep.live.mail.flush()
    dist.barrier()
    if rank == 0:
        tick_until(balancer, lambda: balancer.plan is not None)
    ep.live.mail.flush()
    dist.barrier()
    balancer.finish()
    assert len(balancer.history) == 1
    balancer.close()


def test_a_signal_handler_that_raises_as_a_plan_is_published(ep, size, rank, monkeypatch):
    """Right behind the word by which rank 0 itself takes the plan up: `finish` must have the others
    follow.
    """
    model = Model(ep)
    balancer = Balancer(ep, every=1, policy=Planned())
    post = ep.live.mail.post

    def interrupted(word: Word, *rest: object) -> None:
        post(word, *rest)
        if word == Word.PLANNED:
            raise KeyboardInterrupt

    # All have sent their loads.
    model.decode(torch.arange(8, device=ep.device), 0)
    balancer.tick()
    ep.live.mail.flush()
    dist.barrier()
    # Rank 0 plans, is interrupted behind its word, and takes the plan up.
    if rank == 0:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ep.live.mail, "post", interrupted)
            tick_until(balancer, lambda: False)
        tick_until(balancer, lambda: ep.live.calls == 1)
    # The others have heard nothing so far.
    dist.barrier()
    balancer.finish()
    balancer.close()
    assert ep.live.calls == len(balancer.history) == 1


@pytest.mark.parametrize(("victim", "stride"), [(0, 41), (1, 41), slow(0, 1), slow(1, 1)])
def test_a_plan_is_carried_out_wherever_a_handler_raises(ep, size, rank, victim, stride):
    """In `tick` and `finish` of one rank, which calls again: the others wait for no deadline, and
    all have the same table. A plan in whose begin the handler has raised may be dropped by all.
    """
    if victim >= size:
        pytest.skip("there is no such rank")
    model = Model(ep)
    balancer = Balancer(ep, every=1, policy=Planned())

    def until_done(call: Callable[[], None]) -> None:
        """A rank that a handler interrupts calls again."""
        try:
            call()
        except Interrupted:
            call()

    # On a GPU a tick asks for the words of the others, and a later tick finds them.
    ticks = 2 if ep.device.type == "cpu" else 3

    def tick() -> None:
        """Some ticks, each of which finds what the ticks of all ranks before it have sent."""
        for _ in range(ticks):
            until_done(balancer.tick)
            if ep.device.type == "cuda":
                torch.cuda.synchronize(ep.device)
            dist.barrier()

    def plan(begun: Callable[[], None]) -> None:
        begun()
        # Loads are sent, rank 0 begins to plan, and sends its plan, which all take up.
        tick()
        while balancer._planning is not None and not balancer._planning.done:
            pass
        tick()
        until_done(balancer.finish)

    files = {balancer_module.__file__, experts.__file__, moves.__file__}
    begin = time.monotonic()
    for number, outcomes in enumerate(
        steps_until_whole(rank, plan, victim=victim, files=files, stride=stride)
    ):
        assert set(outcomes) == {"whole"}
        assert time.monotonic() - begin < AT_ONCE_S, "nobody waits for a deadline"
        tables = of_all(ep.slots.tolist())
        assert tables == tables[:1] * size
        tokens = torch.arange(8)
        got = model.decode(tokens.to(ep.device), number % STEPS).cpu()
        assert torch.equal(got, model.decode_alone(tokens, number % STEPS))
        begin = time.monotonic()
    balancer.close()
    assert ep.live.calls > 2


def test_ticks_and_calls_past_the_numbers_of_31_bits(ep, size, rank):
    """As if so many ticks, plans and calls of `finish` had been. Plans are calls of `replace`,
    which end at 2³¹ − 1.
    """
    model = Model(ep)
    balancer = Balancer(ep, every=1, policy=Planned())
    # The words of a group that has run for long.
    ep.live.ticks = 2**33
    ep.live.finishes = 2**31 - 2
    ep.live.calls = 2**31 - 10
    ep.live.mail.post(Word.PLAN, ep.live.calls << 32, range(size))
    if rank == 0:
        ep.live.mail.post(Word.LAST_PLAN, 2**31 - 2 << 32 | 2**31 - 10, range(size))
    ep.live.mail.flush()
    dist.barrier()
    # Plans come, but for round 2, in which `finish` ends without one.
    for n in range(4):
        model.decode(torch.arange(8, device=ep.device), n)
        if n != 2:
            # Rank 0 looks last, so that it has the loads of all.
            if rank:
                balancer.tick()
                ep.live.mail.flush()
            dist.barrier()
            if rank == 0:
                plan = balancer.plan
                tick_until(balancer, lambda plan=plan: balancer.plan is not plan)
        balancer.finish()
        assert len(balancer.history) == [1, 2, 2, 3][n]
        dist.barrier()  # a rank that is late would take up the next plan
    # Ticks are counted past 2³², in the words of all.
    assert ep.live.calls == 2**31 - 7
    balancer.tick()
    ep.live.mail.flush()
    dist.barrier()
    while (words := ep.live.mail.words()) is None:
        pass
    assert rank or all(row[Word.COUNTED] > 2**33 for row in words)
    balancer.close()


def everything_on_one(loads: Tensor, slots: Tensor, **limits: float) -> Plan:
    return balance(loads, torch.arange(E, dtype=torch.int32).expand(L, -1), ep_size=1)


def too_many(loads: Tensor, slots: Tensor, **limits: float) -> Plan:
    return anew(loads, slots.repeat(1, 2), **limits)


def anew(loads: Tensor, slots: Tensor, *, ep_size: int, most_copies: int, **limits: float) -> Plan:
    """A placement from nothing but loads, whatever moves: that of docs/moving.md."""
    target = fresh(loads, ep_size, slots.shape[1] // ep_size, most_copies=most_copies)
    return balance(loads, target, ep_size=ep_size, max_moves=0)


def test_a_policy_is_any_callable(ep, size, rank):
    """All ranks carry out what it plans. A plan that does not fit raises in `tick` of rank 0, and
    nothing moves. One balancer after another counts on where the last one has ended.
    """
    model = Model(ep)
    before = ep.slots
    # Plans that no rank can carry out.
    for wrong in (everything_on_one, too_many) if size > 1 else ():
        balancer = Balancer(ep, every=1, policy=wrong)
        model.decode(torch.arange(8, device=ep.device), 0)
        balancer.tick()
        dist.barrier()
        if rank == 0:
            with pytest.raises(ValueError, match="`slots` must be|`policy` must plan slots"):
                tick_until(balancer, lambda: False)
        dist.barrier()
        balancer.finish()
        assert torch.equal(ep.slots, before) and not balancer.history
        balancer.close()
    # A plan that moves everything, which the others take up in `finish`.
    balancer = Balancer(ep, every=1, policy=anew)
    tokens = torch.arange(8, device=ep.device)
    model.decode(tokens, 0)
    balancer.tick()
    dist.barrier()
    if rank == 0:
        tick_until(balancer, lambda: len(balancer.history) == 1)
    balancer.finish()
    if rank == 0:
        held, wanted = (t.view(L, size, -1).sort().values for t in (ep.slots, balancer.plan.slots))
        assert torch.equal(held, wanted) and (size == 1 or not torch.equal(ep.slots, before))
    assert torch.equal(model.decode(tokens, 1).cpu(), model.decode_alone(tokens.cpu(), 1))
    balancer.close()


def test_a_balancer_refuses_what_does_not_fit(ep):
    for wrong in (
        {"every": 0},
        {"goal": 0.9},
        {"max_moves": -1},
        {"least_gain": -1.0},
        {"least_gain": float("nan")},
    ):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be"):
            Balancer(ep, **wrong)


def test_a_balancer_needs_experts_that_move(make_ep):
    with pytest.raises(EPStateError, match="`placement.live` is not set"):
        Balancer(make_ep())


def test_slots_that_rank_0_cannot_write(rank, size, monkeypatch):
    """As in a framework whose experts move: the other ranks do not wait for the file."""

    def fail(*_: object) -> None:
        raise OSError("no space left")

    live = {"slots_per_rank": 4}
    first = Placement.build(3 * size, size)
    with monkeypatch.context() as patch:
        patch.setattr(balancing, "write_slots", fail)
        said = "^no space left$" if rank == 0 else "^rank 0: OSError: no space left$"
        with (
            pytest.raises(OSError if rank == 0 else RuntimeError, match=said),
            balancing.section_with_slots(live, first, 2, dist.group.WORLD),
        ):
            pass
    with balancing.section_with_slots(live, first, 2, dist.group.WORLD) as section:
        assert len(set(of_all(section["slots"]))) == 1
        dist.barrier()
