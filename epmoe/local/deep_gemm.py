"""DeepGEMM, whose grouped GEMMs take fp8 and bf16: whether it can be used here, and its calls.

Its kernels compile when they are first called, and lie in a folder of the user from then on. Segments lie in its
cumulative layout: it is told where each ends, and counts on the next to start at a multiple of its block of rows. So it
works through rows of segments only, however many rows there are. https://github.com/deepseek-ai/DeepGEMM
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

from epmoe.native.arguments import FP8
from epmoe.native.formats import SCALE_BLOCK

BLOCKS = (64, 128)
"""Rows of a block. Segments start at multiples of one; larger blocks are faster where experts have many rows."""
_STEP = 64  # of n and k in bf16


def block_of(alignment: int) -> int:
    """The largest block of rows for segments that start at multiples of `alignment`. Raises ValueError if none fits."""
    fitting = [block for block in BLOCKS if alignment % block == 0]
    if not fitting:
        raise ValueError(f"DeepGEMM takes segments that start at multiples of {BLOCKS[0]} rows, got {alignment}")
    return fitting[-1]


def multiply(
    rows: Tensor, row_scales: Tensor | None, weights: Tensor, weight_scales: Tensor | None, ends: Tensor, alignment: int
) -> Tensor:
    """As `grouped_gemm.multiply`, in bf16."""
    library = importlib.import_module("deep_gemm")
    out = rows.new_empty(rows.shape[0], weights.shape[1], dtype=torch.bfloat16)
    options = {"use_psum_layout": True, "ensure_zero_padding": False}
    with _block(library, block_of(alignment)):
        if weight_scales is None:
            library.m_grouped_bf16_gemm_nt_contiguous(rows, weights, out, ends, **options)
        else:
            quantised = (rows, row_scales), (weights, weight_scales)
            library.m_grouped_fp8_gemm_nt_contiguous(*quantised, out, ends, **options)
    return out


def is_installed() -> bool:
    """Whether the package is there, of whatever version."""
    return importlib.util.find_spec("deep_gemm") is not None


def problem(w_gate_up: Tensor, w_down: Tensor) -> Exception | None:
    """Why DeepGEMM cannot take these weights on their GPU, or None."""
    if not is_installed():
        return ImportError("DeepGEMM is not installed: `pip install epmoe[deep_gemm]`")
    fp8, (major, _) = w_down.dtype == FP8, torch.cuda.get_device_capability(w_down.device)
    if w_down.dtype not in (FP8, torch.bfloat16):
        return ValueError(f"DeepGEMM takes weights in bfloat16 or float8_e4m3fn, got {w_down.dtype}")
    if major != 9:  # fp8 on later GPUs rounds the scales to powers of two; bf16 there is not measured
        return ValueError(f"DeepGEMM takes these weights on GPUs of compute capability 9, got {major}")
    sizes, step = (*w_gate_up.shape[1:], *w_down.shape[1:]), SCALE_BLOCK if fp8 else _STEP
    if any(size % step for size in sizes):
        return ValueError(f"DeepGEMM takes {'fp8' if fp8 else 'bf16'} weights of multiples of {step}, got {sizes}")
    if not (w_gate_up.is_contiguous() and w_down.is_contiguous()):
        return ValueError("DeepGEMM takes contiguous weights")
    return _problem_with_version(fp8, w_down.get_device())


@functools.cache
def _problem_with_version(fp8: bool, device: int) -> Exception | None:
    """Whether the installed version works with this torch: a tiny product is right."""
    e, n, rows = 2, 256, 2 * BLOCKS[0]
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((rows, n), (e, n, n)))
    wanted = torch.cat([part @ expert.T for part, expert in zip(x.split(BLOCKS[0]), w, strict=True)])
    dtype, place = FP8 if fp8 else torch.bfloat16, torch.device("cuda", device)
    ends = torch.tensor([BLOCKS[0], rows], dtype=torch.int32, device=place)
    scales = (torch.ones(2, rows, device=place).t(), torch.ones(e, 2, 2, device=place)) if fp8 else (None, None)
    try:
        with torch.inference_mode(), torch.cuda.device(place):
            got = multiply(x.to(place, dtype), scales[0], w.to(place, dtype), scales[1], ends, BLOCKS[0])
            error = None if torch.equal(got.float().cpu(), wanted) else "a tiny product is wrong"
    except Exception as reason:  # of a library that may be of any version
        error = f"{type(reason).__name__}: {reason}"
    if error is None:
        return None
    return ImportError(
        f"the installed DeepGEMM does not work with torch {torch.__version__} ({error}): torch 2.11 takes "
        "sgl-deep-gemm 0.1.5; with later versions of torch try the newest"
    )


@contextmanager
def _block(library: ModuleType, rows: int) -> Iterator[None]:
    """Within it DeepGEMM's blocks have so many rows; other users of the library keep what they have set."""
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
