"""Rows, scales and biases of experts that begin at any address, as views of longer tensors do:
outputs have the bits that they have elsewhere.
"""

from __future__ import annotations

import pytest
import torch
from addresses import moved
from expert_inputs import BF16, FP8, GPT_OSS
from test_drawn_mxfp4 import Case, Options
from test_few_rows import COUNTS, Rows, built

import epmoe

pytestmark = pytest.mark.usefixtures("serving")


def move_parameters(experts: epmoe.GroupedExperts) -> None:
    """Moves all scales and biases, and no weights, whose place is asked when experts are made."""
    names = []
    for name, parameter in experts.named_parameters():
        if name.endswith(("scales", "bias")):
            parameter.data = moved(parameter.data)
            names.append(name)
    assert names


@pytest.mark.parametrize("rows_per_expert", [0.1, 1.0, 6.0, 32.0, None])
@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_fp8_and_bf16(device, dtype, rows_per_expert):
    experts = built(dtype, device, gpt_oss=True)
    rows = Rows(COUNTS, dtype, device)
    wanted = rows.outputs(experts, rows_per_expert)
    rows.rows = moved(rows.rows)
    move_parameters(experts)
    assert torch.equal(rows.outputs(experts, rows_per_expert), wanted)


@pytest.mark.parametrize("rows_per_expert", [1.0, 8.0, 64.0, 200.0])
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("is_nvfp4", [False, True])
def test_four_bits(device, is_nvfp4, in_fp8, rows_per_expert):
    options = Options(
        [3, 0, 17, 70, 1],
        192,
        320,
        GPT_OSS,
        (True, True),
        rows_per_expert=rows_per_expert,
        is_nvfp4=is_nvfp4,
        in_fp8=in_fp8,
    )
    case = Case(options, device)
    experts = case.experts()
    wanted = case.outputs(experts)
    assert wanted.isfinite().all()
    move_parameters(experts)
    assert torch.equal(case.outputs(experts), wanted)
    case.rows = moved(case.rows)
    got = case.outputs(experts)
    # Other kernels may take rows in fp8 that TMA cannot read.
    assert (got - wanted).norm() <= 0.1 * wanted.norm()
