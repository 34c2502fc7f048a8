"""Batches of more than M tokens: ranks take as many rounds as the longest batch needs, and agree on
nothing before.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from exchanges import Tokens, assert_y, gains, make_config, make_tokens, nodes_of, without_rank
from helpers import ON_GPUS, ON_THE_CPU, refuse_another_thread
from interrupted_steps import steps_until_whole
from torch import Tensor
from waits import LONG_S, SHORT_S, SOON_S, ctrl_c, signalled, store, within

from epmoe import EPMismatchError, EPTimeoutError, ExpertParallel
from epmoe.exchange import memory
from epmoe.exchange.handles import Dispatched
from epmoe.integrations import batches
from epmoe.integrations.batches import Arrived, Computation, SharedExpertParallel
from epmoe.native import ops

M = 16
LENGTHS = (0, 1, M, M + 1, 3 * M)


@pytest.fixture
def make_layers(
    device: torch.device, size: int, monkeypatch
) -> Iterator[Callable[..., SharedExpertParallel]]:
    """Makes them from the options of `make_config`; `ll_max_tokens` is as in `make_ep`."""
    made = []

    def make(ll_max_tokens: int = memory.LL_MAX_TOKENS, **options) -> SharedExpertParallel:
        monkeypatch.setattr(memory, "most_ll_tokens", lambda *_: ll_max_tokens)
        made.append(SharedExpertParallel(make_config(size, max_tokens=M, **options), None, device))
        return made[-1]

    yield make
    for layers in made:
        layers.ep.close()


class Experts:
    """The experts of `exchanges.gains`, with rows on this rank only; in its `fails_in`-th call it
    raises.
    """

    def __init__(self, layers: SharedExpertParallel, fails_in: int = 0) -> None:
        self.ep = layers.ep
        self.calls = 0
        self.fails_in = fails_in

    def __call__(self, arrived: Arrived) -> Tensor:
        rows = arrived.plain()
        expert_offsets = arrived.segments.offsets
        # It fails in one of the rounds.
        self.calls += 1
        if self.calls == self.fails_in:
            raise MemoryError
        # Each expert multiplies by its own number.
        gain = gains(self.ep.config, rows.shape[1]).to(rows)
        ends = expert_offsets.tolist()
        out = rows.clone()
        assert ends[-1] <= len(rows)
        for i, physical in enumerate(self.ep.placement.local_experts(self.ep.rank)):
            out[ends[i] : ends[i + 1]] *= gain[self.ep.placement.logical(physical)]
        return out


def run(
    layers: SharedExpertParallel,
    tokens: Tokens,
    experts: Experts | None = None,
    longest: int | None = None,
) -> Tensor:
    inputs = [tensor.to(layers.ep.device) for tensor in (tokens.x, tokens.ids, tokens.weights)]
    return layers.run(*inputs, Computation(experts or Experts(layers)), longest=longest).cpu()


def check(layers: SharedExpertParallel, lengths: list[int], seed: int = 0) -> None:
    """A call in which rank r brings lengths[r] tokens."""
    config = layers.ep.config
    before = layers.ep.health().rounds
    tokens = make_tokens(config, layers.ep.rank, lengths[layers.ep.rank], seed=seed)
    assert_y(run(layers, tokens), config, tokens)
    assert layers.ep.health().rounds - before == max(1, *(-(-length // M) for length in lengths))


def assert_lost(y: Tensor, ep: ExpertParallel, tokens: Tokens, first: int) -> None:
    """From token `first` on, the sums of rank 0 are missing."""
    lost = without_rank(ep, tokens, 0)
    weights = torch.cat([tokens.weights[:first], lost.weights[first:]])
    assert_y(y, ep.config, Tokens(tokens.x, tokens.ids, weights, tokens.real))


def refuse(*args: object, **options: object) -> None:
    raise AssertionError("no rank asks another through the host")


@pytest.mark.parametrize("ll_max_tokens", [memory.LL_MAX_TOKENS, 4])
def test_each_rank_brings_another_number_of_rounds(make_layers, ll_max_tokens, size, monkeypatch):
    """No collective of the caller's group is needed, also not over several nodes, where the ranks
    agree before.
    """
    layers = make_layers(ll_max_tokens)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_reduce", refuse)
        for turn in range(len(LENGTHS)):
            check(layers, [LENGTHS[(2 * r + turn) % len(LENGTHS)] for r in range(size)], seed=turn)
        for length in LENGTHS:
            check(layers, [length] * size)
    assert layers.seconds["agree"] > 0


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("fails_in", [1, 2, 3])
@pytest.mark.parametrize("who", ["all ranks", "rank 0", "the others"])
def test_an_exception_in_a_round_keeps_the_ranks_in_step(
    make_layers, who, fails_in, known, rank, size
):
    """`who` needs three rounds, the others one. The experts of rank 0 fail in one of them: its sums
    are missing there, and in the rounds after it, which rank 0 sees out. `known`: the ranks know
    the length of the longest batch.
    """
    layers = make_layers(timeout_s=LONG_S)
    config = layers.ep.config
    long = {"all ranks": True, "rank 0": rank == 0, "the others": rank > 0}[who]
    check(layers, [1] * size)
    tokens = make_tokens(config, rank, 3 * M if long else 1, seed=3)
    before = layers.ep.health().rounds
    longest = 3 * M if known else None
    with within(SOON_S):
        if rank == 0:
            with pytest.raises(MemoryError):
                run(layers, tokens, Experts(layers, fails_in), longest)
        else:
            assert_lost(run(layers, tokens, longest=longest), layers.ep, tokens, (fails_in - 1) * M)
        taken = layers.ep.health().rounds - before
        # Whether only rank 0 wanted the last rounds.
        alone = who == "rank 0" and not known and not nodes_of(size)
        assert taken == (min(fails_in + 1, 3) if alone else 3)
        check(layers, [LENGTHS[(r + 2) % len(LENGTHS)] for r in range(size)])


@ON_THE_CPU
@pytest.mark.parametrize("late_in", [1, 2])
def test_a_signal_in_a_wait_keeps_the_ranks_in_step(make_layers, late_in, rank, size, monkeypatch):
    """The handler raises on rank 0 while it waits in dispatch for the others, so before it can know
    whether these need more rounds. They need three, and rank 0 sees them out.
    """
    if size == 1 or nodes_of(size):
        pytest.skip("rank 0 waits for nobody, or the ranks have agreed before")
    layers = make_layers(timeout_s=LONG_S)
    config = layers.ep.config
    ep = layers.ep
    dispatch = layers.ep.dispatch
    check(layers, [1] * size)
    before = ep.health().rounds
    first = (late_in - 1) * M
    tokens = make_tokens(config, rank, 3 * M if rank else first + 1, seed=4)

    # Rank 0 raises in its first or second dispatch; the others dispatch once it has.
    def interrupt(*_: object) -> None:
        store().set("interrupted", "")
        raise KeyboardInterrupt

    def in_time(*args: object, **options: object) -> Dispatched:
        if ep.health().rounds - before < late_in - 1:
            return dispatch(*args, **options)
        monkeypatch.setattr(ep, "dispatch", dispatch)
        if rank > 0:
            store().wait(["interrupted"])
            return dispatch(*args, **options)
        with signalled(signal.SIGUSR1):
            return dispatch(*args, **options)

    # Three rounds on all ranks, and tokens of rank 0 from its exception on are lost.
    signal.signal(signal.SIGUSR1, interrupt)
    monkeypatch.setattr(ep, "dispatch", in_time)
    with within(SOON_S):
        if rank == 0:
            with pytest.raises(KeyboardInterrupt):
                run(layers, tokens)
        else:
            assert_lost(run(layers, tokens), ep, tokens, first)
        assert ep.health().rounds - before == 3
        check(layers, [LENGTHS[(r + 2) % len(LENGTHS)] for r in range(size)])
    store().delete_key("interrupted")


@ON_THE_CPU
def test_a_handler_that_raises_anywhere_keeps_the_ranks_in_step(make_layers, rank, size):
    """The others take all rounds of their batches."""
    layers = make_layers(timeout_s=LONG_S)
    tokens = make_tokens(layers.ep.config, rank, 3 * M if rank == 0 else 1)
    agree = layers._longest_batch

    def step(begun: Callable[[], None]) -> None:
        # From where this rank knows that rounds are to come.
        def agreed(*arguments: object) -> int | None:
            layers._longest_batch = agree
            longest = agree(*arguments)
            begun()
            return longest

        layers._longest_batch = agreed
        run(layers, tokens)

    files = {batches.__file__, contextlib.__file__}
    for outcomes in steps_until_whole(rank, step, files=files):
        others = {outcome for r, outcome in enumerate(outcomes) if r != 1}
        assert others == {"whole"}
        check(layers, [M + 1] * size)


def test_a_rank_that_does_not_come(make_layers, rank, size):
    """The wait for whether a rank has more rounds ends as every other wait does."""
    layers = make_layers(timeout_s=SHORT_S)
    check(layers, [1] * size)
    if rank < size - 1:
        said = "synced_gpus=True.* same `max_new_tokens`"
        with within(SOON_S), pytest.raises(EPTimeoutError, match=said) as caught:
            run(layers, make_tokens(layers.ep.config, rank, M + 1))
        assert caught.value.missing_ranks == [size - 1]
    dist.barrier()


def test_ctrl_c_while_ranks_agree_on_the_longest_batch(make_layers, rank, size):
    """Rank 0 waits for the others, and then sees their three rounds out."""
    if not nodes_of(size):
        pytest.skip("the ranks of one node agree on nothing before")
    layers = make_layers(timeout_s=LONG_S)
    tokens = make_tokens(layers.ep.config, rank, 3 * M if rank else 1, seed=5)
    check(layers, [1] * size)
    with within(SOON_S):
        # Rank 0 is interrupted while it waits for the others,
        if rank == 0:
            with ctrl_c(then=lambda: store().set("interrupted", "")):
                run(layers, tokens)
        else:
            # who come then, and lose its experts.
            store().wait(["interrupted"])
            assert_lost(run(layers, tokens), layers.ep, tokens, 0)
        # The next batch is whole.
        check(layers, [M + 1] * size)
    store().delete_key("interrupted")


def test_ranks_that_disagree_raise_in_the_same_round(make_layers, rank, device):
    layers = make_layers()
    tokens = make_tokens(layers.ep.config, rank, 3 * M if rank else 1)
    K = 2 if rank == 0 else 4
    with pytest.raises(EPMismatchError):
        run(layers, Tokens(tokens.x, tokens.ids[:, :K], tokens.weights[:, :K], tokens.real))
    if device.type == "cpu":  # on a GPU it stays
        check(layers, [M + 1] * layers.ep.size)


def test_a_call_of_another_thread_shortens_no_batch(make_layers, rank, size, monkeypatch):
    """It is refused in the middle of the first round of rank 0, which needs two more."""
    layers = make_layers()
    dispatch = ops.dispatch
    refused = []
    one = make_tokens(layers.ep.config, rank, 1)

    def interrupted(*arguments: object) -> None:
        monkeypatch.undo()
        refuse_another_thread(lambda: run(layers, one))
        refused.append(True)
        dispatch(*arguments)

    if rank == 0:
        monkeypatch.setattr(ops, "dispatch", interrupted)
    check(layers, [3 * M * (r == 0) for r in range(size)])
    assert rank or refused == [True]


@ON_GPUS
def test_a_capture_cannot_look(make_layers, size):
    layers = make_layers()
    check(layers, [M] * size)
    rounds = layers.ep.health().rounds
    tokens = make_tokens(layers.ep.config, layers.ep.rank, 1)
    inputs = [tensor.to(layers.ep.device) for tensor in (tokens.x, tokens.ids, tokens.weights)]
    with (
        pytest.raises(RuntimeError, match=r"configure\(static=True\)"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layers.run(*inputs, Computation(lambda arrived: arrived.rows))
    assert layers.ep.health().rounds == rounds
    check(layers, [M + 1] * size)
