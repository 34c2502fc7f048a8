"""What the benchmarks time: ways to bring rows to their experts and back. Each is a `Side`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from epmoe.bench.sample import Sample
from epmoe.exchange.handles import Dispatched, Layout
from epmoe.local.quantize import dequantize_rows
from epmoe.service import ExpertParallel


class Side:
    """Something to time. `out` takes rows to their experts, `back` brings their outputs home. Both
    are collective.
    """

    name: str
    """for messages"""
    exact = True
    """whether all rounds give the same bits"""
    head_start_ms = 1
    """how long a GPU sleeps before a sample, while the host enqueues a round and the sample"""

    def out(self) -> Any:
        """Start a round and return the handle for `back`."""
        raise NotImplementedError

    def back(self, handle: Any, /) -> Any:
        """End the round and return what came back to this rank: a contiguous tensor, or several."""
        return handle

    def arrived(self, handle: Any, /) -> list[Tensor]:
        """The contiguous tensors that `out` filled."""
        return []


@dataclass(frozen=True)
class Calls(Side):
    """A side of functions."""

    name: str
    out: Callable[[], Any]
    back: Callable[[Any], Any] = lambda handle: handle
    arrived: Callable[[Any], list[Tensor]] = lambda handle: []
    exact: bool = True
    head_start_ms: int = 1


class ExchangeSide(Side):
    """A side that sends back precomputed outputs of experts for the rows of a sample.

    expects: the y of these experts. They return their rows once for each rank that got a row
    ("echo") or once for each expert, whose weights combine applies ("weights"); or they multiply
    them by the sample's factors ("sum").
    """

    fp8 = False
    expects: Literal["echo", "weights", "sum"] = "echo"

    def __init__(self, name: str, sample: Sample) -> None:
        self.name = name
        self.sample = sample

    def outputs(self, handle: Any) -> Tensor:
        """What the experts put out, in memory of its own."""
        raise NotImplementedError

    def check(self) -> None:
        """Run two rounds with experts. After the first, arrived rows become NaN; the second must
        write each again.

        Raises RuntimeError unless y is right in both.
        """
        for _ in range(2):
            handle = self.out()
            self.expert_outputs = self.outputs(handle)
            poison(self.arrived(handle))
            self.check_output(self.back(handle))

    def check_output(self, y_TD: Tensor) -> None:
        self.sample.check(self.name, y_TD, self.expects, fp8=self.fp8)


class Ours(ExchangeSide):
    """A round of `ExpertParallel`."""

    layout: Layout

    def __init__(self, ep: ExpertParallel, sample: Sample, name: str = "epmoe") -> None:
        super().__init__(name, sample)
        self.ep = ep
        self.fp8 = ep.config.exchange.quantizes
        self.tag = int(ep.config.placement.live)
        self.check()

    def out(self) -> Dispatched:
        sample = self.sample
        return self.ep.dispatch(
            sample.x_TD, sample.ids_TK, sample.weights_TK, layout=self.layout, tag=self.tag
        )


class Fused(Ours):
    """Dispatch to expert-major rows, and combine from expert-major outputs."""

    layout = "expert"
    expects = "sum"

    def back(self, handle: Dispatched) -> Tensor:
        return self.ep.combine(self.expert_outputs, handle)

    def outputs(self, handle: Dispatched) -> Tensor:
        return self.sample.experts(handle.rows, handle.scales, handle.expert_offsets)

    def arrived(self, handle: Dispatched) -> list[Tensor]:
        count = len(self.expert_outputs)
        arrived = [handle.rows[:count]]
        if handle.scales is not None:
            arrived.append(handle.scales[:count])
        return arrived


class RankMajor(Ours):
    """The exchange alone: rank-major rows out, and as many partial rows back."""

    layout = "rank"

    def back(self, handle: Dispatched) -> Tensor:
        return self.ep.combine_partial(self.expert_outputs, handle)

    def outputs(self, handle: Dispatched) -> Tensor:
        x = handle.recv.x
        scales = handle.recv.scales
        if scales is None:
            return x.clone()
        return dequantize_rows(x.flatten(0, 1), scales.flatten(0, 1), handle.dtype).view(x.shape)

    def arrived(self, handle: Dispatched) -> list[Tensor]:
        arrived = slabs(self.sample, handle.recv.x)
        if handle.recv.scales is not None:
            arrived += slabs(self.sample, handle.recv.scales)
        return arrived


def rows_alone(sample: Sample, group: dist.ProcessGroup) -> Side:
    """Make the side that moves only the rows that cross to other ranks, by `all_to_all_single` both
    ways. It sorts, counts and sums nothing.
    """
    # Rows to and from each other rank; those of this rank stay.
    splits_out = sample.remote_RR[sample.rank].tolist()
    splits_in = sample.remote_RR[:, sample.rank].tolist()
    sent = torch.randn(sum(splits_out), sample.hidden, device=sample.x_TD.device).to(sample.dtype)
    home = torch.empty_like(sent)
    received = sent.new_empty(sum(splits_in), sample.hidden)

    def out() -> None:
        dist.all_to_all_single(received, sent, splits_in, splits_out, group=group)

    def back(_: Any) -> Tensor:
        dist.all_to_all_single(home, received, splits_out, splits_in, group=group)
        return home

    side = Calls("all_to_all_single, rows only", out, back, lambda _: [received])
    # Rows that arrive must come from this round.
    poison([received, home])
    out()
    if not torch.equal(back(None), sent):
        raise RuntimeError(f"{side.name}: the rows that came back differ from the rows that left")
    return side


@dataclass(frozen=True)
class SentPairs:
    """The expert-major rows [N, D] of `AllToAll`, and all that `back` needs to send their outputs
    back.
    """

    rows: Tensor
    expert_offsets: Tensor
    """[e + 1], the first row of each local expert"""
    order: Tensor
    """[T·K], the pair of each row that left"""
    arrival: Tensor
    """[N], for each expert-major row its index among the arrived rows"""
    splits_out: list[int]
    """[R] rows to each rank"""
    splits_in: list[int]
    """[R] rows from each rank"""


class AllToAll(ExchangeSide):
    """Dispatch and combine as layers usually write them, over `all_to_all_single`. The host reads
    the counts.

    One row travels for each (token, expert) pair. Dispatch sorts pairs by expert, exchanges counts,
    exchanges rows and puts the arrived rows into expert order. Combine exchanges rows, undoes the
    sort and sums with the weights.

    By default every call allocates its buffers, as such layers do because sizes change with the
    routing, and x and the weights may want gradients. With `keep_buffers` each buffer stays at the
    largest size seen. No page fault is left then: the best case of this method.
    """

    expects = "sum"

    def __init__(
        self, sample: Sample, group: dist.ProcessGroup, name: str, *, keep_buffers: bool = False
    ) -> None:
        super().__init__(name, sample)
        self.group = group
        self.keep_buffers = keep_buffers
        placement = sample.placement
        ranks = range(placement.ep_size)
        self.experts_per_rank = [placement.num_local_experts(rank) for rank in ranks]
        # Where pairs are sorted, those of a rank lie together.
        owner_major: list[int] = []
        for rank in ranks:
            owner_major += placement.local_experts(rank)
        self.position_P = torch.tensor(owner_major).argsort().to(sample.x_TD.device)
        self._buffers: dict[str, Tensor] = {}
        self.check()

    def out(self) -> SentPairs:
        return self.sent(self.sample.x_TD, self.sample.ids_TK)

    def back(self, handle: SentPairs) -> Tensor:
        return self.summed(self.expert_outputs, self.sample.weights_TK, handle)

    def sent(self, x_TD: Tensor, ids_TK: Tensor) -> SentPairs:
        """Put rows into the order of the local experts; within an expert by source rank, then
        token.
        """
        # Sort the pairs by owner and expert, and exchange how many there are.
        positions = self.position_P[ids_TK.flatten()]
        order = positions.argsort(stable=True)
        counts_P = positions.bincount(minlength=len(self.position_P))
        local = self.experts_per_rank[self.sample.rank]
        counts_Re = torch.empty(
            len(self.experts_per_rank), local, dtype=torch.int64, device=x_TD.device
        )
        dist.all_to_all_single(
            counts_Re.view(-1),
            counts_P,
            [local] * len(counts_Re),
            self.experts_per_rank,
            group=self.group,
        )
        splits_out = [int(counts.sum()) for counts in counts_P.cpu().split(self.experts_per_rank)]
        splits_in = counts_Re.sum(dim=1).tolist()
        # Exchange a row for each pair.
        out = self._gathered("out", x_TD, order // ids_TK.shape[1])
        room = self._rows("arrived", sum(splits_in), x_TD)
        arrived = self._exchanged(room, out, splits_in, splits_out)
        # Put them into the order of experts: they lie by source first.
        experts_Re = torch.arange(local, device=x_TD.device).repeat(len(counts_Re))
        expert_N = experts_Re.repeat_interleave(counts_Re.view(-1))
        arrival = expert_N.argsort(stable=True)
        rows = self._gathered("rows", arrived, arrival)
        offsets = torch.nn.functional.pad(counts_Re.sum(dim=0).cumsum(dim=0), (1, 0))
        return SentPairs(rows, offsets, order, arrival, splits_out, splits_in)

    def summed(self, rows_ND: Tensor, weights_TK: Tensor, handle: SentPairs) -> Tensor:
        """[T, D], the weighted sums of the experts' outputs [N, D]."""
        T, K = weights_TK.shape
        # Sort rows by source again, and send them home.
        back = self._rows("arrived", len(rows_ND), rows_ND).index_copy_(0, handle.arrival, rows_ND)
        room = self._rows("out", T * K, rows_ND)
        home = self._exchanged(room, back, handle.splits_out, handle.splits_in)
        # Pairs of a token lie together, and are added.
        pairs = self._rows("pairs", T * K, rows_ND).index_copy_(0, handle.order, home)
        weights_T1K = weights_TK.unsqueeze(1).to(rows_ND.dtype)
        return torch.bmm(weights_T1K, pairs.view(T, K, rows_ND.shape[1])).squeeze(1)

    def outputs(self, handle: SentPairs) -> Tensor:
        return self.sample.experts(handle.rows, None, handle.expert_offsets)

    def arrived(self, handle: SentPairs) -> list[Tensor]:
        return [handle.rows]

    def _exchanged(
        self, received: Tensor, rows: Tensor, splits_in: list[int], splits_out: list[int]
    ) -> Tensor:
        """`received`, filled with the rows of other ranks."""
        if rows.requires_grad:
            return all_to_all_single(received, rows, splits_in, splits_out, group=self.group)
        dist.all_to_all_single(received, rows, splits_in, splits_out, group=self.group)
        return received

    def _gathered(self, name: str, rows: Tensor, index: Tensor) -> Tensor:
        kept = self._rows(name, len(index), rows) if self.keep_buffers else None
        return torch.index_select(rows, 0, index, out=kept)

    def _rows(self, name: str, count: int, like: Tensor) -> Tensor:
        """A buffer of so many rows, as long as `like` has them."""
        if not self.keep_buffers:
            return like.new_empty(count, like.shape[1])
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < count:
            buffer = self._buffers[name] = like.new_empty(count, like.shape[1])
        return buffer[:count]


def slabs(sample: Sample, buffer_RMX: Tensor) -> list[Tensor]:
    """The used slots of each source."""
    counts_R = sample.rows_RR[:, sample.rank].tolist()
    return [slab[:count] for slab, count in zip(buffer_RMX, counts_R, strict=True)]


def poison(tensors: Iterable[Tensor]) -> None:
    """Set all bits: NaN in every floating type, fp8 included."""
    for tensor in tensors:
        if tensor.numel():
            tensor.view(torch.uint8).fill_(0xFF)
