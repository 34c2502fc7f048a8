"""Our grouped GEMMs of Hopper: which weights take them, and on GPUs what they compute, with NaN
behind the rows.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from expert_inputs import random_mxfp4
from helpers import ON_GPUS, assert_close, captured, poisoned_memory, randn
from torch import Tensor

from epmoe import GroupedExperts
from epmoe.local.gemm.gemm import plain_weights
from epmoe.local.gemm.gradients import choose_trained, train_gemm, train_gemm_weights
from epmoe.local.gemm.hopper import Hopper

BF16 = torch.bfloat16
BEHIND = 9  # rows behind the last segment
COUNTS = [
    [64],
    [3, 0, 13],
    [1, 0, 17, 33, 64, 285, 0],
    [0, 0, 700],  # more than two tiles
    [256, 257, 15, 512, 16],
]
SIZES = [(128, 64), (40, 72), (136, 520), (264, 1032)]  # n and k


@pytest.fixture
def hopper(device) -> torch.device:
    """A GPU that has the kernels."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("no Hopper")
    return device


class Case:
    """Rows and gradients of segments, and weights, with the products in fp64."""

    def __init__(
        self, counts: list[int], n: int, k: int, device: torch.device, transposed: bool = False
    ) -> None:
        self.offsets = [0, *itertools.accumulate(counts)]
        N = self.offsets[-1]
        self.rows, self.grad = (
            randn(N + BEHIND, size, seed=i, dtype=BF16).to(device) for i, size in enumerate((k, n))
        )
        self.rows[N:] = torch.nan
        self.grad[N:] = torch.nan
        weights = randn(len(counts), n, k, seed=2, dtype=BF16).to(device)
        self.weights = (
            weights.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weights
        )
        self.ends = torch.tensor(self.offsets, dtype=torch.int32, device=device)

    def products(self, gemm: str) -> tuple[Tensor, Tensor, Tensor]:
        """Forward, the gradients of rows, and those of weights."""
        with poisoned_memory():
            return (
                train_gemm(self.rows, self.weights, self.ends, gemm),
                train_gemm(self.grad, self.weights.transpose(1, 2), self.ends, gemm),
                train_gemm_weights(self.grad, self.rows, self.ends, gemm),
            )

    def assert_right(self) -> None:
        forward, backward, by_weights = self.products("hopper")
        for again, first in zip(
            self.products("hopper"), (forward, backward, by_weights), strict=True
        ):
            assert torch.equal(again.view(torch.int16), first.view(torch.int16)), (
                "other bits on another run"
            )
        weights, rows, grad = (t.double() for t in (self.weights, self.rows, self.grad))
        for i, (start, end) in enumerate(itertools.pairwise(self.offsets)):
            assert_close(forward[start:end], rows[start:end] @ weights[i].T)
            assert_close(backward[start:end], grad[start:end] @ weights[i])
            assert_close(by_weights[i], grad[start:end].T @ rows[start:end])
            assert end > start or not by_weights[i].any()
        assert (
            forward[self.offsets[-1] :].isnan().all() and backward[self.offsets[-1] :].isnan().all()
        )


@ON_GPUS
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n, k", SIZES)
@pytest.mark.parametrize("counts", COUNTS)
def test_products(hopper, counts, n, k, transposed):
    Case(counts, n, k, hopper, transposed).assert_right()


class Mxfp4Case(Case):
    """Weights in MXFP4, and the same in bf16."""

    def __init__(
        self,
        counts: list[int],
        n: int,
        k: int,
        device: torch.device,
        scales: tuple[int, int] | None = (-8, 0),
    ) -> None:
        super().__init__(counts, n, k, device)
        codes, exponents = random_mxfp4(len(counts), n, k, seed=5, scales=scales or (0, 0))
        if scales is None:  # all of them, also NaN
            exponents.view(torch.uint8).random_(256, generator=torch.Generator().manual_seed(6))
        self.mxfp4 = codes.to(device), exponents.to(device)
        self.weights = plain_weights(self.mxfp4)

    def product(self, *weights: Tensor | None) -> Tensor:
        with poisoned_memory():
            return Hopper().multiply((self.rows, None), weights, self.ends[1:], alignment=1)

    def assert_has_the_bits_of_bf16(self) -> None:
        product = self.product(*self.mxfp4)
        wanted = self.product(self.weights, None)
        assert torch.equal(product.view(torch.int16), wanted.view(torch.int16))


