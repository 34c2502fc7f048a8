"""DeepGEMM, a library of grouped GEMMs for fp8 and bf16 weights: calls and a check of it.

https://github.com/deepseek-ai/DeepGEMM compiles a kernel at its first call, and keeps it in a
folder of the user. Segments have the library's cumulative layout: it gets the end of each segment,
and assumes that the next segment starts at the next multiple of its block of rows. It therefore
computes only rows of segments, however many rows the tensor has.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from epmoe.config.config import ROW_BLOCKS
from epmoe.local.gemm.gemm import (
    Gemm,
    Scaled,
    is_readable,
    plain_rows,
    problem_on_hopper,
    readable,
)
from epmoe.local.weight_formats import FP8_BLOCKS
from epmoe.native.arguments import FP8

# By the dtype of the weights, the number that must divide D and F.
_STEPS = {torch.bfloat16: 64, FP8: FP8_BLOCKS.block[1]}


class DeepGemm(Gemm):
    """DeepGEMM, for fp8 and bf16 weights on GPUs of compute capability 9.0."""

    name = "deep_gemm"
    needs_gpu = True
    block = min(ROW_BLOCKS)
    batch_invariant = True
    takes_fp8 = True

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """See `Gemm.problem_with`. A tiny product shows whether the installed version works."""
        if importlib.util.find_spec("deep_gemm") is None:
            return ModuleNotFoundError("DeepGEMM is not installed: `pip install epmoe[deep_gemm]`")
        # On later GPUs DeepGEMM rounds the scales of fp8 to powers of two. bf16 was not measured
        # there.
        problem = problem_on_hopper("DeepGEMM", gate_up, down, _STEPS)
        if problem is not None:
            return problem
        if not (is_readable(gate_up) and is_readable(down)):
            return ValueError("DeepGEMM takes contiguous weights at multiples of 16 bytes")
        return _problem_with_version(down.dtype == FP8, down.get_device())

    def multiply(self, rows: Scaled, weights: Scaled, ends: Tensor, alignment: int) -> Tensor:
        """See `Gemm.multiply`.

        Of the blocks that divide `alignment` it takes the largest one, which is the fastest if
        experts have many rows.
        """
        library = importlib.import_module("deep_gemm")
        values, _ = weights
        rows = readable(rows[0]), rows[1]
        out = values.new_empty(len(rows[0]), values.shape[1], dtype=torch.bfloat16)
        # The library gets the ends of segments, not the number of an expert for each row. It need
        # not write zeros into gaps, since nobody reads gaps.
        options = {"use_psum_layout": True, "ensure_zero_padding": False}
        largest = max(block for block in ROW_BLOCKS if alignment % block == 0)
        with _block(library, largest):
            if values.dtype == FP8:
                library.m_grouped_fp8_gemm_nt_contiguous(rows, weights, out, ends, **options)
            else:
                library.m_grouped_bf16_gemm_nt_contiguous(
                    plain_rows(rows, out.dtype), values, out, ends, **options
                )
        return out


@functools.cache
def _problem_with_version(fp8: bool, device: int) -> Exception | None:
    """Check by a tiny product whether the installed DeepGEMM works with the installed torch.

    Returns an error that says why it does not, or None.
    """
    e = 2
    n = 256
    block = DeepGemm.block
    rows = e * block

    # Take small integers. Every format represents them, so that products are exact.
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randint(-2, 3, (rows, n), generator=generator, device="cpu").float()
    weights = torch.randint(-2, 3, (e, n, n), generator=generator, device="cpu").float()
    parts = [part @ expert.T for part, expert in zip(x_ND.split(block), weights, strict=True)]
    wanted = torch.cat(parts)

    # Compute the same product by the library, with scales of 1.
    place = torch.device("cuda", device)
    ends = torch.tensor([block, rows], dtype=torch.int32, device=place)
    dtype = torch.bfloat16
    row_scales = None
    weight_scales = None
    if fp8:
        dtype = FP8
        row_scales = torch.ones(2, rows, device=place).t()
        weight_scales = torch.ones(e, 2, 2, device=place)
    error = None
    try:
        with torch.inference_mode(), torch.cuda.device(place):
            scaled_rows = (x_ND.to(place, dtype), row_scales)
            scaled_weights = (weights.to(place, dtype), weight_scales)
            got = DeepGemm().multiply(scaled_rows, scaled_weights, ends, block)
            if not torch.equal(got.float().cpu(), wanted):
                error = "a tiny product is wrong"
    except torch.OutOfMemoryError:
        # A lack of memory says nothing of the library, and must not be cached as its fault.
        raise
    except Exception as reason:
        # Other versions of the library may raise any exception.
        error = f"{type(reason).__name__}: {reason}"
    if error is None:
        return None
    return ImportError(
        f"the installed DeepGEMM does not work with torch {torch.__version__} ({error}): torch "
        "2.11 takes sgl-deep-gemm 0.1.5; with later versions of torch try the newest"
    )


@contextmanager
def _block(library: ModuleType, rows: int) -> Iterator[None]:
    """Let DeepGEMM's blocks have this many rows within this context.

    The number is a global setting of the library. It is set back at the end, since other code in
    the process may use the library, too.
    """
    layout = library.utils.layout
    before = layout.get_mk_alignment_for_contiguous_layout()
    if before == rows:
        yield
        return
    layout.set_mk_alignment_for_contiguous_layout(rows)
    try:
        yield
    finally:
        layout.set_mk_alignment_for_contiguous_layout(before)
