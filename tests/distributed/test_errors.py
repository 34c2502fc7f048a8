"""Bad input is refused before anything is sent, with an error that says what it must be; the next round is complete."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from exchanges import assert_y, make_config, make_tokens, run_round

import epmoe

K, D, M = 4, 64, 16


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
    sections = make_config(size).model_dump() | {"experts": {"limit": 7.0} if rank == 0 else {}}
    with pytest.raises(ValueError, match=rf"{differs}`experts.limit` is {sections['experts'].get('limit')} here and"):
        epmoe.ExpertParallel(epmoe.EPConfig(**sections), device=device)


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
