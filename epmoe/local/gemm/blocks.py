"""Products on CPUs in which the bits of a row depend on the row only.

Libraries choose the order of a sum by the shape of the product. Here they see one shape: blocks of
`ROWS` rows. The last block is filled up with rows whose products nobody reads.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from epmoe.local.gemm.loop import Loop
from epmoe.local.weight_formats import plain_shape, product_dtype

ROWS = 16
"""Of a block. Fewer rows read the weights more often, more rows compute more for an expert with one
row.
"""
_DRAWS = 4  # rows by which `place_matters` finds out


class Blocks(Loop):
    """A GEMM that multiplies blocks of one shape, expert by expert, on CPUs. Rows of a block that
    are not needed only cost time.
    """

    name = "blocks"
    batch_invariant = True

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """See `Gemm.problem_with`."""
        # On GPUs a library chooses the order of sums, and in fp64 the length of a vector.
        kind = down.device.type
        if kind not in ("cpu", "meta"):
            return ValueError(
                f"torch's GEMMs on {kind} choose the order of sums by the number of rows"
            )
        if down.dtype == torch.float64:
            return ValueError(
                "torch's activation in float64 has other bits in vectors than in their remainders"
            )
        for weights in (gate_up, down):
            problem = place_matters(product_dtype(weights), *plain_shape(weights)[1:])
            if problem is not None:
                return problem
        return None

    def trains(self, gate_up: Tensor, down: Tensor) -> bool:
        return self.problem_with(gate_up, down) is None

    def _multiply_by(self, expert: Tensor, rows: Tensor, out: Tensor) -> None:
        multiply_blocks(rows, expert, out)


def multiply_blocks(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    """rows [N, k] · weights [n, k]ᵀ → out [N, n], block by block."""
    # One block at a time: rows are copied into it, and their products out of another one.
    block = rows.new_zeros(ROWS, rows.shape[1])
    product = out.new_empty(ROWS, out.shape[1])
    for given, wanted in zip(rows.split(ROWS), out.split(ROWS), strict=True):
        block[: len(given)] = given
        torch.mm(block, weights.T, out=product)
        wanted.copy_(product[: len(wanted)])


@functools.cache
def place_matters(dtype: torch.dtype, n: int, k: int) -> ValueError | None:
    """Check whether the bits of a row's product depend on the row's place in a block. Returns why,
    or None if they do not.

    The products are a row [k] times weights [n, k]ᵀ, and that of its gradient, a row [n] times
    weights [n, k]. It multiplies blocks of equal rows: no library documents the property, so the
    CPU's own is asked.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(n, k, generator=generator, device="cpu").to(dtype)
    # The product, then that of its gradient.
    for factor in (weights.T, weights):
        rows = torch.randn(_DRAWS, 1, len(factor), generator=generator, device="cpu").to(dtype)
        for row in rows:
            product = row.expand(ROWS, -1).contiguous() @ factor
            if not torch.equal(product, product[:1].expand_as(product)):
                shapes = f"[{ROWS}, {len(factor)}] and {list(factor.shape)}"
                return ValueError(
                    f"torch's product of {shapes} in {dtype} has other bits in other rows"
                )
    return None
