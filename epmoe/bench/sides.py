"""What a benchmark compares: ways to bring rows to their experts and back. Each is a `Side`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.sample import Sample
from epmoe.exchange.handles import Dispatched
from epmoe.local.finalize import finalize
from epmoe.local.permute import Permuted, permute
from epmoe.local.quantize import dequantize_rows
from epmoe.service import ExpertParallel


class Side:
    """`out` takes rows to their experts, `back` brings their outputs home. Both are collective.

    name: for messages. captured: whether a CUDA graph can hold a round. exact: whether all rounds give the same bits.
    """

    name: str
    captured = True
    exact = True

    def out(self) -> Any:
        """Start a round and return the handle for `back`."""
        raise NotImplementedError

    def back(self, handle: Any) -> Tensor:
        """End the round and return what came back to this rank."""
        raise NotImplementedError

    def arrived(self, handle: Any) -> list[Tensor]:
        """The contiguous tensors that `out` filled."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise RuntimeError unless a round moves every row."""
        raise NotImplementedError


class Layer(Side):
    """A side that delivers expert-major rows and takes back expert outputs, which are computed before the timing."""

    fp8 = False

    def __init__(self, name: str, sample: Sample) -> None:
        self.name, self.sample = name, sample
        self.check()

    def rows(self, handle: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """Expert-major rows, their fp8 scales or None, and the experts' offsets."""
        raise NotImplementedError

    def arrived(self, handle: Any) -> list[Tensor]:
        rows, scales, _ = self.rows(handle)
        return [t[: len(self.outputs_ND)] for t in (rows, scales) if t is not None]

    def check(self) -> None:
        """Run two rounds with experts. After the first, arrived rows become NaN; the second must write each again."""
        for _ in range(2):
            handle = self.out()
            self.outputs_ND = self.sample.experts(*self.rows(handle))
            poison(self.arrived(handle))
            self.sample.check(self.name, self.back(handle), self.fp8)


class Fused(Layer):
    """Ours: dispatch to expert-major rows, combine from expert-major outputs."""

    def __init__(
        self, ep: ExpertParallel, sample: Sample, name: str = "epmoe", padded_tokens: int | None = None
    ) -> None:
        self.ep, self.fp8, self.padded_tokens = ep, _uses_fp8(ep), padded_tokens
        super().__init__(name, sample)

    def out(self) -> Dispatched:
        sample = self.sample
        return self.ep.dispatch(sample.x_TD, sample.ids_TK, sample.weights_TK, padded_tokens=self.padded_tokens)

    def back(self, handle: Dispatched) -> Tensor:
        return self.ep.combine(self.outputs_ND, handle)

    def rows(self, handle: Dispatched) -> tuple[Tensor, Tensor | None, Tensor]:
        return handle.rows, handle.scales, handle.expert_offsets


class Apart(Layer):
    """Ours, stage by stage: rank-major dispatch, permute, finalize, combine of partial rows. fp8 scales are permuted
    like rows."""

    def __init__(self, ep: ExpertParallel, sample: Sample, name: str = "epmoe, stages apart") -> None:
        self.ep, self.fp8 = ep, _uses_fp8(ep)
        self.expert_map_P = ep.placement.expert_map(ep.rank).to(ep.device)
        super().__init__(name, sample)

    def out(self) -> tuple[Dispatched, Permuted, Permuted | None]:
        sample = self.sample
        d = self.ep.dispatch(sample.x_TD, sample.ids_TK, sample.weights_TK, layout="rank")
        scales = d.recv.scales
        return d, self._permuted(d, d.recv.x), None if scales is None else self._permuted(d, scales)

    def back(self, handle: tuple[Dispatched, Permuted, Permuted | None]) -> Tensor:
        d, permuted, _ = handle
        partial_SD = finalize(self.outputs_ND, permuted, d.recv.weights.flatten(0, 1))
        return self.ep.combine_partial(partial_SD.view(*d.recv.weights.shape[:2], -1), d)

    def rows(self, handle: tuple[Dispatched, Permuted, Permuted | None]) -> tuple[Tensor, Tensor | None, Tensor]:
        _, permuted, scales = handle
        return permuted.rows, scales.rows if scales else None, permuted.expert_offsets

    def arrived(self, handle: tuple[Dispatched, Permuted, Permuted | None]) -> list[Tensor]:
        return [*super().arrived(handle), *slabs(self.sample, handle[0].recv.x)]

    def _permuted(self, d: Dispatched, x_RMD: Tensor) -> Permuted:
        capacity = self.ep.config.capacity
        return permute(
            x_RMD.flatten(0, 1),
            d.recv.ids.flatten(0, 1),
            self.expert_map_P,
            self.ep.num_local_experts,
            counts_R=d.recv.counts,
            alignment=capacity.alignment,
            max_rows=capacity.max_expert_rows,
        )


class Echo(Side):
    """A side whose experts return their rows, once for each rank that got a row; all before the timing.

    weighted: instead each expert does, and combine applies the weights.
    """

    fp8 = False
    weighted = False

    def __init__(self, name: str, sample: Sample) -> None:
        self.name, self.sample = name, sample

    def outputs(self, handle: Any) -> Tensor:
        """What the experts put out, in memory of its own."""
        raise NotImplementedError

    def check(self) -> None:
        """As `Layer.check`."""
        for _ in range(2):
            handle = self.out()
            self.echoed = self.outputs(handle)
            poison(self.arrived(handle))
            self.sample.check_echo(self.name, self.back(handle), fp8=self.fp8, weighted=self.weighted)


class RankMajor(Echo):
    """Ours, the exchange alone: rank-major rows out, and as many partial rows back."""

    def __init__(self, ep: ExpertParallel, sample: Sample, name: str = "epmoe, rank-major") -> None:
        super().__init__(name, sample)
        self.ep, self.fp8 = ep, _uses_fp8(ep)
        self.check()

    def out(self) -> Dispatched:
        return self.ep.dispatch(self.sample.x_TD, self.sample.ids_TK, self.sample.weights_TK, layout="rank")

    def back(self, handle: Dispatched) -> Tensor:
        return self.ep.combine_partial(self.echoed, handle)

    def arrived(self, handle: Dispatched) -> list[Tensor]:
        buffers = [handle.recv.x, handle.recv.scales]
        return [slab for buffer in buffers if buffer is not None for slab in slabs(self.sample, buffer)]

    def outputs(self, handle: Dispatched) -> Tensor:
        x, scales = handle.recv.x, handle.recv.scales
        if scales is None:
            return x.clone()
        return dequantize_rows(x.flatten(0, 1), scales.flatten(0, 1), handle.dtype).view(x.shape)


def slabs(sample: Sample, buffer_RMX: Tensor) -> list[Tensor]:
    """The rows that arrived, by source."""
    counts_R = sample.rows_RR[:, sample.rank].tolist()
    return [slab[:count] for slab, count in zip(buffer_RMX, counts_R, strict=True)]


class Rows(Side):
    """`all_to_all_single` of the rows that cross to other ranks, both ways. Nothing is sorted, counted or summed."""

    def __init__(self, sample: Sample, group: dist.ProcessGroup, name: str = "all_to_all_single, rows only") -> None:
        self.name, self.group = name, group
        self.splits_out, self.splits_in = remote_splits(sample)
        length = (sum(self.splits_out), sample.hidden)
        device = sample.x_TD.device
        self.sent = torch.randn(length, device=device).to(sample.dtype)
        self.home = torch.empty_like(self.sent)
        self.received = self.sent.new_empty(sum(self.splits_in), sample.hidden)
        self.check()

    def out(self) -> Any:
        dist.all_to_all_single(self.received, self.sent, self.splits_in, self.splits_out, group=self.group)

    def back(self, handle: Any) -> Tensor:
        dist.all_to_all_single(self.home, self.received, self.splits_out, self.splits_in, group=self.group)
        return self.home

    def arrived(self, handle: Any) -> list[Tensor]:
        return [self.received]

    def check(self) -> None:
        poison([self.received, self.home])
        if not torch.equal(self.back(self.out()), self.sent):
            raise RuntimeError(f"{self.name}: the rows that came back differ from the rows that left")


def remote_splits(sample: Sample) -> tuple[list[int], list[int]]:
    """Rows to each rank and rows from each rank, with 0 for this rank itself."""
    out_R, in_R = sample.rows_RR[sample.rank].clone(), sample.rows_RR[:, sample.rank].clone()
    out_R[sample.rank] = in_R[sample.rank] = 0
    return out_R.tolist(), in_R.tolist()


def poison(tensors: Iterable[Tensor]) -> None:
    """Set all bits: NaN in every floating type, fp8 included."""
    for tensor in tensors:
        if tensor.numel():
            tensor.view(torch.uint8).fill_(0xFF)


def _uses_fp8(ep: ExpertParallel) -> bool:
    return "fp8" in (ep.config.exchange.payload, ep.config.exchange.combine_payload)
