"""DeepGEMM, whose grouped GEMMs take fp8 and bf16: whether it can be used here, and its calls.

Its kernels compile when they are first called, and lie in a folder of the user from then on.
Segments lie in its cumulative layout: it is told where each ends, and counts on the next to start
at a multiple of its block of rows. So it works through rows of segments only, however many rows
there are. https://github.com/deepseek-ai/DeepGEMM
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
from epmoe.local.gemm.gemm import Gemm, Scaled, plain_rows, problem_on_hopper
from epmoe.local.weight_formats import FP8_BLOCKS
from epmoe.native.arguments import FP8

# D and F are multiples of it, by dtype.
_STEPS = {torch.bfloat16: 64, FP8: FP8_BLOCKS.block[1]}


class DeepGemm(Gemm):
    """DeepGEMM on GPUs of compute capability 9.0: fp8 weights, and bf16 ones."""

    name = "deep_gemm"
    needs_gpu = True
    block = min(ROW_BLOCKS)
    batch_invariant = True
    takes_fp8 = True

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """A tiny product shows whether the installed version works."""
        if importlib.util.find_spec("deep_gemm") is None:
            return ModuleNotFoundError("DeepGEMM is not installed: `pip install epmoe[deep_gemm]`")
        # On later GPUs fp8 rounds the scales to powers of two, and bf16 is not measured.
        problem = problem_on_hopper("DeepGEMM", gate_up, down, _STEPS)
        if problem is not None:
            return problem
        if not (gate_up.is_contiguous() and down.is_contiguous()):
            return ValueError("DeepGEMM takes contiguous weights")
        return _problem_with_version(down.dtype == FP8, down.get_device())

    def multiply(self, rows: Scaled, weights: Scaled, ends: Tensor, alignment: int) -> Tensor:
        """Multiply by DeepGEMM. The largest block that fits is the fastest if experts have many
        rows.
        """
        library = importlib.import_module("deep_gemm")
        values, _ = weights
        out = values.new_empty(len(rows[0]), values.shape[1], dtype=torch.bfloat16)
        # Ends of segments, not a number for each row; nobody reads gaps.
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
    """Check by a tiny product that the installed version works with this torch. Returns why it does
    not, or None.
    """
    e = 2
    n = 256
    block = DeepGemm.block
    rows = e * block

    # Small integers, which every format holds: products are exact.
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randint(-2, 3, (rows, n), generator=generator, device="cpu").float()
    weights = torch.randint(-2, 3, (e, n, n), generator=generator, device="cpu").float()
    parts = [part @ expert.T for part, expert in zip(x_ND.split(block), weights, strict=True)]
    wanted = torch.cat(parts)

    # Compute the same by the library, with scales of 1.
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
        # It says nothing of the library, and must not be cached.
        raise
    except Exception as reason:
        # The library may be of any version, and raise anything.
        error = f"{type(reason).__name__}: {reason}"
    if error is None:
        return None
    return ImportError(
        f"the installed DeepGEMM does not work with torch {torch.__version__} ({error}): torch "
        "2.11 takes sgl-deep-gemm 0.1.5; with later versions of torch try the newest"
    )


@contextmanager
def _block(library: ModuleType, rows: int) -> Iterator[None]:
    """Let DeepGEMM's blocks have so many rows within this context. Other users of the library keep
    what they have set.
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
