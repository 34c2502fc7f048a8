"""Round after round on the same windows: no round changes the next one, and every run gives the
same bits.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from checked_round import check_round
from exchanges import (
    assert_round,
    expected_y_after_drops,
    first_round,
    given,
    make_tokens,
    poison,
    quantized,
    run_experts,
    run_round,
)
from helpers import ON_GPUS, RANKS_SHARE_GPUS, assert_close, poison_
from waits import SHORT_S, SOON_S

import epmoe

PLACEMENT = {"strategy": "round_robin", "num_redundant_experts": 3}


def test_200_rounds_back_to_back(make_ep, rank, size):
    """No barrier lies between rounds. T varies from 0 to M, differently on each rank, and layouts
    alternate.
    """
    M = 20
    ep = make_ep(experts=13, top_k=6, max_tokens=M, placement=PLACEMENT)
    for n in range(200):
        # T goes through 0 to M in steps that differ from rank to rank.
        tokens = make_tokens(
            ep.config,
            rank,
            (7 * n * (rank + 1)) % (M + 1),
            seed=n,
            kind="adversarial" if n % 3 else "zipf",
        )
        assert_round(ep, tokens, ("expert", "rank")[n % 2])


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bitwise_the_same_on_repeated_runs(make_ep, rank, size, dtype, layout):
    ep = make_ep(experts=23, top_k=8, hidden=256, dtype=dtype, placement=PLACEMENT)
    tokens = make_tokens(ep.config, rank, 16, kind="zipf")
    # Other rounds lie between two of the same tokens.
    first = run_round(ep, tokens, layout)
    other = make_tokens(ep.config, rank, 2 * rank, seed=1)
    for _ in range(10):
        run_round(ep, other, layout)
        assert torch.equal(run_round(ep, tokens, layout), first)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_same_tokens_have_the_same_y_on_all_ranks(make_ep, rank, size, dtype, layout):
    """Bit by bit: every rank adds up in the order of ranks, wherever it stands in it. It takes
    three ranks to tell.
    """
    ep = make_ep(experts=23, top_k=8, hidden=256, dtype=dtype)
    # All ranks bring the tokens of rank 0.
    ours = run_round(ep, make_tokens(ep.config, 0, 16, kind="zipf"), layout).cpu()
    # So y is equal everywhere.
    everywhere = [torch.empty_like(ours) for _ in range(size)]
    dist.all_gather(everywhere, ours)
    assert all(torch.equal(y, ours) for y in everywhere)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on GPUs a rank knows only what it needed itself"
)
def test_the_value_to_set_is_that_of_the_fullest_rank(make_ep, rank, size):
    """Two ranks have too little room: both errors name the rows that the fuller one needed."""
    ep = make_ep(experts=2 * size, top_k=1, max_tokens=8, capacity={"max_expert_rows": 4})
    T = 8
    # Each rank has three tokens for rank 0 and five for rank 1, with room for four rows.
    ids = torch.full((T, 1), 2, dtype=torch.int32)  # rank 1
    ids[:3] = 0
    d = ep.dispatch(
        torch.ones(T, ep.config.model.hidden_size, device=ep.device), ids, torch.ones(T, 1)
    )
    rows = run_experts(ep, d)
    # Ranks with room hear of nothing.
    if rank > 1:
        ep.combine(rows, d)
    else:
        with pytest.raises(epmoe.EPOverflowError) as error:
            ep.combine(rows, d)
        assert error.value.needed_rows == 5 * size


@pytest.mark.parametrize("gap_rows", ["undefined", "zero"])
@pytest.mark.parametrize("ll_max_tokens", [16, 256])
def test_ranks_of_few_tokens_have_small_gaps(make_ep, rank, size, gap_rows, ll_max_tokens):
    """Here 128 tokens of each rank fill blocks of 128 rows. Where all rows come by LL, each rank
    decides for itself.
    """
    M = 256
    few = min(ll_max_tokens, 127)
    options = {
        "experts": 2 * size,
        "top_k": 2,
        "max_tokens": M,
        "dtype": "bfloat16",
        "ll_max_tokens": ll_max_tokens,
    }
    ep = make_ep(**options, capacity={"gap_rows": gap_rows})
    on_gpus = ep.device.type == "cuda" and ep.config.topology.num_nodes == 1
    assert ep.config.alignment == 128
    # All ranks alike, one alone with many or none, and all different.
    others = [16, 127, 128, M]
    mixed = [M, *[16] * (size - 1)], [0, *[M] * (size - 1)], [others[r % 4] for r in range(size)]
    for n, counts in enumerate([*([T] * size for T in (0, *others)), *mixed]):
        tokens = [make_tokens(ep.config, r, T, seed=n) for r, T in enumerate(counts)]
        d = check_round(ep, tokens, "expert", aligned=True).d
        # The handle says which alignment this rank has got,
        small = on_gpus and counts[rank] <= few
        assert d.alignment == (64 if small else 128)
        # and segments begin at multiples of the one that all agreed on.
        starts = d.expert_offsets.cpu()
        assert (starts % (64 if small and max(counts) <= ll_max_tokens else 128) == 0).all()


def test_experts_without_rows_hand_back_none(make_ep, rank, size):
    """A tensor of no rows has no address, and is no abort: other ranks' sums arrive."""
    ep = make_ep(experts=2 * size, top_k=1, max_tokens=4)
    D = ep.config.model.hidden_size
    x = torch.full((2, D), rank + 1.0, dtype=ep.config.model.torch_dtype, device=ep.device)
    ids = torch.zeros(2, 1, dtype=torch.int32, device=ep.device)  # all tokens go to rank 0
    for _ in range(3):
        # Only rank 0 gets rows; y is x, since weights are 1.
        d = ep.dispatch(x, ids, torch.ones(2, 1, device=ep.device))
        used = int(d.expert_offsets[-1])
        assert (used == 0) == (rank > 0)
        assert torch.equal(ep.combine(d.rows[:used].clone(), d), x)