@ON_GPUS
@pytest.mark.parametrize("scales", [(-8, 0), (-3, 8), None], ids=["small", "also above 2", "all"])
@pytest.mark.parametrize("n, k", [(128, 64), (32, 128), (160, 192), (320, 1088)])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.timeout(60)
def test_weights_in_mxfp4_have_the_bits_of_bf16(hopper, counts, n, k, scales):
    case = Mxfp4Case(counts, n, k, hopper, scales)
    case.assert_has_the_bits_of_bf16()
    if scales is not None:
        for i, (start, end) in enumerate(itertools.pairwise(case.offsets)):
            rows = case.product(*case.mxfp4)[start:end]
            assert_close(rows, case.rows[start:end].double() @ case.weights[i].double().T)


@ON_GPUS
@pytest.mark.timeout(60)
def test_more_tiles_in_mxfp4_than_multiprocessors(hopper):
    """As in gpt-oss-120b, and as many experts as the kernel takes."""
    Mxfp4Case(
        [0, 250, 270, 16, 600, 1, 64, 0, 33], 2880, 2880, hopper
    ).assert_has_the_bits_of_bf16()
    Mxfp4Case([i % 3 for i in range(512)], 192, 128, hopper).assert_has_the_bits_of_bf16()
    Mxfp4Case([0] * 100 + [300] + [0] * 20, 128, 64, hopper).assert_has_the_bits_of_bf16()
    Mxfp4Case([0, 0], 128, 64, hopper).assert_has_the_bits_of_bf16()


@ON_GPUS
def test_mxfp4_captured_with_other_segments(hopper):
    case, other = (
        Mxfp4Case(counts, 256, 128, hopper) for counts in ([70, 0, 300, 30], [0, 390, 1, 9])
    )
    replay, got = captured(lambda: case.product(*case.mxfp4))
    case.rows.copy_(other.rows)
    case.ends.copy_(other.ends)
    replay()
    assert torch.equal(got.view(torch.int16), other.product(*case.mxfp4).view(torch.int16))


@ON_GPUS
def test_drawn_segments(hopper):
    """As many experts as the kernels take, and rows of one expert only."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        n, k = (8 * int(torch.randint(1, 80, (), generator=generator)) for _ in range(2))
        counts = torch.randint(
            -60, 300, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator
        )
        Case(counts.clamp(min=0).tolist(), n, k, hopper).assert_right()
    Case([i % 3 for i in range(512)], 64, 64, hopper).assert_right()
    Case([0] * 100 + [300], 64, 64, hopper).assert_right()


@ON_GPUS
def test_captured_with_other_segments(hopper):
    """Segments are on the device, and another replay has others."""
    case, other = (Case(counts, 256, 128, hopper) for counts in ([70, 0, 300, 30], [0, 390, 1, 9]))
    replay, got = captured(lambda: case.products("hopper"))
    for mine, theirs in (
        (case.rows, other.rows),
        (case.grad, other.grad),
        (case.weights, other.weights),
    ):
        mine.copy_(theirs)
    case.ends.copy_(other.ends)
    replay()
    for mine, theirs in zip(got, other.products("hopper"), strict=True):
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))


@ON_GPUS
def test_rows_that_start_anywhere(hopper):
    """A view of other memory is copied where TMA could not read it."""
    case = Case([3, 0, 13], 64, 72, hopper)
    flat = torch.empty(case.rows.numel() + 1, dtype=BF16, device=hopper)
    moved = flat[1:].view_as(case.rows).copy_(case.rows)
    assert torch.equal(
        train_gemm(moved, case.weights, case.ends, "hopper")[:16],
        train_gemm(case.rows, case.weights, case.ends, "hopper")[:16],
    )


@ON_GPUS
def test_it_trains_and_serves_with_the_same_bits(hopper):
    gate_up = randn(4, 512, 128, dtype=BF16).to(hopper) / 12
    down = randn(4, 128, 256, dtype=BF16).to(hopper) / 16
    offsets = torch.tensor([0, 5, 5, 80, 400], dtype=torch.int32, device=hopper)
    rows = randn(400, 128, seed=1, dtype=BF16).to(hopper)
    results = []
    for gemm in ("auto", "hopper", "torch"):
        experts = GroupedExperts(gate_up.clone(), down.clone(), gemm=gemm)
        assert experts._stage.trained == ("torch" if gemm == "torch" else "hopper")
        x = rows.clone().requires_grad_()
        out = experts(x, offsets)
        out.float().square().sum().backward()
        with torch.no_grad():
            assert torch.equal(experts(rows, offsets), out), gemm
        results.append([out.detach(), x.grad, *(p.grad for p in experts.parameters())])
    for first, second, torchs in zip(*results, strict=True):
        assert torch.equal(first, second)
        assert_close(first, torchs.double(), slack=4)


def test_cpus_train_by_torchs():
    weights = torch.empty(4, 16, 24, dtype=BF16), torch.empty(4, 24, 8, dtype=BF16)
    assert choose_trained("auto", *weights) == "torch"
