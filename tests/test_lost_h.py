"""The experts in one kernel where a tile of h is never counted, in a library that was built so: its
waits end after 2 ms. The outputs that need the tile are NaN. No others are wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from expert_inputs import BF16, FP8, GPT_OSS
from helpers import build_without
from launched import run_python
from test_drawn_mxfp4 import Case, Options
from test_few_rows import Rows, built
from test_fused_experts import FUSED, fused, only
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
    pytest.mark.usefixtures("serving"),
]

# Rows of experts. The tile that is lost is the second one of rows. The first expert has one tile of
# them, so it is the first tile of the second expert, which has only that one, too.
FEW = [5, 17, 64, 33, 8, 0, 1, 80]
COUNTS = {
    # All have tiles of up to 80 rows.
    "fp8, tiles of 80": [FEW, [1, 80, 0, 0, 0, 0, 9, 16]],
    # The second expert's tile has factors, is full, or is overfull.
    "fp8, tiles of 144": [
        [5, 96, 300, 128, 0, 257, 90, 112],
        [128] * 8,
        [5, 140, 300, 128, 0, 257],
    ],
    "bf16": [FEW, [5, 100, 300, 128, 0, 257, 90, 112]],
    "MXFP4, few": [[3, 17, 170, 100], [5, 64, 300, 40], [1, 1, 0, 9]],
    "MXFP4, many": [[3, 17, 170, 100], [5, 144, 300, 40], [128, 100, 0, 290]],
}
# The width of rows, and of h.
SIZES = [(512, 256), (640, 384), (2048, 768)]
# How long a call may take: its waits of 2 ms, and all else many times.
MOST_S = 0.2
# What a child saves.
CHILD = """
import torch
from test_lost_h import calls
torch.save([tuple(made) for made in calls("{kind}")], "{path}")
"""


def call_of(
    kind: str, counts: list[int], sizes: tuple[int, int], gpt_oss: bool
) -> Callable[[], Tensor]:
    """A call that returns the outputs of real rows. Every process draws the same."""
    device = torch.device("cuda")
    if kind.startswith("MXFP4"):
        rows_per_expert = 200.0 if kind.endswith("many") else 8.0
        activation = GPT_OSS if gpt_oss else {}
        case = Case(Options(counts, *sizes, activation, rows_per_expert=rows_per_expert), device)
        experts = case.experts()
        assert case.keeps_fp8(experts)
        return partial(case.outputs, experts)
    # Weights are those of eight experts.
    counts = counts + [0] * (8 - len(counts))
    if kind == "bf16":
        experts = only(FUSED, built(BF16, device, gpt_oss, sizes))
        return partial(Rows(counts, BF16, device, width=sizes[0]).outputs, experts, 32.0)
    experts = fused(device, gpt_oss, sizes=sizes)
    return partial(Rows(counts, FP8, device, width=sizes[0]).outputs, experts, None)


class Made(NamedTuple):
    """A call that was made."""

    counts: list[int]
    outputs: Tensor
    seconds: float


@torch.no_grad()
def calls(kind: str) -> list[Made]:
    """Makes each call twice, and returns what became of the second one."""
    found = []
    for counts in COUNTS[kind]:
        for sizes in SIZES:
            for gpt_oss in (False, True):
                call = call_of(kind, counts, sizes, gpt_oss)
                call()
                torch.cuda.synchronize()
                started = time.monotonic()
                outputs = call().cpu()
                found.append(Made(counts, outputs, time.monotonic() - started))
    return found


@pytest.mark.parametrize("kind", COUNTS)
def test_outputs_of_a_lost_tile_are_nan_and_no_others_wrong(kind, tmp_path):
    saved = tmp_path / "outputs"
    child = run_python(
        "-c",
        CHILD.format(kind=kind, path=saved),
        EPMOE_LIBRARY=build_without("EPMOE_MUTATE_LOST_H"),
    )
    assert child.returncode == 0, child.stdout + child.stderr
    lost = [Made(*made) for made in torch.load(saved)]
    whole = calls(kind)
    assert len(lost) == len(whole) == len(COUNTS[kind]) * len(SIZES) * 2
    for got, wanted in zip(lost, whole, strict=True):
        counts = got.counts
        assert counts == wanted.counts and wanted.outputs.isfinite().all()
        is_nan = got.outputs.isnan()
        assert is_nan[counts[0] : counts[0] + counts[1]].all(), f"{counts}: the lost tile"
        is_right = got.outputs.view(torch.int16) == wanted.outputs.view(torch.int16)
        assert (is_right | is_nan).all(), f"{counts}: other rows"
        assert got.seconds < MOST_S
