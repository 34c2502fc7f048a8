"""A GEMM on CPUs in which the bits of a row of the product depend on this row only.

Libraries choose the order of their sums by the shape of a product. Here all products have the same
shape: the rows are divided into blocks of `ROWS` rows. The last block is filled up with other rows,
whose products are not used.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from epmoe.local.gemm.loop import Loop
from epmoe.local.weight_formats import plain_shape, product_dtype

ROWS = 16
"""The rows of a block. With smaller blocks the weights are read more often. With larger blocks more
is computed in vain for an expert that has a single row.
"""
# How many random rows `place_matters` tries.
_DRAWS = 4


class Blocks(Loop):
    """A GEMM on CPUs that multiplies blocks of one shape, expert by expert."""

    name = "blocks"
    batch_invariant = True

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """See `Gemm.problem_with`."""
        # On GPUs the library's order of sums depends on more than the shape. In fp64 the activation
        # has other bits at the end of a row, where a vector of the CPU is not full.
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
    """Multiply block by block: rows [N, k] · weights [n, k]ᵀ → out [N, n]."""
    # Each block of rows is copied into one buffer, and its products are copied out of another one.
    # In the last block, rows of the block before it follow its own rows.
    block = rows.new_zeros(ROWS, rows.shape[1])
    product = out.new_empty(ROWS, out.shape[1])
    for rows_of_block, out_of_block in zip(rows.split(ROWS), out.split(ROWS), strict=True):
        block[: len(rows_of_block)] = rows_of_block
        torch.mm(block, weights.T, out=product)
        out_of_block.copy_(product[: len(out_of_block)])


@functools.cache
def place_matters(dtype: torch.dtype, n: int, k: int) -> ValueError | None:
    """Check whether the bits of a row's product depend on the row's place in a block.

    Returns None if they do not, and otherwise an error that names the product. It looks at two
    products: a row [k] times weights [n, k]ᵀ, and a row of gradients [n] times weights [n, k]. No
    library documents that the place has no effect. So the function multiplies blocks of equal rows,
    and compares the bits of their products.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(n, k, generator=generator, device="cpu").to(dtype)
    # Try the product, then the product of the gradient.
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
