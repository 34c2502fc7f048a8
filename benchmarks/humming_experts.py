"""The experts of a rank by humming-kernels, another library for weights of 4 bits: two grouped
GEMMs, and its activation between them.

    pip install humming-kernels cuda-bindings

It compiles a kernel for each shape at its first use. Its weights lie in an order of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe import GroupedExperts

# Rows of weights are padded to multiples of it.
ROWS_STEP = 128
# Numbers by which blocks of a product meet that share a sum: more than it needs.
LOCKS = 1 << 16
COMPUTE = json.dumps({"gemm_type": "grouped_contiguous"})


class Product(NamedTuple):
    """A grouped GEMM, and what it takes beside rows."""

    config: Any
    tensors: dict[str, Tensor]


class HummingExperts:
    """Experts in MXFP4 over rows in bf16, by kernels for calls of so many rows.

    With `in_fp8` it multiplies by fp8: rows are quantized first, with one scale for each.
    """

    alignment = 1

    def __init__(self, experts: GroupedExperts, *, in_fp8: bool) -> None:
        from humming import dtypes
        from humming.schema import HummingInputSchema

        self.in_fp8 = in_fp8
        self.locks = torch.zeros(LOCKS, dtype=torch.int32, device=experts.w_down.device)
        rows = None
        if in_fp8:
            rows = HummingInputSchema(a_dtype=dtypes.float8e4m3, input_quant_mode="dynamic_token")
        self.gate_up = _product(
            experts.w_gate_up, experts.gate_up_scales, experts.gate_up_bias, rows
        )
        self.down = _product(experts.w_down, experts.down_scales, experts.down_bias, rows)
        self.activation = {
            "activation_type": "binary_interleaved" if experts.interleaved else "binary_split",
            "activation_impl": _formula(experts),
        }

    @staticmethod
    def version() -> str:
        return importlib.metadata.version("humming-kernels")

    def compile(self, counts: list[int]) -> None:
        """Compile the kernels for calls of so many rows, several at a time."""
        from humming.kernel.humming import HummingKernel

        given = [
            (product.config.to_str(), COMPUTE, self._tuning(product, count))
            for product in (self.gate_up, self.down)
            for count in counts
        ]
        device = torch.cuda.current_device()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda of: HummingKernel.prepare_kernels(*of, device), set(given)))

    def try_rows(self, count: int) -> None:
        """Run so many rows of the last expert, and raise what the library raises."""
        device = self.locks.device
        config = self.gate_up.config
        offsets = torch.zeros(config.num_experts + 1, dtype=torch.int32, device=device)
        offsets[-1] = count
        rows = torch.ones(count, config.shape_k, dtype=torch.bfloat16, device=device)
        if not self.of_rows(count, count)(rows, offsets).isfinite().all():
            raise RuntimeError(f"an output of {count} rows is not finite")

    def of_rows(self, count: int, most: int) -> HummingCall:
        """The experts for calls of about so many rows, and at most `most`."""
        tuning = [self._tuning(product, count) for product in (self.gate_up, self.down)]
        return HummingCall(self, tuning, most)

    def _tuning(self, product: Product, rows: int) -> str:
        from humming.tune import get_heuristics_config

        return json.dumps(
            get_heuristics_config(product.config, shape_m=rows, gemm_type="grouped_contiguous")
        )


class HummingCall:
    """What a layer calls in place of `GroupedExperts`."""

    alignment = 1

    def __init__(self, experts: HummingExperts, tuning: list[str], most: int) -> None:
        self.experts = experts
        self.tuning = tuning
        self.most = most

    def __call__(
        self, rows: Tensor, offsets: Tensor, scales: Tensor | None = None, **_segments: object
    ) -> Tensor:
        from humming.forward import may_process_input

        assert scales is None, "rows are bf16"
        experts = self.experts
        real = offsets[-1:]
        rows = rows[: self.most]
        of_rows: Tensor | None = None
        if experts.in_fp8:
            rows, _, of_rows = may_process_input(
                experts.gate_up.config, rows, num_valid_tokens=real
            )
        multiply = partial(_multiply, offsets=offsets, locks=experts.locks)
        gate_up = multiply(experts.gate_up, self.tuning[0], rows, of_rows)
        h, _, of_h = may_process_input(
            experts.down.config, gate_up, num_valid_tokens=real, **experts.activation
        )
        return multiply(experts.down, self.tuning[1], h, of_h)


def _product(codes: Tensor, scales: Tensor, bias: Tensor | None, rows: Any) -> Product:
    """Weights [e, n, k/2] in MXFP4 in the library's order."""
    from humming import dtypes
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_and_transform_humming_tensors

    e, n, half = codes.shape
    tensors = {
        "weight": codes.data.view(torch.uint8).view(torch.int32),
        "weight_scale": scales.data,
    }
    if bias is not None:
        tensors["bias"] = bias.data
    weights = HummingWeightSchema(
        b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e8m0, weight_scale_group_size=32
    )
    return Product(
        *prepare_and_transform_humming_tensors(
            tensors,
            n,
            2 * half,
            weights,
            rows,
            num_experts=e,
            pad_n_to_multiple=ROWS_STEP,
            has_bias=bias is not None,
            torch_dtype=torch.bfloat16,
        )
    )


def _multiply(
    product: Product,
    tuning: str,
    rows: Tensor,
    scales: Tensor | None,
    *,
    offsets: Tensor,
    locks: Tensor,
) -> Tensor:
    from humming.forward import humming_forward

    out: Tensor = humming_forward(
        product.config,
        rows,
        input_scale=scales,
        expert_layout=offsets,
        locks=locks,
        compute_config=COMPUTE,
        tuning_config=tuning,
        **product.tensors,
    )
    return out


def _formula(experts: GroupedExperts) -> str:
    """The activation in C++, of a gate `a` and an up `b`."""
    gate = "a"
    up = "b"
    if experts.limit is not None and experts.limit != math.inf:
        limit = f"{experts.limit:.1f}f"
        gate = f"fminf(a, {limit})"
        up = f"fminf(fmaxf(b, -{limit}), {limit})"
    return (
        f"({gate}) / (1.0f + __expf(-{experts.alpha:.4f}f * ({gate}))) * "
        f"({up} + {experts.up_offset:.1f}f)"
    )
