"""What Python must know before the native library is loaded is what the library reports of its
headers.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from helpers import alone

import epmoe
from epmoe.exchange.health import COUNTERS
from epmoe.exchange.memory import (
    COUNT_COLUMNS,
    LL_MAX_TOKENS_OF_TWO,
    MAX_PARTS,
    NUM_COUNTERS,
    PART_COUNTS,
    RAIL_TAG_BYTES,
    SIGNAL_BYTES,
    MemoryPlan,
)
from epmoe.native.formats import SCALE_BLOCK, WIRE_FORMATS
from epmoe.native.layouts import constant, numbers, struct, words
from epmoe.native.ops import DTYPES


def plan(transport: str) -> MemoryPlan:
    return MemoryPlan.build(
        alone(
            max_tokens=2 * LL_MAX_TOKENS_OF_TWO,
            topology={"ep_size": 2},
            exchange={"transport": transport},
        )
    )


def names(name: str) -> list[str]:
    return [field[0] for field in struct(name)._fields_ if field[0][0] != "_"]


@pytest.mark.parametrize(
    "name", ["ExchangePlan", "ExchangeDescriptor", "RailDescriptor", "RailSlot"]
)
def test_python_knows_all_fields_of_a_struct_that_it_writes(name):
    nested = {"ExchangeDescriptor": "ExchangePlan", "RailDescriptor": "RailSlot"}.get(name)
    nbytes = ctypes.sizeof(struct(name)) - (ctypes.sizeof(struct(nested)) if nested else 0)
    assert 8 * len(names(name)) == nbytes
    assert words(name, {field: i for i, field in enumerate(names(name))}) == list(
        range(nbytes // 8)
    )


@pytest.mark.parametrize("transport", ["shared_memory", "nvlink"])
def test_the_plan_has_a_value_for_every_field(transport):
    made = plan(transport)
    buffers = {buffer.name.replace(".", "_") for buffer in made.buffers}
    assert set(made.sizes) | buffers == set(names("ExchangePlan")) and not set(made.sizes) & buffers


def test_sizes_of_buffers():
    state = plan("nvlink")["state"]
    assert state.nbytes == ctypes.sizeof(struct("RoundState"))
    assert ctypes.sizeof(struct("RailTag")) == RAIL_TAG_BYTES
    assert ctypes.sizeof(struct("RoundHeader")) == SIGNAL_BYTES
    assert constant("kNumCounters") == NUM_COUNTERS == plan("nvlink")["health.counters"].shape[0]
    # Dispatch on GPUs counts parts of a call's tokens, in lines of 16 bytes with an epoch each.
    assert (constant("kMaxParts"), constant("kPartCounts")) == (MAX_PARTS, PART_COUNTS)
    counts = plan("nvlink").sizes["P"] + plan("nvlink").sizes["R"]
    parts, lines, _ = plan("nvlink")["part_counts"].shape
    assert parts == MAX_PARTS and (lines - 1) * PART_COUNTS < counts <= lines * PART_COUNTS
    assert plan("nvlink").sizes["ll_max_tokens"] == LL_MAX_TOKENS_OF_TWO
    assert constant("kCountColumns") == COUNT_COLUMNS


def test_counters_by_their_numbers():
    camel = ["k" + "".join(map(str.capitalize, name.split("_"))) for name in COUNTERS]
    assert (
        numbers("Counter") == {name: i for i, name in enumerate(camel)}
        and len(camel) == NUM_COUNTERS
    )


def test_formats():
    elements = [constant(name) for name in ("kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3")]
    assert elements == list(range(len(DTYPES))) and constant("kScaleBlock") == SCALE_BLOCK
    exchanged = [each.number for each in WIRE_FORMATS.values() if not each.packed]
    assert exchanged == list(range(constant("kNumWireFormats")))
    for each in WIRE_FORMATS.values():
        traits = numbers(f"WireFormat{each.number}")
        scale_bytes = each.scale.itemsize if each.scale else 0
        known = {"element_bits": each.element_bits, "scale_bytes": scale_bytes, "block": each.block}
        assert traits == known | {"packed": each.packed, "element": traits["element"]}
        assert each.element in (None, DTYPES[traits["element"]])


def test_a_descriptor_is_the_plan_and_the_flags_of_a_call():
    """One serves all calls with these flags."""
    with epmoe.ExpertParallel(alone()) as ep:
        plan = MemoryPlan.build(ep.config).as_ints()
        of = ep.exchange.descriptors.of
        descriptor = of(True, False, False)
        assert descriptor.dtype == torch.int64 and descriptor[: len(plan)].tolist() == plan
        assert descriptor[len(plan) :].tolist()[:2] == [True, False]  # expert_major, weight_rows
        assert of(True, False, False) is descriptor and of(True, True, False) is not descriptor
