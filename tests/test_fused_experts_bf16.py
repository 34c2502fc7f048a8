"""The experts in one kernel, in bf16: on GPUs its bits are those of our grouped GEMMs, with NaN all
around, in serving and in training.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from expert_inputs import BF16, GPT_OSS
from helpers import ON_GPUS, captured, poison_, poisoned_memory
from test_few_rows import COUNTS, FEW_AND_MANY, MIDDLE, WIDTH, Rows, built
from torch import Tensor

import epmoe
from epmoe.local.gemm.gemm import SWIGLU, Gating, Segments, Weights
from epmoe.local.gemm.table import GEMMS
from epmoe.native import ops

pytestmark = pytest.mark.usefixtures("serving")

FUSED = GEMMS["fused_experts"]
HOPPER = GEMMS["hopper"]
GATINGS = {False: SWIGLU, True: Gating(**GPT_OSS)}

# Tiles have up to 128 rows, 128 columns of h and 256 outputs. Products of 64 rows leave at once.
# Every width has a loop of its own.
TILES = [
    *FEW_AND_MANY,
    ([95, 96, 97, 111, 112, 113, 127, 128], (WIDTH, MIDDLE)),
    ([143, 144, 145, 159, 160, 161, 192, 193], (WIDTH, MIDDLE)),
    ([175, 176, 177, 191, 320, 321, 351, 353], (WIDTH, MIDDLE)),
    # Parts of the last tiles of h and of outputs are empty.
    (COUNTS, (640, 384)),
    (COUNTS, (320, 192)),
    (COUNTS, (64, 64)),
]
ALL_TILES = pytest.mark.parametrize(("counts", "sizes"), TILES)
BOTH_GATINGS = pytest.mark.parametrize("gpt_oss", [False, True])


class Call(NamedTuple):
    """The arguments of `Gemm.experts`, and which rows are real."""

    weights: Weights
    rows: Tensor
    segments: Segments
    real: Tensor

    @classmethod
    def of(
        cls,
        device: torch.device,
        gpt_oss: bool,
        counts: list[int] = COUNTS,
        sizes: tuple[int, int] = (WIDTH, MIDDLE),
    ) -> Call:
        experts = built(BF16, device, gpt_oss, sizes)
        rows = Rows(counts, BF16, device, width=sizes[0])
        # A row of NaN stays alone.
        rows.rows[rows.real[::7], 5] = torch.nan
        weights = Weights(
            experts.w_gate_up,
            experts.w_down,
            None,
            None,
            experts.gate_up_bias,
            experts.down_bias,
            GATINGS[gpt_oss],
        )
        segments = Segments(rows.offsets, rows.tokens, 1, rows_per_expert=32.0)
        return cls(weights, rows.rows, segments, rows.real)

    def served(self, gemm: object) -> Tensor:
        """The outputs of real rows."""
        with poisoned_memory():
            return gemm.experts(self.weights, self.rows, None, self.segments)[self.real]

    def trained(self, operator: object) -> tuple[Tensor, Tensor]:
        """The outputs and the first product, of real rows."""
        weights = self.weights
        with poisoned_memory():
            out, gate_up = operator(
                self.rows,
                weights.gate_up,
                weights.down,
                weights.gate_up_bias,
                self.segments.offsets,
                self.segments.tokens,
                *weights.gating,
            )
        return out[self.real], gate_up[self.real]


def assert_same_bits(got: Tensor, wanted: Tensor) -> None:
    differing = (got.view(torch.int16) != wanted.view(torch.int16)).sum(1)
    assert not differing.any(), (
        f"{int(differing.sum())} elements of {int(differing.count_nonzero())} rows"
    )


@ON_GPUS
@BOTH_GATINGS
@ALL_TILES
def test_bits_are_those_of_the_grouped_gemms(device, counts, sizes, gpt_oss):
    """On each of three runs."""
    call = Call.of(device, gpt_oss, counts, sizes)
    wanted = call.served(HOPPER)
    assert wanted[::7].isnan().all()
    assert wanted.isnan().any(1).sum() == len(wanted[::7])
    for _ in range(3):
        assert_same_bits(call.served(FUSED), wanted)


@ON_GPUS
@BOTH_GATINGS
@ALL_TILES
def test_training_keeps_gates_and_ups(device, counts, sizes, gpt_oss):
    call = Call.of(device, gpt_oss, counts, sizes)
    wanted = call.trained(ops.hopper_experts)
    for _ in range(3):
        got = call.trained(ops.fused_experts_of_training)
        assert_same_bits(got[0], wanted[0])
        assert_same_bits(got[1], wanted[1])


@ON_GPUS
@pytest.mark.parametrize("experts_of_rank", [1, 40, 224])
def test_any_number_of_experts(device, experts_of_rank):
    """One, which has all rows; more than a warp lists at once; and as many as it takes."""
    weights = {
        "w_gate_up": torch.randn(experts_of_rank, 256, 256, device=device, dtype=BF16),
        "w_down": torch.randn(experts_of_rank, 256, 128, device=device, dtype=BF16),
    }
    experts = epmoe.GroupedExperts(**weights)
    counts = [3 + 1000 // experts_of_rank] * experts_of_rank
    rows = Rows(counts, BF16, device, width=256)
    given = Weights(experts.w_gate_up, experts.w_down, None, None, None, None, SWIGLU)
    call = Call(given, rows.rows, Segments(rows.offsets, rows.tokens, 1), rows.real)
    assert_same_bits(call.served(FUSED), call.served(HOPPER))


@ON_GPUS
def test_a_graph_takes_other_segments(device):
    call = Call.of(device, gpt_oss=False)
    replay, out = captured(lambda: FUSED.experts(call.weights, call.rows, None, call.segments))
    other = Rows(COUNTS[::-1], BF16, device, seed=9)
    others = Segments(other.offsets, other.tokens, 1)
    wanted = Call(call.weights, other.rows, others, other.real).served(HOPPER)
    call.segments.offsets.copy_(other.offsets)
    call.segments.tokens.copy_(other.tokens)
    call.rows.copy_(other.rows)
    # Counters of the last replay are cleared by the next one.
    for _ in range(2):
        poison_(out)
        replay()
        assert_same_bits(out[other.real], wanted)


@ON_GPUS
def test_wild_segments_reach_no_other_memory(device):
    """What they say is clamped to the rows that there are, and to the tiles that have counters."""
    call = Call.of(device, gpt_oss=True)
    wild = [-5, 2**30, 3, -(2**31), 40, 2**31 - 1, 0, 7, 9]
    counts = [2**31 - 1, -1, 2**30, 5, -(2**31), 2**31 - 1, 2, 3]
    call.segments.offsets.copy_(torch.tensor(wild, dtype=torch.int32))
    call.segments.tokens.copy_(torch.tensor(counts, dtype=torch.int32))
    call.served(FUSED)
    call.trained(ops.fused_experts_of_training)
    torch.cuda.synchronize()
    assert torch.ones(8, device=device).sum() == 8
