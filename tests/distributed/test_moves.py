"""Experts move while rounds go on: every y is right, however far each rank has come; equal tables
give equal bits.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from exchanges import make_config
from helpers import ON_GPUS, ON_THE_CPU, assert_close, generator, randn, slow
from interrupted_steps import of_all
from slot_tables import Slots, draw_slots
from torch import Tensor
from waits import until

from epmoe import EPRefusedError, EPStateError, EPTimeoutError, ExpertParallel, MoELayer
from epmoe.config.deadlines import Deadlines
from epmoe.live import tables
from epmoe.live.layout import EMPTY, Word
from epmoe.live.moves import MOST_CALLS, Moves
from epmoe.native.arguments import MXFP4

pytestmark = pytest.mark.usefixtures("serving")

E = 12
K = 3
D = 32
M = 16
L = 3
DATA = 300_000  # bytes of an expert beside its row: several parts of the staging


def draw_table(ep: ExpertParallel, seed: int, most: int = 4) -> Tensor:
    return draw_slots(seed, L, E, ep.size, ep.num_local_experts, most=most, free=1)


def make_round(rank: int, seed: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = generator(1000 * seed + rank)
    ids = torch.rand(T, E, generator=draw).argsort(dim=1)[:, :K].int()
    return randn(T, D, seed=7 * seed + rank), ids, 0.1 + torch.rand(T, K, generator=draw)


@pytest.fixture
def make(make_ep, size) -> Callable[..., ExpertParallel]:
    # A slot for each expert of a rank, and one that is free.
    S = -(-E // size) + (1 if size > 1 else 0)

    def build(
        most_copies: int = 4,
        more_slots: int = 0,
        max_tokens: int = M,
        hidden: int = D,
        **options,
    ) -> ExpertParallel:
        slots = min(S + more_slots, E)
        live = {
            "live": True,
            "slots_per_rank": slots,
            "layers": L,
            "staging_mb": 1,
            "most_copies": most_copies,
        }
        return make_ep(
            experts=E, top_k=K, hidden=hidden, max_tokens=max_tokens, placement=live, **options
        )

    return build


@pytest.fixture
def ep(make) -> ExpertParallel:
    return make()


@pytest.fixture
def several(size) -> None:
    if size == 1:
        pytest.skip("nothing moves")


@pytest.fixture
def slots(ep) -> Slots:
    return slots_of(ep)


def slots_of(ep: ExpertParallel, big: bool = False) -> Slots:
    return Slots(ep, D, 5 * DATA if big else 3)


def begin(slots: Slots, seed: int, **options: int) -> Moves:
    """Begin to move to a drawn table."""
    return slots.ep.replace(draw_table(slots.ep, seed, **options), slots.of)


def play(ep: ExpertParallel, slots: Slots, seed: int, layer: int, T: int) -> Tensor:
    x, ids, weights = make_round(ep.rank, seed, T)
    d = ep.dispatch(*(t.to(ep.device) for t in (x, ids, weights)), tag=layer + 1)
    y = ep.combine(slots.run(d, layer), d)
    assert_close(y.cpu(), slots.want(x, ids, weights, layer), slack=4)
    return y


def assert_alike(size: int, value: object) -> None:
    """All ranks have the same value."""
    assert of_all(value) == [value] * size


@pytest.mark.parametrize("few", [True, False])
def test_experts_move_while_rounds_go_on(make, size, rank, few):
    """Each rank steps at its own times; drawn tables follow one another."""
    ep = make()
    ep.exchange.plan.sizes["few_tokens"] = M if few else 0
    slots = slots_of(ep, big=True)
    draw = random.Random(rank)
    rounds = 0
    for number in range(4):
        # A new table, to which all ranks move at their own pace.
        target = draw_table(ep, seed=number)
        loads = torch.rand(L, E, generator=generator(number))
        moves = ep.replace(target, slots.of, loads=loads)
        # Each rank polls as often as it likes between two rounds.
        for _ in range(12):
            play(
                ep, slots, rounds, rounds % L, T=random.Random(31 * rounds + rank).randrange(M + 1)
            )
            rounds += 1
            for _ in range(draw.randrange(6)):
                ep.poll()
        ep.apply()
        # At the end all experts are where the table says, whole.
        assert moves.done and not moves.stalls
        slots.check()
        assert torch.equal(*(table.view(L, size, -1).sort().values for table in (ep.slots, target)))
        dist.barrier()


def test_equal_tables_give_equal_bits(ep, slots):
    # y with the first table, behind the move, and back again.
    first = [play(ep, slots, seed, seed % L, 9) for seed in range(L)]
    start = ep.slots.clone()
    begin(slots, 3)
    ep.apply()
    moved = [play(ep, slots, seed, seed % L, 9) for seed in range(L)]
    again = [play(ep, slots, seed, seed % L, 9) for seed in range(L)]
    assert all(map(torch.equal, moved, again))
    dist.barrier()
    ep.replace(start, slots.of)
    ep.apply()
    assert all(map(torch.equal, first, [play(ep, slots, seed, seed % L, 9) for seed in range(L)]))


def test_shares_follow_loads(ep, slots, several, size, rank):
    """The whole load on one expert with copies: they take as much of it as each other."""
    ep.exchange.plan.sizes["few_tokens"] = 0
    assert ep.loads().sum() == 0
    # Which ranks have a copy of expert 0, and all load is its.
    holders = (ep.slots.view(L, size, -1)[0] == 0).any(1)
    loads = torch.zeros(L, E)
    loads[:, 0] = 1
    ep.share(loads)
    ep.apply()
    dist.barrier()
    for seed in range(20):
        x, _, weights = make_round(rank, seed, M)
        # All tokens go to expert 0.
        ids = torch.tensor([[0, -1, -1]], dtype=torch.int32).repeat(M, 1)
        d = ep.dispatch(*(t.to(ep.device) for t in (x, ids, weights)), tag=1)
        ep.combine(slots.run(d, 0), d)
    ep.check()
    ep.loads()
    dist.barrier()
    # Every token was counted, and each holder has had its share.
    total = ep.loads()
    assert total[0, 0] == 20 * M * size and total.sum() == total[0, 0]
    mine = torch.tensor(ep.health().tokens_per_expert).sum() / (total[0, 0] / holders.sum())
    assert 0.7 < mine < 1.3 if holders[rank] else mine == 0


def test_moves_that_are_cancelled_leave_every_expert_in_use(ep, slots, size, rank):
    moves = begin(slots, 5)
    if rank == 0:
        moves.cancel()
    # Rounds go on while the ranks agree on where to stop.
    for seed in range(8):
        play(ep, slots, seed, seed % L, 5)
        ep.poll()
    ep.apply()
    assert moves.done
    # All have stopped at the same table, and may move again.
    assert_alike(size, ep.slots.tolist())
    begin(slots, 6)
    ep.apply()
    play(ep, slots, 9, 1, 5)


@pytest.mark.parametrize("first", [True, False])
def test_ranks_with_other_tables_hear_of_it(ep, slots, several, rank, first):
    """And begin again: with `first`, rank 0 does before the others have looked, and is not taken
    for ready.
    """
    moves = begin(slots, 10 + rank)
    dist.barrier()
    # Who looks learns of it, and begins with the right table.
    for turn in (rank == 0, rank > 0) if first else (True,):
        if turn:
            with pytest.raises(EPRefusedError, match="were given other slots"):
                ep.apply()
            assert moves.done and moves.version == -1
            begin(slots, 10)
        if first:
            dist.barrier()
    play(ep, slots, 1, 1, 5)
    ep.apply()
    play(ep, slots, 2, 2, 5)


def slots_in_use(ep: ExpertParallel) -> list[set[int]]:
    """By layer, those that a table of this rank names."""
    return [
        set(table[table != -1].bitwise_and(0xFFFF).tolist())
        for table in ep.exchange.views["table.copies"]
    ]


def test_shares_on_their_way_do_not_bring_dropped_slots_back(ep, slots, several):
    ep.share(torch.rand(L, E))
    moves = begin(slots, 3)
    dist.barrier()
    until(lambda: all(made.done for _, made in ep.live._versions))  # and the shares before
    while moves.version < 0:
        ep.poll()
    for move in moves.waves[0].moves:
        assert move.slot not in slots_in_use(ep)[move.layer]
    dist.barrier()
    ep.apply()
    play(ep, slots, 2, 2, 5)


def test_shares_given_during_the_last_wave_are_used(ep, slots, size):
    moves = begin(slots, 3)
    while moves.version < moves.last:
        ep.poll()
    loads = torch.rand(L, E, generator=generator(7))
    ep.share(loads)
    ep.apply()
    table = ep.exchange.views["table.copies"].cpu()
    assert torch.equal(
        table, tables.tables(ep.slots, loads.double(), ep.rank, size, 4, table.shape[-1])
    )


@pytest.mark.parametrize("seed", range(4))
def test_copies_move_where_no_more_are_allowed(make, size, seed):
    """Between two waves an expert has its new copies, and those that it is to lose."""
    ep = make(most_copies=2, more_slots=2)
    slots = slots_of(ep)
    for number in range(3):
        begin(slots, 10 * seed + number, most=2)
        ep.apply()
        play(ep, slots, number, number, 9)
        dist.barrier()


def test_weights_that_fail_begin_nothing(ep, slots, several, rank):
    """And all ranks drop each such call."""
    target = draw_table(ep, seed=3)
    # Four calls that fail on rank 0,
    if rank == 0:
        with pytest.raises(ZeroDivisionError):
            ep.replace(target, lambda tag, slot: [torch.zeros(1 // 0)])
        for wrong in (slots.rows[0, :, ::2][0], torch.zeros(D, device="meta")):
            with pytest.raises(ValueError, match="`weights` must"):
                ep.replace(target, lambda tag, slot, wrong=wrong: [wrong])
        with pytest.raises(ValueError, match="`weights` must"):
            ep.replace(target, lambda tag, slot: [slots.rows[0, slot, : slot + 1]])
    else:
        # and are refused on the others.
        for _ in range(4):
            moves = ep.replace(target, slots.of)
            with pytest.raises(EPRefusedError, match=r"rank\(s\) \[0.*raised in `replace`"):
                ep.apply()
            assert moves.done and 0 in moves.refused_by
    assert ep.health().refused_plans == 4
    # The next one moves everywhere.
    ep.replace(target, slots.of)
    ep.apply()
    play(ep, slots, 2, 2, 5)


def test_moves_that_a_rank_does_not_begin_can_be_cancelled(ep, slots, several, rank):
    """They end at once, and no rank waits for it. It hears of it when it comes."""
    target = draw_table(ep, seed=3)

    def waits_for_rank_0() -> bool:
        ep.poll()
        return moves.waits_for() == [0]

    # All but rank 0 begin, and see for whom they wait.
    if rank:
        moves = ep.replace(target, slots.of)
    dist.barrier()
    if rank:
        until(waits_for_rank_0)
        assert not moves.done
    dist.barrier()
    if rank:
        # One of them cancels.
        if rank == 1:
            moves.cancel()
        ep.apply()
        assert moves.done and moves.cancelled and moves.version == -1
    dist.barrier()
    # Rank 0 comes, and hears that they were cancelled.
    if rank == 0:
        moves = ep.replace(target, slots.of)
        ep.apply()
        assert moves.done and moves.cancelled
    for seed in range(2 * L):
        play(ep, slots, seed, seed % L, 5)
    # All begin anew.
    ep.replace(target, slots.of)
    ep.apply()
    play(ep, slots, 9, 2, 5)


INTERRUPTED = "/epmoe/", "/concurrent/futures/", "/threading.py"


class Interrupt(BaseException):
    """What a signal handler raises."""


@contextmanager
def interrupted(moment: int) -> Iterator[None]:
    """A signal handler raises at one of the moments at which Python runs it in this package, or in
    modules whose locks would stay locked: where a function begins, and where one of C ends.
    """
    left = moment

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and any(
            part in frame.f_code.co_filename for part in INTERRUPTED
        ):
            left -= 1
            if not left:
                sys.setprofile(None)
                raise Interrupt

    sys.setprofile(look)
    try:
        with suppress(Interrupt):
            yield
    finally:
        sys.setprofile(None)


@ON_THE_CPU
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # it raises where a generator ends
@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 5))])
def test_a_signal_handler_raises_at_any_moment(make, size, rank, seed):
    """In `replace`, `share` and `poll`: what began goes on, the rest is dropped on all ranks, and
    sums are right.
    """
    ep = make()
    slots = slots_of(ep, big=True)
    draw = random.Random(8 * seed + rank)
    rounds = 0
    begun = 0
    for number in range(10):
        target = draw_table(ep, seed=number)
        # Begin the moves, again after each interrupt.
        calls = ep.live.calls
        while ep.live.calls == calls:
            with interrupted(draw.randrange(1, 2000) if draw.random() < 0.3 else 10**9):
                ep.replace(target, slots.of, loads=torch.rand(L, E, generator=generator(number)))

        # Rounds between polls that are interrupted.
        for _ in range(4):
            for _ in range(draw.randrange(5)):
                with interrupted(draw.randrange(1, 300)), suppress(EPRefusedError):
                    ep.poll()
            play(ep, slots, rounds, rounds % L, T=5)
            rounds += 1
        with interrupted(draw.randrange(1, 60)):
            ep.share(torch.rand(L, E, generator=generator(number)))

        # Bring them to their end: all ranks have one table, that of the plan unless it was refused.
        refused = False
        try:
            ep.apply()
        except EPRefusedError:
            refused = True
        ep.apply()
        assert_alike(size, [ep.slots.tolist(), ep.health().refused_plans])
        assert ep.live.is_idle
        if torch.equal(*(table.view(L, size, -1).sort().values for table in (ep.slots, target))):
            begun += 1
        else:
            assert refused or ep.health().refused_plans
        assert torch.equal(ep.live.held, ep.slots.view(L, size, -1)[:, rank])
        slots.check()
    assert begun and (size == 1 or ep.health().refused_plans)


def test_weights_that_fail_later_are_asked_for_again(make, size):
    ep = make()
    slots = slots_of(ep, big=True)
    fails = False

    def weights(tag: int, slot: int) -> list[Tensor]:
        nonlocal fails
        fails = not fails
        if started and fails:
            raise ZeroDivisionError
        return slots.of(tag, slot)

    # Every second time the weights fail, once the moves have begun.
    started = False
    moves = ep.replace(draw_table(ep, seed=3), weights)
    started = True
    while not moves.done:
        # The copies run on another thread, which takes its turn between two polls.
        time.sleep(0.001)
        try:
            ep.poll()
        except ZeroDivisionError:
            continue
    # All bytes have come all the same.
    assert ep.live.can_move and moves.copied_bytes == moves.total_bytes == ep.live.moved_bytes
    dist.barrier()
    slots.check()
    for layer in range(L):
        play(ep, slots, layer, layer, 9)


def test_weights_that_are_transposed_or_of_inference_mode(make, size):
    """As gpt-oss has them; their order in memory is what moves."""
    ep = make()
    with torch.inference_mode():
        stored = torch.zeros(L, ep.num_local_experts, 3, 2, device=ep.device)
        for layer, local, expert in slots_of(ep).held():
            stored[layer, local] = torch.arange(6).view(3, 2) + 10 * expert
    ep.replace(draw_table(ep, seed=3), lambda tag, slot: [stored[tag - 1, slot].T])
    ep.apply()
    for layer, local, expert in slots_of(ep).held():
        assert torch.equal(stored[layer, local].cpu(), torch.arange(6).view(3, 2) + 10 * expert)


def test_moves_in_inference_mode_and_then_outside(ep, slots):
    """As in the steps of a server, and in a load of weights between them."""
    for seed, inference in ((3, True), (4, False)):
        with torch.inference_mode(inference):
            begin(slots, seed)
            ep.apply()
    slots.check()


@pytest.mark.parametrize(
    ("form", "payload", "width", "T"),
    # On GPUs rows in fp8 take a kernel for few rows, or that for many.
    [
        ("MXFP4", "auto", D, 9),
        ("NVFP4", "auto", D, 9),
        ("MXFP4", "fp8", 128, 9),
        ("MXFP4", "fp8", 128, 300),
    ],
)
def test_experts_of_four_bits_move(make, rank, form, payload, width, T):
    """Codes and scales, byte by byte, and what the layers compute stays, also meanwhile."""
    ep = make(dtype="bfloat16", hidden=width, max_tokens=T, exchange={"payload": payload})
    groups = width // 32 if form == "MXFP4" else width // 16
    codes = {
        "w_gate_up": (2 * width, width // 2),
        "w_down": (width, width // 2),
        "gate_up_scales": (2 * width, groups),
        "down_scales": (width, groups),
    }
    # Random codes and scales of all experts, and layers of them.
    draw = generator(5)
    scale = torch.float8_e8m0fnu if form == "MXFP4" else torch.float8_e4m3fn
    dtypes = {name: MXFP4 if name.startswith("w_") else scale for name in codes}
    full = [
        {
            name: torch.randint(122, 126, (E, *shape), generator=draw, dtype=torch.uint8).view(
                dtypes[name]
            )
            for name, shape in codes.items()
        }
        for _ in range(L)
    ]
    if form == "NVFP4":
        for given in full:
            given["tensor_scales"] = torch.rand(E, 3, generator=draw) / 1e4
    layers = [
        MoELayer.from_full(ep, randn(E, width, seed=layer), **given)
        for layer, given in enumerate(full)
    ]

    # Move them: each byte, and y.
    x = randn(T, width, seed=rank, dtype=torch.bfloat16).to(ep.device)
    before = [layer(x) for layer in layers]
    ep.replace(draw_table(ep, seed=3), lambda tag, slot: ep.live.weights[tag](tag, slot))
    for _ in range(3):
        for layer, y in zip(layers, before, strict=True):
            assert_close(layer(x), y, slack=4)
            ep.poll()
    ep.apply()
    for layer, local, expert in slots_of(ep).held():
        for name, whole in full[layer].items():
            moved = getattr(layers[layer].experts, name)[local].cpu()
            assert torch.equal(moved.view(torch.uint8), whole[expert].view(torch.uint8))
    for layer, y in zip(layers, before, strict=True):
        assert_close(layer(x), y, slack=4)


def test_moves_end_with_their_windows(ep, slots):
    moves = begin(slots, 3)
    dist.barrier()
    ep.close()
    moves.cancel()  # writes nowhere
    moves.step()
    assert moves.done
    with pytest.raises(EPStateError, match="is closed"):
        ep.apply()


def test_apply_names_a_late_rank_and_goes_on_later(ep, slots, several, rank):
    target = draw_table(ep, seed=3)
    if rank:
        # All but rank 0 wait for it, and say so.
        moves = ep.replace(target, slots.of)
        moves.deadlines = Deadlines(0.05, 0.05, lambda: 2)
        with pytest.raises(EPTimeoutError, match=r"waited for rank\(s\) \[0\].*call `apply` again"):
            ep.apply(timeout_s=0.2)
        assert 1 <= moves.stalls <= 4 and moves.waits_for() == [0] and ep.live.can_move
        assert ep.live.stalls == moves.stalls
    dist.barrier()
    # It comes, and all go on.
    if rank == 0:
        ep.replace(target, slots.of)
    ep.apply()
    play(ep, slots, 2, 2, 5)


def test_what_does_not_fit_is_refused(ep, slots, size):
    # A table that the caller has is a copy.
    mine = ep.slots.fill_(EMPTY)
    one_slot = {"live": True, "slots_per_rank": 1}
    assert not torch.equal(mine, ep.slots), "a copy"
    # Each call, and what its error says.
    for message, call in (
        ("`slots` must be integers", lambda: ep.replace(mine[:1], slots.of)),
        ("must hold every expert", lambda: ep.replace(mine, slots.of)),
        ("`loads` must be", lambda: ep.share(torch.ones(2))),
        ("`tag` must be from 1 to 3", ep.skip),
        (
            f"from {-(-E // size)} to",
            lambda: make_config(size, experts=E, top_k=K, placement=one_slot),
        ),
        *(
            [("`weights` must be given", lambda: ep.replace(draw_table(ep, seed=1)))]
            if size > 1
            else []
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_calls_up_to_the_last_number(ep, slots, rank):
    """Words hold the number of a call, in 31 bits."""
    assert ep.live.can_move
    ep.live.calls = MOST_CALLS - 2
    for n in range(2):
        begin(slots, n)
        ep.apply()
        play(ep, slots, n, n, T=M - rank)
    with pytest.raises(EPStateError, match="`resume` begins anew"):
        begin(slots, 2)
    play(ep, slots, 2, 2, T=M)


@ON_GPUS
def test_a_poll_on_another_thread_and_stream_waits_for_the_rounds(make, size, rank):
    """Tables change, and VERSION is written, behind the stream of the last round, and before the
    next round there.
    """

    def poll() -> None:
        torch.cuda.set_device(ep.device)
        while moves.version < 0:
            ep.poll()

    for _ in range(8):  # copies of `poll` may stand behind the rounds in a hardware queue
        ep = make()
        slots = slots_of(ep)
        rounds = torch.cuda.Stream()
        words = ep.exchange.views["moves.words"]
        table = ep.exchange.views["table.copies"]
        fetch = ep.live.mail.fetch
        play(ep, slots, 0, 0, 5)

        # All ranks have all plans, and tables are the old ones.
        moves = begin(slots, 3)
        ep.live.mail.flush()
        dist.barrier()
        before = fetch(table)
        _ = fetch(words)
        x, ids, weights = (t.to(ep.device) for t in make_round(rank, 1, 5))

        # A round on a stream of its own that takes a second, and polls on another thread meanwhile.
        rounds.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(rounds):
            torch.cuda._sleep(2_000_000_000)  # about a second
            d = ep.dispatch(x, ids, weights, tag=1)
            y = ep.combine(slots.run(d, 0), d)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(poll).result()

        # What memory has before the round has ended. Where it has ended too early, once more.
        seen = fetch(table)
        said = fetch(words)[rank, Word.VERSION]
        early = of_all(rounds.query())
        if not any(early):
            break
    assert not any(early), "the rounds have ended too early for this test"

    # Nothing had changed. Behind the round it has.
    assert torch.equal(seen, before) and said == 0
    with torch.cuda.stream(rounds):
        assert_close(y.cpu(), slots.want(*make_round(rank, 1, 5), 0), slack=4)
        play(ep, slots, 2, 0, 5)
        assert not torch.equal(table.cpu(), before)
        ep.apply()
        play(ep, slots, 3, 1, 5)
    torch.cuda.current_stream().wait_stream(rounds)


@ON_GPUS
def test_replays_while_experts_move(make, size, rank):
    """Graphs of several T, which ranks mix, captured before the first move."""
    ep = make()
    slots = slots_of(ep, big=True)
    draw = random.Random(rank)
    for seed in range(L):
        play(ep, slots, seed, seed, 4)
    # A graph of each layer and T.
    captured: dict[tuple[int, int], tuple[list[Tensor], Tensor, torch.cuda.CUDAGraph]] = {}
    for layer in range(L):
        for T in (1, 7, M):
            inputs = [t.to(ep.device) for t in make_round(rank, T, T)]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                d = ep.dispatch(*inputs, tag=layer + 1)
                y = ep.combine(slots.run(d, layer), d)
            captured[layer, T] = inputs, y, graph

    # Four plans. While experts move, each replay has the sums of its tokens.
    rounds = 0
    for number in range(4):
        moves = begin(slots, 20 + number)
        for _ in range(25):
            T = draw.choice((1, 7, M))
            layer = rounds % L
            inputs, y, graph = captured[layer, T]
            fresh = make_round(rank, 500 + rounds, T)
            for buffer, value in zip(inputs, fresh, strict=True):
                buffer.copy_(value)
            y.fill_(torch.nan)
            graph.replay()
            assert_close(y.cpu(), slots.want(*fresh, layer), slack=4)
            rounds += 1
            for _ in range(draw.randrange(4)):
                ep.poll()
        ep.apply()
        assert moves.done
        slots.check()
        dist.barrier()
