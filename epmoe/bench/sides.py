"""What a benchmark compares: ways to bring rows to their experts and back. Each is a `Side`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.sample import Sample
from epmoe.exchange.handles import Dispatched
from epmoe.local.quantize import dequantize_rows
from epmoe.service import ExpertParallel


class Side:
    """`out` takes rows to their experts, `back` brings their outputs home. Both are collective.

    name: for messages. exact: whether all rounds give the same bits.
    """

    name: str
    exact = True

    def out(self) -> Any:
        """Start a round and return the handle for `back`."""
        raise NotImplementedError

    def back(self, handle: Any, /) -> Tensor:
        """End the round and return what came back to this rank."""
        return handle

    def arrived(self, handle: Any, /) -> list[Tensor]:
        """The contiguous tensors that `out` filled."""
        return []


class Exchange(Side):
    """A side that takes back what the experts put out for the rows of a sample, computed before the timing.

    expects: the y of these experts. They return their rows once for each rank that got a row ("echo") or once for each
    expert, whose weights combine applies ("weights"); or they multiply them by the sample's factors ("sum").
    """

    fp8 = False
    expects: Literal["echo", "weights", "sum"] = "echo"

    def __init__(self, name: str, sample: Sample) -> None:
        self.name, self.sample = name, sample

    def outputs(self, handle: Any) -> Tensor:
        """What the experts put out, in memory of its own."""
        raise NotImplementedError

    def check(self) -> None:
        """Run two rounds with experts. After the first, arrived rows become NaN; the second must write each again.

        Raises RuntimeError unless y is right in both.
        """
        for _ in range(2):
            handle = self.out()
            self.given = self.outputs(handle)
            poison(self.arrived(handle))
            self.sample.check(self.name, self.back(handle), self.expects, fp8=self.fp8)


class Layer(Exchange):
    """A side that delivers expert-major rows."""

    expects = "sum"

    def rows(self, handle: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """Expert-major rows, their fp8 scales or None, and the experts' offsets."""
        raise NotImplementedError

    def outputs(self, handle: Any) -> Tensor:
        return self.sample.experts(*self.rows(handle))

    def arrived(self, handle: Any) -> list[Tensor]:
        rows, scales, _ = self.rows(handle)
        return [t[: len(self.given)] for t in (rows, scales) if t is not None]


class Fused(Layer):
    """Ours: dispatch to expert-major rows, combine from expert-major outputs."""

    def __init__(
        self, ep: ExpertParallel, sample: Sample, name: str = "epmoe", padded_tokens: int | None = None
    ) -> None:
        super().__init__(name, sample)
        self.ep, self.fp8, self.padded_tokens = ep, _uses_fp8(ep), padded_tokens
        self.tag = int(ep.config.placement.live)
        self.check()

    def out(self) -> Dispatched:
        sample = self.sample
        return self.ep.dispatch(
            sample.x_TD, sample.ids_TK, sample.weights_TK, padded_tokens=self.padded_tokens, tag=self.tag
        )

    def back(self, handle: Dispatched) -> Tensor:
        return self.ep.combine(self.given, handle)

    def rows(self, handle: Dispatched) -> tuple[Tensor, Tensor | None, Tensor]:
        return handle.rows, handle.scales, handle.expert_offsets


class RankMajor(Exchange):
    """Ours, the exchange alone: rank-major rows out, and as many partial rows back."""

    def __init__(self, ep: ExpertParallel, sample: Sample) -> None:
        super().__init__("epmoe, rank-major", sample)
        self.ep, self.fp8, self.tag = ep, _uses_fp8(ep), int(ep.config.placement.live)
        self.check()

    def out(self) -> Dispatched:
        return self.ep.dispatch(
            self.sample.x_TD, self.sample.ids_TK, self.sample.weights_TK, layout="rank", tag=self.tag
        )

    def back(self, handle: Dispatched) -> Tensor:
        return self.ep.combine_partial(self.given, handle)

    def outputs(self, handle: Dispatched) -> Tensor:
        x, scales = handle.recv.x, handle.recv.scales
        if scales is None:
            return x.clone()
        return dequantize_rows(x.flatten(0, 1), scales.flatten(0, 1), handle.dtype).view(x.shape)

    def arrived(self, handle: Dispatched) -> list[Tensor]:
        buffers = [handle.recv.x, handle.recv.scales]
        return [slab for buffer in buffers if buffer is not None for slab in slabs(self.sample, buffer)]


def slabs(sample: Sample, buffer_RMX: Tensor) -> list[Tensor]:
    """The rows that arrived, by source."""
    counts_R = sample.rows_RR[:, sample.rank].tolist()
    return [slab[:count] for slab, count in zip(buffer_RMX, counts_R, strict=True)]


class Rows(Side):
    """`all_to_all_single` of the rows that cross to other ranks, both ways. Nothing is sorted, counted or summed."""

    def __init__(self, sample: Sample, group: dist.ProcessGroup) -> None:
        self.name, self.group = "all_to_all_single, rows only", group
        remote_RR = sample.rows_RR - sample.rows_RR.diag().diag()
        self.splits_out, self.splits_in = remote_RR[sample.rank].tolist(), remote_RR[:, sample.rank].tolist()
        self.sent = torch.randn(sum(self.splits_out), sample.hidden, device=sample.x_TD.device).to(sample.dtype)
        self.home = torch.empty_like(self.sent)
        self.received = self.sent.new_empty(sum(self.splits_in), sample.hidden)
        poison([self.received, self.home])
        if not torch.equal(self.back(self.out()), self.sent):
            raise RuntimeError(f"{self.name}: the rows that came back differ from the rows that left")

    def out(self) -> Any:
        dist.all_to_all_single(self.received, self.sent, self.splits_in, self.splits_out, group=self.group)

    def back(self, handle: Any) -> Tensor:
        dist.all_to_all_single(self.home, self.received, self.splits_out, self.splits_in, group=self.group)
        return self.home

    def arrived(self, handle: Any) -> list[Tensor]:
        return [self.received]


def poison(tensors: Iterable[Tensor]) -> None:
    """Set all bits: NaN in every floating type, fp8 included."""
    for tensor in tensors:
        if tensor.numel():
            tensor.view(torch.uint8).fill_(0xFF)


def _uses_fp8(ep: ExpertParallel) -> bool:
    return "fp8" in (ep.config.exchange.payload, ep.config.exchange.combine_payload)