@pytest.mark.parametrize("alignment", [1, 16])
def test_rows_past_the_capacity(make_ep, rank, size, alignment):
    """All tokens go to rank 0, which has room for half of them: it raises, or it only counts the
    dropped pairs.
    """
    capacity = {"max_expert_rows": 16 * size, "alignment": alignment}
    config = {"experts": 4 * size, "top_k": 2, "max_tokens": 16}
    # The inputs come from a config with room, so that only the room differs.
    tokens = []
    for r in range(size):
        tokens.append(make_tokens(make_ep(**config).config, r, 16))
        tokens[r].ids[:] %= 4

    # With "drop" y lacks the dropped pairs, and health counts them.
    dropping = make_ep(**config, capacity=capacity | {"on_overflow": "drop"})
    for _ in range(3):
        poison(dropping)
        y = run_round(dropping, tokens[rank])
        assert_close(y, expected_y_after_drops(dropping.config, dropping.placement, tokens, rank))
    dropped = dropping.health().dropped_pairs
    assert dropped >= 3 * 16 * size if rank == 0 else dropped == 0

    # By default the rank without room raises, and the others go on.
    raising = make_ep(**config, capacity=capacity)
    x, ids, weights = given(raising, tokens[rank])
    for _ in range(2):
        d = raising.dispatch(x, ids, weights)
        rows = run_experts(raising, d)
        if rank == 0:
            with pytest.raises(
                epmoe.EPOverflowError, match=rf"capacity.max_expert_rows is {16 * size}.*at\s+least"
            ) as error:
                raising.combine(rows, d)
                raising.check()
            assert error.value.needed_rows >= 32 * size
        else:
            raising.combine(rows, d)
            raising.check()


