"""Bad input is refused before anything is sent, with an error that says what it must be; the next round is complete."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_y, make_config, make_tokens, run_experts, run_round, slab_shape

import epmoe

T, K, D, M = 5, 4, 64, 16
X, IDS, WEIGHTS = torch.zeros(T, D), torch.zeros(T, K, dtype=torch.int32), torch.ones(T, K)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((X.double(), IDS, WEIGHTS), {}, TypeError, r"`x` must be .*float32.* \[T, D\], got float64 \[5, 64\]"),
        ((X.int(), IDS, WEIGHTS), {}, TypeError, r"`x` must be .*float32.* \[T, D\], got int32 \[5, 64\]"),
        ((X[0], IDS, WEIGHTS), {}, ValueError, r"`x` must be .* \[T, D\], got float32 \[64\]"),
        (
            (torch.zeros(T, 128), IDS, WEIGHTS),
            {},
            ValueError,
            r"`x` must be float32 \[T, 64\].*, got float32 \[5, 128\]",
        ),
        ((X[:, :63], IDS, WEIGHTS), {}, ValueError, r"`x` must be float32 \[T, 64\].*16 bytes, got float32 \[5, 63\]"),
        ((X, IDS[:4], WEIGHTS), {}, ValueError, r"`ids` must be int32 or int64 \[5, K\], got int32 \[4, 4\]"),
        ((X, IDS[0], WEIGHTS), {}, ValueError, r"`ids` must be int32 or int64 \[5, K\], got int32 \[4\]"),
        (
            (X, IDS.repeat(1, 2), WEIGHTS),
            {},
            ValueError,
            r"`ids` must be int32 or int64 \[5, 1\.\.4\], got int32 \[5, 8\]",
        ),
        ((X, IDS.short(), WEIGHTS), {}, TypeError, r"`ids` must be int32 or int64 \[5, K\], got int16 \[5, 4\]"),
        ((X, IDS, WEIGHTS[:, :3]), {}, ValueError, r"`weights` must be .* \[5, 4\], got float32 \[5, 3\]"),
        ((X, IDS, WEIGHTS.double()), {}, TypeError, r"`weights` must be .* \[5, 4\], got float64 \[5, 4\]"),
        ((X, IDS, WEIGHTS), {"layout": "token"}, ValueError, r"`layout` must be 'expert' or 'rank', got 'token'"),
        ((X, IDS, WEIGHTS), {"num_tokens": 2.0}, TypeError, r"`num_tokens` must be an int or .*, got float"),
        (
            (X, IDS, WEIGHTS),
            {"num_tokens": torch.ones(2)},
            TypeError,
            r"`num_tokens` must be int32 \[1\], got float32 \[2\]",
        ),
        ((X.clone().requires_grad_(), IDS, WEIGHTS), {}, RuntimeError, r"forward only.*torch\.inference_mode"),
        (
            (torch.zeros(M + 3, D), torch.zeros(M + 3, K, dtype=torch.int32), torch.ones(M + 3, K)),
            {},
            ValueError,
            r"19 tokens, but capacity\.max_num_tokens_per_rank is 16: set it to at least 19",
        ),
    ],
)
def test_dispatch(make_ep, rank, args, options, error, message):
    ep = make_ep(top_k=K, hidden=D, max_tokens=M)
    with pytest.raises(error, match=message):
        ep.dispatch(*(t.to(ep.device) for t in args), **options)
    tokens = make_tokens(ep.config, rank, 7)
    assert_y(run_round(ep, tokens), ep.config, tokens)


def test_combine(make_ep, rank, size):
    ep = make_ep(top_k=K, hidden=D, max_tokens=M)
    tokens = make_tokens(ep.config, rank, 7)
    given = [t.to(ep.device) for t in (tokens.x, tokens.ids, tokens.weights)]
    d = ep.dispatch(*given)
    rows = run_experts(ep, d)
    for bad, message in [
        (rows.half(), r"`expert_rows` must be float32 \[N, 64\], got float16"),
        (rows[:, :32], r"`expert_rows` must be float32 \[N, 64\], got float32"),
        (rows[0], r"`expert_rows` must be float32 \[N, 64\], got float32 \[64\]"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            ep.combine(bad, d)
    with pytest.raises(ValueError, match="layout='expert' ends with combine"):
        ep.combine_partial(torch.zeros(size, M, D, device=ep.device), d)
    assert_y(ep.combine(rows, d), ep.config, tokens)

    d = ep.dispatch(*given, layout="rank")
    with pytest.raises(ValueError, match="layout='rank'.*combine_partial"):
        ep.combine(rows, d)
    slabs, slots = slab_shape(ep.config)
    with pytest.raises(
        ValueError, match=rf"`partial` must be float32 \[{slabs}, {slots}, 64\], got float32 \[{slabs}, 7, 64\]"
    ):
        ep.combine_partial(d.recv.x[:, :7], d)
    ep.abort(d)


def test_group(rank, size, device):
    with pytest.raises(
        ValueError, match=rf"topology\.ep_size must equal the size of the group, {size}, got {size + 1}"
    ):
        epmoe.ExpertParallel(make_config(size + 1), device=device)
    lonely = dist.new_group(list(range(size)), backend="cuda:gloo")
    with pytest.raises(ValueError, match=r"`group` must have a CPU backend, got .*cuda:gloo.*cpu:gloo,cuda:nccl"):
        epmoe.ExpertParallel(make_config(size), group=lonely, device=device)
    M, theirs = (9, 8) if rank == 0 else (8, 9)
    differs = rf"the config of rank {rank} differs from that of rank\(s\) .*"
    with pytest.raises(ValueError, match=rf"{differs}`capacity.max_num_tokens_per_rank` is {M} here and {theirs} on"):
        epmoe.ExpertParallel(make_config(size, max_tokens=8 + (rank == 0)), device=device)


def test_a_subgroup_numbers_its_own_ranks(rank, size, device):
    """The first ranks and the last two ranks are separate groups."""
    parts = [part for part in (list(range(size - 2)), [size - 2, size - 1]) if part]
    for members, group in [(part, dist.new_group(part)) for part in parts]:
        if rank not in members:
            continue
        with epmoe.ExpertParallel(make_config(len(members)), group=group, device=device) as ep:
            assert ep.rank == members.index(rank)
            tokens = make_tokens(ep.config, ep.rank, 9)
            assert_y(run_round(ep, tokens), ep.config, tokens)


def test_no_room_for_the_windows(rank, size, device):
    """More memory than the machine has: an error on every rank before anything is mapped."""
    huge = make_config(size, hidden=65536, max_tokens=2**20)
    with pytest.raises(MemoryError, match=r"rank \d: .*bytes.*max_num_tokens_per_rank"):
        epmoe.ExpertParallel(huge, device=device)
