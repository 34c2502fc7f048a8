"""Counters of the local stages, and errors that name the rank, the round and the value to set."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from helpers import distinct_ids, randn

import epmoe
from epmoe.config.seats import Seats
from epmoe.exchange.health import COUNTERS, STAGES, Health, Totals, raise_on_failure
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.mismatch import calls_of
from epmoe.exchange.processors import processor_of
from epmoe.native.layouts import struct

CPU = processor_of(torch.device("cpu"))


def counted(counters: torch.Tensor) -> dict[str, int]:
    return {name: count for name, count in zip(COUNTERS, counters.tolist(), strict=True) if count}


def test_route_counts_rows(device):
    counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
    logits = randn(10, 16).to(device)
    # Three rows that are not finite, and one of padding.
    logits[1, 3] = torch.nan
    logits[4] = -torch.inf
    logits[5, 0] = torch.inf
    logits[9] = torch.nan  # padding, which is not read
    epmoe.route(logits, 4, num_tokens=9, counters=counters)
    # By softmax, then with numbers of tokens that cannot be.
    assert counted(counters) == {"sanitised_rows": 3, "padded_rows": 1}
    epmoe.route(
        logits,
        4,
        scoring="sigmoid",
        num_tokens=torch.tensor(-5, dtype=torch.int32, device=device),
        counters=counters,
    )
    assert counted(counters) == {"sanitised_rows": 3, "padded_rows": 11, "clamped_num_tokens": 1}
    epmoe.route(logits, 4, scoring="sigmoid", num_tokens=11, counters=counters)  # sigmoid(Inf) is 1
    assert counted(counters) == {"sanitised_rows": 5, "padded_rows": 11, "clamped_num_tokens": 2}


def test_permute_counts_dropped_pairs(device):
    counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
    ids = distinct_ids(10, 8, 4).to(device)
    identity_map = torch.arange(8, dtype=torch.int32, device=device)
    epmoe.permute(randn(10, 16).to(device), ids, identity_map, 8, max_rows=33, counters=counters)
    assert counted(counters) == {"dropped_pairs": 7}
    epmoe.permute(randn(10, 16).to(device), ids, identity_map, 8, counters=counters)
    assert counted(counters) == {"dropped_pairs": 7}


def test_health_holds_every_counter():
    totals = [*range(len(COUNTERS))], [[5, 0], [0, 6]], [7, 8], [0, 2_500_000_000], [0, 3]
    health = Health.read(9, list(map(torch.tensor, totals)))
    names = [field.name for field in dataclasses.fields(health)]
    lists = ["tokens_per_expert", "rows_sent", "waited_s", "aborted_rounds", "rows_by_layer"]
    assert names == ["rounds", *COUNTERS, *lists, "refused_plans"] and health.rows_by_layer == [
        5,
        6,
    ]
    assert [getattr(health, name) for name in COUNTERS] == list(range(len(COUNTERS)))
    assert health.rounds == 9 and health.tokens_per_expert == [5, 6] and health.rows_sent == [7, 8]
    assert health.waited_s == [0.0, 2.5] and health.aborted_rounds == [0, 3]


def test_the_count_of_rounds_goes_on_where_their_number_begins_again():
    """Also for a thread that has read the number before another one has."""
    buffers = MemoryPlan.build(epmoe.EPConfig.load("cpu_demo"), nvlink=False).buffers
    views = {buffer.name: torch.zeros(buffer.shape, dtype=buffer.dtype) for buffer in buffers}
    totals = Totals(views, CPU)
    counts = []
    # Numbers on either side of 2³¹ and 2³².
    for rounds in (0, 5, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 7, 2**33 + 1):
        views["state"][0] = (rounds + 2**31) % 2**32 - 2**31
        counts.append((totals.read().rounds, rounds))
    assert all(got == want for got, want in counts), counts
    # Another thread counts in the middle of a read.
    views["state"][0] = 5
    read = totals._peek.read
    totals._peek = Mock()
    totals._peek.read.side_effect = lambda: setattr(totals, "_rounds", 2**33 + 9) or read()
    assert totals.read().rounds == 2**33 + 5 and totals._rounds == 2**33 + 9


def test_health_as_a_dict_survives_json():
    totals = (
        torch.ones(len(COUNTERS), dtype=torch.int64),
        torch.tensor([[2**40, 1]]),
        *3 * [torch.tensor([2**40, 1])],
    )
    health = Health.read(2**40, totals)
    assert Health(**json.loads(json.dumps(health.as_dict()))) == health


def test_timeout_names_stage_round_and_ranks():
    """Rank 1 of the group is rank 9 of the world. Every call raises the error until close()."""
    status = struct("Status")(code=1, stage=1, epoch=42, missing=0b1010, originator=2)
    for _ in range(2):
        with pytest.raises(
            epmoe.EPTimeoutError, match=r"combine of round 42 .*\[1, 3\].*\[9, 11\].*rank 2"
        ) as raised:
            raise_on_failure(status, [8, 9, 10, 11], Seats.full(4), rank=0, latched=False)
    error = raised.value
    assert (error.stage, error.epoch) == ("combine", 42)
    assert error.missing_ranks == [1, 3] and error.missing_global_ranks == [9, 11]
    assert isinstance(error, TimeoutError) and isinstance(error, epmoe.EPError)


@pytest.mark.parametrize(
    "rank, reason", [(3, "this rank came too late"), (2, "raise exchange.timeout_s")]
)
def test_a_rank_that_came_too_late_hears_it(rank, reason):
    status = struct("Status")(code=1, epoch=1, missing=0b1010, originator=2)
    with pytest.raises(epmoe.EPTimeoutError, match=reason):
        raise_on_failure(status, [0, 1, 2, 3], Seats.full(4), rank, latched=False)


def test_a_mismatch_that_has_latched_is_reported_for_ever():
    status = struct("Status")(code=2, epoch=3, missing=0b01)
    for _ in range(2):
        with pytest.raises(
            epmoe.EPMismatchError, match=r"rank\(s\) \[0\] .* can only be resumed or closed"
        ):
            raise_on_failure(status, [0, 1], Seats.full(2), rank=1, latched=True)


def count_words(*shapes: int) -> torch.Tensor:
    """What GPUs signal: the number of the round in the low half, the value in the high one."""
    return torch.tensor([[0, (shape << 32 | 3) - (shape >> 31 << 64), 0] for shape in shapes])


def test_a_mismatch_on_gpus_says_what_differs():
    """As `call_without_rows` in csrc/cuda/dispatch/block.cuh packs a call of D 4096, K 8, bf16,
    layout expert.
    """
    D = 4096
    K = 8
    aligned = 1
    dtype = 2
    expert = 1
    weighted = 0
    training = 0
    tag = 63
    # The bits of the value, from the lowest on.
    shape = (
        (D >> 2) - 1
        | aligned << 14
        | (K - 1) << 15
        | dtype << 20
        | expert << 22
        | weighted << 23
        | training << 24
    )
    shape |= tag << 26

    # It is unpacked to the words of users.
    counts = count_words(shape)
    assert calls_of({"recv.counts": counts}, CPU.peek(counts)) == [
        {
            "hidden size (D)": D,
            "experts per token (K)": K,
            "dtype": "bfloat16",
            "aligned": True,
            "training": False,
            "layout": "expert",
            "apply_router_weight_on_input": False,
        }
    ]

    # A rank that differs in some bits: the error names these, and the values of both.
    for other, named in (
        (shape ^ 1 << 22, {"layout": ("expert", "rank")}),
        (shape ^ 1 << 23, {"apply_router_weight_on_input": (False, True)}),
        (shape ^ 1 << 24, {"training": (False, True)}),
        (
            shape ^ 1 << 15 ^ 1 << 20,
            {"experts per token (K)": (8, 7), "dtype": ("bfloat16", "float8_e4m3fn")},
        ),
        (shape ^ 1 << 25, {}),  # whether it has more rounds
    ):
        counts = count_words(shape, shape, other)
        calls = partial(calls_of, {"recv.counts": counts}, CPU.peek(counts))
        with pytest.raises(epmoe.EPMismatchError) as error:
            status = struct("Status")(code=2, epoch=3, missing=0b100)
            raise_on_failure(status, [0, 1, 2], Seats.full(3), rank=1, latched=True, calls=calls)
        assert error.value.differences == named
        assert all(
            f"{name} is {mine} here and {its} there" in str(error.value)
            for name, (mine, its) in named.items()
        )


@pytest.mark.parametrize(
    ("stage", "phases", "said"),
    [
        (0, 2, "round 7: dispatch ran .* where combine was due"),
        (1, 0, "round 7: combine ran .* where dispatch was due"),
        (1, 1, "round 7: combine ran .* where dispatch had not ended"),
        (0, 3, "round 7: dispatch ran .* where combine had not ended"),
    ],
)
def test_a_stage_out_of_turn_is_reported_for_ever(stage, phases, said):
    status = struct("Status")(code=3, stage=stage, epoch=7, missing=0b01, phases=phases)
    for _ in range(2):
        with pytest.raises(
            epmoe.EPOrderError, match=f"{said}.* can only be resumed or closed"
        ) as raised:
            raise_on_failure(status, [0, 1], Seats.full(2), rank=0, latched=True)
    assert (raised.value.stage, raised.value.epoch) == (STAGES[stage], 7) and isinstance(
        raised.value, epmoe.EPError
    )