FP8_ROWS = {"hidden": 256, "dtype": "bfloat16", "exchange": {"payload": "fp8"}}
ROOM = {"capacity": {"extra_bytes": 24}}
EXTRA = {"extra": torch.ones(6, dtype=torch.int16)}
HIDDEN = "hidden size (D)"
EXPERTS = "experts per token (K)"
LONGER = "elements of x and `extra`"
# Options of `make_ep`, arguments of all ranks and of the last one, the name of what differs, and
# its values on the other ranks and on the last one.
DISAGREE = {
    "D": ({}, {}, lambda x, ids, weights: {"x": x[:, :32]}, HIDDEN, (64, 32)),
    "K": (
        {},
        {},
        lambda x, ids, weights: {"ids": ids[:, :3], "weights": weights[:, :3]},
        EXPERTS,
        (4, 3),
    ),
    "dtype": (
        {},
        {},
        lambda x, ids, weights: {"x": x.bfloat16()},
        "dtype",
        ("float32", "bfloat16"),
    ),
    "fp8": (FP8_ROWS, {}, lambda x, *_: fp8(x), "dtype", ("bfloat16", "float8_e4m3fn")),
    "extra": (ROOM, {}, lambda *_: EXTRA, LONGER, (64, 68)),
    "no extra": (ROOM, EXTRA, lambda *_: {"extra": None}, LONGER, (68, 64)),
}


def fp8(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(("x", "scales"), quantized(x), strict=True))


@pytest.mark.parametrize("what", DISAGREE)
def test_ranks_that_disagree_hear_of_it(make_ep, rank, size, what):
    """Another call on one rank: an error on all ranks, which says what differs.

    On the CPU the next round is complete. On GPUs, whose hosts hear of it in different rounds, no
    rank goes on.
    """
    # The last rank makes another call than all others.
    options, arguments, of_last, name, values = DISAGREE[what]
    ep = make_ep(top_k=4, **options)
    tokens = make_tokens(ep.config, rank, 6)
    inputs = given(ep, tokens)
    call = dict(zip(("x", "ids", "weights"), inputs, strict=True)) | arguments
    mine, theirs = values if rank < size - 1 else values[::-1]
    call |= of_last(*inputs) if rank == size - 1 else {}
    call = {key: value if value is None else value.to(ep.device) for key, value in call.items()}
    # Each rank hears its own value and that of the other side.
    says = re.escape(f"by this: {name} is {mine} here and {theirs} there; they must be equal")
    # Ranks of other rails than the last rank's hear of it, and no more.
    elsewhere = ep.config.topology.num_nodes > 1
    says = "must be equal" if elsewhere else says
    with pytest.raises(epmoe.EPMismatchError, match=says) as error:
        # On the CPU dispatch raises; on a GPU the first call after the kernel has reported.
        d = ep.dispatch(**call)
        ep.combine(torch.zeros(d.rows.shape, dtype=d.dtype, device=ep.device), d)
        ep.check()
    assert (
        error.value.differences == {name: (mine, theirs)}
        or elsewhere
        and not error.value.differences
    )
    # The mismatch has closed the round: the next one is whole.
    if ep.device.type == "cpu":
        return assert_round(ep, tokens)
    for _ in range(2):
        with pytest.raises(epmoe.EPMismatchError, match="can only be resumed or closed"):
            run_round(ep, tokens)


@ON_GPUS
def test_a_mismatch_stays_for_a_host_that_runs_ahead(make_ep, rank):
    """Hosts launch ten rounds before they look. The first has another K on one rank: all of them
    end with zeros.
    """
    ep = make_ep(top_k=4, hidden=64, dtype="float32")
    tokens = first_round(ep, 6)
    x, ids, weights = given(ep, tokens)
    k = 3 if rank == 0 else 4
    graph = torch.cuda.CUDAGraph()
    # One round is captured with the K of this rank.
    with torch.cuda.graph(graph):
        d = ep.dispatch(x, ids[:, :k], weights[:, :k])
        y = ep.combine(d.rows, d)
    # Hosts launch ten of them before they look: no y may be left as it was.
    for _ in range(10):
        poison_(y)
        graph.replay()
        assert not y.any()
    with pytest.raises(epmoe.EPMismatchError, match="round 2: .* can only be resumed or closed"):
        ep.check()


