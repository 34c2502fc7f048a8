"""What goes wrong on one rank among several, or on all: the rank keeps its error and waits for
nobody, the others hear of it or miss its experts, and the next round is whole.

Deadlines are 300 s here, so that a test which passes has not run into one. Mistakes of every kind
of layer: test_guarantees.py. Signals: test_signals.py. Wrong arguments: tests/test_mistakes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from exchanges import (
    Tokens,
    assert_round,
    assert_y,
    first_round,
    given,
    make_config,
    make_tokens,
    poison,
    run_experts,
    run_fused_experts,
    run_round,
    without_rank,
)
from helpers import ON_GPUS, ON_THE_CPU, full_layer, is_right_in_a_fork, randn
from test_layers import D, E, K
from test_training_layers import make_layers
from torch import Tensor
from waits import AT_ONCE_S, LONG_S, SOON_S, ctrl_c, meanwhile, store, within

import epmoe
from epmoe import (
    EPAbortedError,
    EPMismatchError,
    EPOverflowError,
    EPStateError,
    EPTimeoutError,
    ExpertParallel,
)

pytestmark = pytest.mark.usefixtures("serving")

RAISE = {"on_abort": "raise"}  # the default of the product, not of `make_ep`
GIVER = 1  # the rank that gives rounds up


def needs_one_node(ep: ExpertParallel, why: str) -> None:
    if ep.config.topology.num_nodes > 1:
        pytest.skip(why)


def hears_of(ep: ExpertParallel, call: Callable[[], object], epoch: int) -> None:
    """`call` is a round that `GIVER` gives up. On GPUs the host may have to wait for the kernel."""
    with pytest.raises(
        EPAbortedError, match=rf"round {epoch}: rank\(s\) \[{GIVER}\] aborted the round"
    ) as caught:
        call()
        ep.check()
    assert (caught.value.ranks, caught.value.epoch) == ([GIVER], epoch)


STATES = ["skipped", "dispatch_send", "dispatch_recv", "combine_send"]
"""How far a rank is in a round that it gives up."""


def give_up(ep: ExpertParallel, tokens: Tokens, layout: str, state: str) -> None:
    """A second abort does nothing."""
    if state == "skipped":
        return ep.skip()
    handle = ep.dispatch_send(*given(ep, tokens), layout=layout)
    if state != "dispatch_send":
        handle = ep.dispatch_recv(handle)
    if state == "combine_send":
        ep.combine_send(
            (run_fused_experts if layout == "rank" else run_experts)(ep, handle), handle
        )
    # A second abort does nothing, and the handle is of no use any more.
    for _ in range(2):
        ep.abort()
    with pytest.raises(ValueError, match=f"round {handle.epoch} is closed"):
        ep.abort(handle)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("on_abort", ["raise", "zeros"])
@pytest.mark.parametrize("state", STATES)
def test_a_rank_gives_a_round_up(make_ep, rank, size, state, on_abort, layout):
    """The others hear of it or get sums without its experts, and the next round is whole."""
    ep = make_ep(timeout_s=LONG_S, exchange={"on_abort": on_abort})
    sent = state == "combine_send"
    if sent and on_abort == "raise":
        needs_one_node(ep, "sums of other nodes have yet to travel")
    ep.abort()  # no round is open
    first_round(ep, 9, layout)
    # Twice, on poisoned windows, with a whole round after each.
    for n in (2, 4):
        tokens = make_tokens(ep.config, rank, 16 - rank, seed=n)
        poison(ep)
        if rank == GIVER:
            give_up(ep, tokens, layout, state)
        elif on_abort == "raise" and not sent:
            hears_of(ep, lambda tokens=tokens: run_round(ep, tokens, layout), epoch=n)
        else:  # a rank that has returned its sums gives nothing up
            assert_y(
                run_round(ep, tokens, layout), ep.config, without_rank(ep, tokens, GIVER, sent=sent)
            )
        assert_round(ep, tokens, layout)
    ep.check()
    # Only rounds that took something from others count as aborted.
    if ep.config.topology.num_nodes == 1:
        assert ep.health().aborted_rounds == [2 * (r == GIVER and not sent) for r in range(size)]
    for _ in range(2):
        # All ranks give the same round up.
        give_up(ep, tokens, layout, state)
        assert_round(ep, tokens, layout)
    ep.check()


class Fragile(torch.nn.Module):
    """Experts that raise `error` when it is set, or return too few columns."""

    def __init__(self, experts: Callable) -> None:
        super().__init__()
        self.inner = experts
        self.error = None

    def forward(self, *inputs: Tensor) -> Tensor:
        if isinstance(self.error, BaseException):
            raise self.error
        return self.inner(*inputs)[:, : -1 if self.error else None]


@pytest.mark.parametrize(
    "kind", [RuntimeError, KeyboardInterrupt, torch.cuda.OutOfMemoryError, "columns"]
)
@pytest.mark.parametrize("on_abort", ["raise", "zeros"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_experts_that_fail(make_ep, rank, size, kind, on_abort, everywhere):
    """The caller gets the experts' error unchanged. The other ranks end the round, and the next
    rounds are whole.
    """
    # Of this test: its traceback holds the windows.
    error = kind if isinstance(kind, str) else kind("no luck")
    ep = make_ep(experts=E, top_k=K, hidden=D, timeout_s=LONG_S, exchange={"on_abort": on_abort})
    layer, _ = full_layer(ep)
    layer.experts = fragile = Fragile(layer.experts)
    x = randn(9, D, seed=rank).to(ep.device)
    # Twice a round in which experts fail on one rank or on all.
    whole = layer(x)
    for n in (2, 4):
        fragile.error = error if everywhere or rank == GIVER else None
        # The caller gets the error, or the others hear of it.
        with within(SOON_S):
            if kind == "columns" and fragile.error:
                with pytest.raises(ValueError, match="`expert_rows` must be"):
                    layer(x)
            elif fragile.error:
                with pytest.raises(kind) as caught:
                    layer(x)
                assert caught.value is error
            elif on_abort == "raise":
                hears_of(ep, lambda: layer(x), epoch=n)
            else:
                assert layer(x).isfinite().all()
            # The next round is whole.
            fragile.error = None
            assert torch.equal(layer(x), whole)
    ep.check()


@ON_THE_CPU
@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_an_overflow_beside_an_abort_leaves_nothing_for_the_next_round(
    make_ep, rank, size, ranks_per_node
):
    """One error tells of both."""
    options = {"timeout_s": LONG_S, "exchange": RAISE, "capacity": {"max_expert_rows": 4 * size}}
    ep = make_ep(experts=size, top_k=size, ranks_per_node=ranks_per_node, **options)
    tokens = make_tokens(ep.config, rank, 16)
    few = make_tokens(ep.config, rank, 2)
    for each in (tokens, few):
        # Every rank gets all rows, more than it has room for.
        each.ids[:] = torch.arange(size)
    for n in (1, 3):
        d = ep.dispatch(*given(ep, tokens))
        if rank == GIVER:
            ep.abort()
        else:
            # The overflow is the error; the abort is its note.
            said = (
                f"needed {16 * size} expert-major rows, but capacity.max_expert_rows is {4 * size}"
            )
            with pytest.raises(EPOverflowError, match=said) as caught:
                ep.combine(run_experts(ep, d), d)
            assert f"round {n}: rank(s) [{GIVER}] aborted the round" in caught.value.__notes__[0]
        # The next round is whole.
        assert_round(ep, few)
    ep.check()


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("tags", [(3, 4), (0, 32767), (511, 512), (127, 1151)])
def test_ranks_in_different_layers(make_ep, rank, size, tags, layout):
    """No rank gets rows of another layer: all hear of both tags, in every bit of which they may
    differ.
    """
    ep = make_ep(timeout_s=LONG_S, exchange=RAISE)
    tokens = make_tokens(ep.config, rank, 9)
    mine, other = tags if rank == GIVER else tags[::-1]
    run = {"expert": (ep.combine, run_experts), "rank": (ep.combine_partial, run_fused_experts)}[
        layout
    ]

    def tagged(tag: int) -> Tensor:
        d = ep.dispatch(*given(ep, tokens), layout=layout, tag=tag)
        return run[0](run[1](ep, d), d)

    # As long as all ranks have the same tag, rounds are right.
    for tag in tags:
        assert_y(tagged(tag), ep.config, tokens)
    # Then one rank runs another layer than all others.
    witness = next(r for r in range(size) if (r == GIVER) != (rank == GIVER))
    named = f"this rank's tag is {mine}, that of rank {witness} is {other}"
    # A rank of another node may tell of it, which brings no rows then.
    if ep.config.topology.num_nodes > 1:
        named = f"this rank's tag is {mine}, that of rank . is {other}|brought another"
    with pytest.raises(EPMismatchError, match=named):
        tagged(mine)
        ep.check()
    # On the CPU the next round is whole.
    if ep.device.type == "cpu":
        assert_y(tagged(7), ep.config, tokens)
    dist.barrier()


def test_abort_waits_for_nobody(ep, rank, size):
    """Rank 0 aborts before the other ranks have even called dispatch."""
    tokens = make_tokens(ep.config, rank, 9)
    for n in range(3):
        if rank == 0:
            with within(AT_ONCE_S if n else SOON_S):  # on GPUs the first call loads the kernels
                ep.dispatch_send(*given(ep, tokens))
                ep.abort()
        # The others begin when rank 0 has given the round up.
        dist.barrier()
        if rank != 0:
            assert_y(run_round(ep, tokens), ep.config, without_rank(ep, tokens, 0))
    assert_round(ep, tokens)


def test_an_abort_takes_nothing_from_the_round_before(ep, rank, size):
    """Rank 0 is done with a round and gives the next one up, while the others have yet to add up
    its sums of the first.

    Headers hold the counts of two rounds: with one count, that of the abort would hide the sums
    that lie there.
    """
    needs_one_node(
        ep, "a round ends on all nodes together: combine_recv brings the sums back to other nodes"
    )
    for n in range(4):
        tokens = make_tokens(ep.config, rank, 16, seed=n)
        d = ep.dispatch(*given(ep, tokens))
        ep.combine_send(run_experts(ep, d), d)
        # Rank 0 adds up, begins the next round and gives it up.
        if rank == 0:
            assert_y(ep.combine_recv(d), ep.config, tokens)
            ep.dispatch_send(*given(ep, tokens))
            ep.abort()
        dist.barrier()
        # Its sums of the first round are still there for the others.
        if rank != 0:
            assert_y(ep.combine_recv(d), ep.config, tokens)
            assert_y(run_round(ep, tokens), ep.config, without_rank(ep, tokens, 0))
    assert_round(ep, tokens)


def test_ranks_that_abort_at_random(ep, rank, size):
    """80 rounds without a barrier, in which each rank gives up where it likes; rounds that none
    gives up are right.
    """
    # Below 3 a number is a state in which the rank gives the round up.
    choice = torch.randint(0, 12, (80, size), generator=torch.Generator().manual_seed(3)).tolist()
    for n, stops in enumerate(choice):
        tokens = make_tokens(ep.config, rank, (5 * n * (rank + 1)) % 17, seed=n)
        if stops[rank] < 3:
            give_up(ep, tokens, "expert", STATES[1 + stops[rank]])
            continue
        # A rank that goes on misses the experts of all that have given up.
        y = run_round(ep, tokens)
        for other, stop in enumerate(stops):
            if stop < 3:
                tokens = without_rank(ep, tokens, other, sent=stop == 2)
        assert_y(y, ep.config, tokens)
    ep.check()


@ON_THE_CPU
def test_ranks_that_never_end_a_round_that_was_given_up(make_ep, rank, size):
    """The next dispatch of the rank that aborted waits for them, up to its deadline."""
    ep = make_ep(timeout_s=0.4)
    tokens = make_tokens(ep.config, rank, 9)
    topology = ep.config.topology
    # Over several nodes a rank waits for its own rail.
    awaited = (
        range(topology.ranks_here, size, topology.ranks_here)
        if topology.num_nodes > 1
        else range(1, size)
    )
    assert_round(ep, tokens)
    if rank == 0:
        ep.dispatch_send(*given(ep, tokens))
        ep.abort()
        # The others never come, and each dispatch names them.
        for _ in range(2):
            with (
                within(0.4 + AT_ONCE_S),
                pytest.raises(EPTimeoutError, match="combine of round 2") as caught,
            ):
                ep.dispatch(*given(ep, tokens))
            assert caught.value.missing_ranks == [*awaited]
    dist.barrier()


def out_of_memory(*args: object, **options: object) -> None:
    raise torch.cuda.OutOfMemoryError("out of memory")


def test_abort_after_out_of_memory(ep, rank, size, monkeypatch):
    """Every allocation of torch fails, from before combine until the round is closed."""
    tokens = first_round(ep, 16)
    for call in ("dispatch_send", "dispatch"):
        d = getattr(ep, call)(*given(ep, tokens))
        rows = run_experts(ep, d) if call == "dispatch" else None
        with monkeypatch.context() as patch:
            # No tensor can be made while the round is given up.
            for owner, names in (
                (torch, ("empty", "zeros", "empty_like")),
                (torch.Tensor, ("new_empty", "clone")),
            ):
                for name in names:
                    patch.setattr(owner, name, out_of_memory)
            if rows is not None:
                with pytest.raises(torch.cuda.OutOfMemoryError):
                    ep.combine(rows, d)
            ep.abort()
        assert_round(ep, tokens)
    ep.check()


@ON_GPUS
@pytest.mark.parametrize("payload", ["auto", "fp8"])
def test_abort_on_a_gpu_that_is_full(make_ep, rank, size, device, payload):
    ep = make_ep(
        hidden=256, top_k=1, dtype="float32", exchange={"payload": payload}, timeout_s=LONG_S
    )
    tokens = make_tokens(ep.config, rank, 16)
    d = ep.dispatch(*given(ep, tokens))
    # The abort allocates nothing.
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    ep.abort(d)
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before
    run_round(ep, tokens)
    ep.check()


@pytest.mark.parametrize("how", ["between rounds", "in a round", "by close in a round"])
def test_leaving_releases_the_others(ep, rank, size, how):
    """Their waits, of up to 300 s, end at once and name rank 0. By a signal:
    tests/test_failure.py.
    """
    needs_one_node(ep, "test_two_levels.py has it")
    tokens = first_round(ep, 9)
    if rank == 0:
        # Rank 0 leaves by an exception or by close, in a round or between two.
        with within(SOON_S), suppress(LookupError), ep:
            if how != "between rounds":
                ep.dispatch(*given(ep, tokens))
            if how != "by close in a round":
                raise LookupError
            ep.close()
    else:
        # The others hear at once that it has left.
        with within(SOON_S), pytest.raises(EPTimeoutError, match="left the group") as caught:
            run_round(ep, tokens)
            ep.check()
        assert caught.value.missing_ranks == [0]
    dist.barrier()


@ON_GPUS
def test_leaving_ends_this_ranks_own_kernels(ep, rank, size, device):
    """They wait for ranks that do not come, for up to 300 s, and freeing the window would wait for
    them.
    """
    tokens = first_round(ep, 9)
    if rank == 0:
        with within(SOON_S):
            with pytest.raises(LookupError), ep:
                ep.dispatch(*given(ep, tokens))
                raise LookupError
            torch.cuda.synchronize()
    dist.barrier()


class Steps:
    """Forward and backward passes of a layer, with the gradients of x and of the parameters."""

    def __init__(self, make_ep: Callable[..., ExpertParallel], rank: int) -> None:
        ep = make_ep(experts=6, top_k=2, hidden=32, routing={"renormalize": True}, exchange=RAISE)
        needs_one_node(ep, "training needs a group of one node")
        (self.layer,) = make_layers(ep, num_layers=1)
        self.rank = rank
        with torch.enable_grad():
            self.want = self.run()

    def forward(self, seed: int = 0) -> Tensor:
        """The loss of one call."""
        self.layer.zero_grad()
        self.x = randn(9 + self.rank, 32, seed=10 * seed + self.rank).requires_grad_()
        return self.layer(self.x).square().sum()

    def gradients(self) -> list[Tensor]:
        return [self.x.grad, *(parameter.grad.clone() for parameter in self.layer.parameters())]

    def run(self) -> list[Tensor]:
        """A step that nothing disturbs."""
        self.forward().backward()
        return self.gradients()

    def assert_right(self, gradients: list[Tensor]) -> None:
        assert all(map(torch.equal, gradients, self.want))


@pytest.fixture
def steps(make_ep, rank, size) -> Steps:
    """Passes in which ranks wait for one another."""
    if size == 1:
        pytest.skip("one rank waits for nobody")
    return Steps(make_ep, rank)


@ON_THE_CPU
@torch.enable_grad()
def test_ctrl_c_ends_a_backward_pass(steps, rank, device):
    """The other ranks learn it from their own backward pass. The next step is whole on
    all ranks.
    """
    loss = steps.forward(seed=1)
    # Rank 0 is interrupted while it waits for the others.
    if rank == 0:
        with ctrl_c():
            loss.backward()
    dist.barrier()
    # They come later, and learn that the round was given up.
    if rank != 0:
        with pytest.raises(EPAbortedError, match=r"rank\(s\) \[0\] aborted the round"):
            loss.backward()
    steps.assert_right(steps.run())


@ON_THE_CPU
@torch.enable_grad()
def test_another_thread_is_refused_during_a_backward_pass(steps, rank, device):
    """Its call costs the backward pass nothing."""
    loss = steps.forward()
    refused = []

    def call() -> None:
        try:
            with torch.no_grad():
                steps.layer(steps.x)
        except RuntimeError as error:
            refused.append(str(error))
        store().set("go", "")

    # The others come when the refused call has been made.
    if rank != 0:
        store().wait(["go"])
        loss.backward()
    else:
        with meanwhile(call):
            loss.backward()
        assert len(refused) == 1 and "another thread is in a call" in refused[0]
        store().delete_key("go")
    steps.assert_right(steps.gradients())


@ON_THE_CPU
@torch.enable_grad()
def test_a_forked_child_runs_no_backward_pass(make_ep, rank, device):
    steps = Steps(make_ep, rank)
    loss = steps.forward()

    def go_back() -> None:
        with pytest.raises(EPStateError, match="of which this process is a fork"):
            loss.backward()

    assert is_right_in_a_fork(go_back)
    # In the parent the pass goes on as if nothing had happened.
    loss.backward()
    steps.assert_right(steps.gradients())


def test_group(rank, size, device):
    # A group of another size,
    with pytest.raises(
        ValueError,
        match=rf"topology\.ep_size must equal the size of the group, {size}, got {size + 1}",
    ):
        ExpertParallel(make_config(size + 1), device=device)
    # one without a backend for the CPU,
    lonely = dist.new_group(list(range(size)), backend="cuda:gloo")
    with pytest.raises(
        ValueError, match=r"`group` must have a CPU backend, got .*cuda:gloo.*cpu:gloo,cuda:nccl"
    ):
        ExpertParallel(make_config(size), group=lonely, device=device)
    # and configs that differ on one rank are refused by name.
    M, theirs = (9, 8) if rank == 0 else (8, 9)
    differs = rf"the config of rank {rank} differs from that of rank\(s\) .*"
    with pytest.raises(
        ValueError,
        match=rf"{differs}`capacity.max_num_tokens_per_rank` is {M} here and {theirs} on",
    ):
        ExpertParallel(make_config(size, max_tokens=8 + (rank == 0)), device=device)
    sections = make_config(size).model_dump() | {"experts": {"limit": 7.0} if rank == 0 else {}}
    with pytest.raises(
        ValueError,
        match=rf"{differs}`experts.limit` is {sections['experts'].get('limit')} here and",
    ):
        ExpertParallel(epmoe.EPConfig(**sections), device=device)


def test_a_subgroup_numbers_its_own_ranks(rank, size, device):
    """The first ranks and the last two ranks are separate groups."""
    # Over three ranks one of the groups has a single rank.
    parts = [part for part in (list(range(size - 2)), [size - 2, size - 1]) if part]
    for members, group in [(part, dist.new_group(part)) for part in parts]:
        if rank not in members:
            continue
        with ExpertParallel(make_config(len(members)), group=group, device=device) as ep:
            assert ep.rank == members.index(rank)
            tokens = make_tokens(ep.config, ep.rank, 9)
            assert_round(ep, tokens)


def test_no_room_for_the_windows(rank, size, device):
    """More memory than the machine has: an error on every rank before anything is mapped."""
    huge = make_config(size, hidden=65536, max_tokens=2**20)
    with pytest.raises(MemoryError, match=r"rank \d: .*bytes.*max_num_tokens_per_rank"):
        ExpertParallel(huge, device=device)