@pytest.mark.parametrize("phases", [False, True])
@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_a_rank_that_stays_away(make_ep, rank, size, stage, phases):
    """The others raise at the deadline, in receive phases where calls are apart, and in every call
    behind it. They have waited until then, and can start again with all.
    """
    ep = make_ep(timeout_s=SHORT_S)
    tokens = first_round(ep, 6)
    inputs = given(ep, tokens)
    ep.poll()
    # Rank 0 comes to no stage behind this one.
    d = ep.dispatch(*inputs) if stage == "combine" else None
    before = ep.health().waited_s[0]
    if rank != 0:
        with pytest.raises(
            epmoe.EPTimeoutError, match=rf"{stage} of round 2 .*rank\(s\) \[0\]"
        ) as caught:
            # Whichever call waits for rank 0 first raises.
            d = d or (
                ep.dispatch_recv(ep.dispatch_send(*inputs)) if phases else ep.dispatch(*inputs)
            )
            rows = run_experts(ep, d)
            if phases:
                ep.combine_send(rows, d)
            ep.combine_recv(d) if phases else ep.combine(rows, d)
            ep.check()
        # The error names the stage and the rank, and stays.
        assert (caught.value.stage, caught.value.missing_ranks) == (stage, [0])
        for call in (ep.poll, ep.check, ep.poll):
            with pytest.raises(epmoe.EPTimeoutError, match=r"rank\(s\) \[0\]"):
                call()
        health = ep.health()
        assert health.timeouts == 1
        # They have waited for as long as the deadline says.
        if ep.config.topology.num_nodes == 1 and not RANKS_SHARE_GPUS:
            waited_s = health.waited_s[0] - before
            assert 0 < waited_s < SOON_S
            # Of more than two ranks, one may have started its wait earlier.
            assert size > 2 or waited_s >= SHORT_S
    dist.barrier()
    # A new `ExpertParallel` of the same ranks works.
    again = make_ep()
    assert_round(again, tokens)


def test_health_counts(make_ep, rank, size):
    ep = make_ep(experts=2 * size, top_k=2, max_tokens=8)
    E = 2 * size
    # Of five rows of logits one is NaN, and the last one is padding.
    logits = torch.zeros(5, E, device=ep.device)
    logits[1] = torch.nan
    ep.route(logits, num_tokens=4)
    # Duplicate ids, ids outside of the experts, and a weight that is NaN.
    ids = torch.tensor([[0, 0], [1, 1], [-1, E], [E + 1, -2], [0, E - 1]], device=ep.device)
    weights = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 1], [torch.nan, 1]], device=ep.device)
    d = ep.dispatch(torch.ones(5, 64, device=ep.device), ids, weights)
    ep.combine(run_experts(ep, d), d)
    # Each of them is counted once.
    health = ep.health()
    assert (health.sanitised_rows, health.padded_rows) == (1, 1)
    assert (health.out_of_range_ids, health.duplicate_ids, health.nonfinite_weights) == (2, 2, 1)
    assert health.dropped_pairs == health.timeouts == 0
    pairs = {0: [2 * size, 2 * size], size - 1: [0, size]} if size > 1 else {0: [2, 3]}
    assert health.tokens_per_expert == pairs.get(rank, [0, 0])
    G = ep.config.topology.ranks_here
    # Rank 0 gets two rows of each source, the last rank one.
    rows_sent = [0] * size
    for owner, rows in ((0, 2), (size - 1, 1)):  # of each source
        if owner // G == rank // G:
            # Also those that its peers on the other nodes have sent it.
            rows_sent[owner] = rows * (size // G)
        else:
            rows_sent[owner // G * G + rank % G] = rows
    assert health.rows_sent == rows_sent
