"""What the benchmarks compare: different ways to bring rows to their experts and back. Each way is
a `Side`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from epmoe.bench.sample import Sample
from epmoe.exchange.call import Layout
from epmoe.exchange.handles import Dispatched
from epmoe.local.quantize import dequantize_rows
from epmoe.service import ExpertParallel


class Side:
    """Something that a benchmark times.

    A round is a call of `out`, which takes rows to their experts, and a call of `back`, which
    brings the experts' outputs home. Both are collective.
    """

    name: str
    """the name in messages"""
    exact = True
    """whether all rounds give the same bits"""
    head_start_ms = 1
    """how many milliseconds a GPU sleeps before a sample, so that the host can enqueue the sample
    and the round before it
    """

    def out(self) -> Any:
        """Start a round and return the handle for `back`."""
        raise NotImplementedError

    def back(self, handle: Any, /) -> Any:
        """End the round that `out` has started, with the handle that it returned. Returns what came
        back to this rank: a contiguous tensor, or several.
        """
        return handle

    def arrived(self, handle: Any, /) -> list[Tensor]:
        """The contiguous tensors that `out` has filled, which checks overwrite and compare."""
        return []


@dataclass(frozen=True)
class Calls(Side):
    """A side whose methods are given as functions."""

    name: str
    out: Callable[[], Any]
    back: Callable[[Any], Any] = lambda handle: handle
    arrived: Callable[[Any], list[Tensor]] = lambda handle: []
    exact: bool = True
    head_start_ms: int = 1


class ExchangeSide(Side):
    """A side that dispatches the tokens of a sample, and sends back outputs of experts that `check`
    has computed before the timing.

    What the experts do decides the output of a round, and `expects` says what that is. With "sum"
    the experts multiply rows by the factors of the sample. Otherwise they return their rows
    unchanged: with "echo" a row comes back once from each rank that got it, and with "weights" once
    from each expert, and combine applies the weights.
    """

    fp8 = False
    """whether rows travel in fp8, so that errors may be larger"""
    expects: Literal["echo", "weights", "sum"] = "echo"

    def __init__(self, name: str, sample: Sample) -> None:
        self.name = name
        self.sample = sample

    def outputs(self, handle: Any) -> Tensor:
        """Compute the experts' outputs for the rows of an open round, in memory of their own."""
        raise NotImplementedError

    def check(self) -> None:
        """Run two rounds, and raise RuntimeError unless the output of both is right.

        Each round computes the experts' outputs, which later rounds send back again. The rows that
        arrived in the first round become NaN, so the second round must write every row again. A
        rank whose first output is wrong takes part in the second round, where others wait for it.
        """
        wrong: RuntimeError | None = None
        for _ in range(2):
            handle = self.out()
            self.expert_outputs = self.outputs(handle)
            poison(self.arrived(handle))
            y_TD = self.back(handle)
            try:
                self.check_output(y_TD)
            except RuntimeError as error:
                wrong = wrong or error
        if wrong is not None:
            raise wrong

    def check_output(self, y_TD: Tensor) -> None:
        """Raise RuntimeError unless `y_TD` is the right output of a round."""
        self.sample.check(self.name, y_TD, self.expects, fp8=self.fp8)


class Ours(ExchangeSide):
    """A round of `ExpertParallel`."""

    layout: Layout

    def __init__(self, ep: ExpertParallel, sample: Sample, name: str = "epmoe") -> None:
        super().__init__(name, sample)
        self.ep = ep
        self.fp8 = ep.config.exchange.quantizes
        # Where experts move, tags of layers begin with 1.
        self.tag = int(ep.config.placement.live)
        self.check()

    def out(self) -> Dispatched:
        sample = self.sample
        return self.ep.dispatch(
            sample.x_TD, sample.ids_TK, sample.weights_TK, layout=self.layout, tag=self.tag
        )


class Fused(Ours):
    """The usual round: rows arrive sorted by expert, and combine takes outputs in this order."""

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
    """The exchange alone: rows arrive sorted by source rank, and one row comes back for each."""

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
    """Make a side that only moves the rows that go to other ranks, by `all_to_all_single` in both
    directions. It sorts, counts and adds up nothing.
    """
    # How many rows go to each other rank, and come from it. Rows of this rank's experts stay.
    splits_out = sample.remote_RR[sample.rank].tolist()
    splits_in = sample.remote_RR[:, sample.rank].tolist()
    num_rows = sum(splits_out)
    sent = torch.randn(num_rows, sample.hidden, device=sample.x_TD.device).to(sample.dtype)
    home = torch.empty_like(sent)
    received = sent.new_empty(sum(splits_in), sample.hidden)

    def out() -> None:
        dist.all_to_all_single(received, sent, splits_in, splits_out, group=group)

    def back(_: Any) -> Tensor:
        dist.all_to_all_single(home, received, splits_out, splits_in, group=group)
        return home

    side = Calls("all_to_all_single, rows only", out, back, lambda _: [received])
    # Check one round. The buffers are NaN before, so the rows must come from this round.
    poison([received, home])
    out()
    if not torch.equal(back(None), sent):
        raise RuntimeError(f"{side.name}: the rows that came back differ from the rows that left")
    return side


@dataclass(frozen=True)
class SentPairs:
    """The rows that a dispatch of `AllToAll` has brought, and what combine needs to send their
    outputs back.
    """

    rows: Tensor
    """[N, D], sorted by local expert"""
    expert_offsets: Tensor
    """[e + 1], the first row of each of the e local experts, and N"""
    order: Tensor
    """[T·K], for each row that left, the index of its pair of a token and an expert"""
    arrival: Tensor
    """[N], for each row of `rows`, its index in the order of arrival"""
    splits_out: list[int]
    """[R], how many rows went to each rank"""
    splits_in: list[int]
    """[R], how many rows came from each rank"""


class AllToAll(ExchangeSide):
    """Dispatch and combine as MoE layers usually write them, over `all_to_all_single`.

    One row travels for each pair of a token and an expert. Dispatch sorts the pairs by expert,
    exchanges their counts, which the host reads, exchanges the rows, and sorts the arrived rows by
    expert. Combine exchanges the outputs, undoes the sorting, and adds the rows of each token up
    with their weights.

    By default every call allocates its buffers, as such layers do, because the sizes change with
    the routing; then x and the weights may need gradients. With `keep_buffers` each buffer is kept
    and grows to the largest size that was needed, so that no page faults are left. That is the best
    case of this method.
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
        # Pairs are sorted by the rank of their expert first, so that the rows for a rank lie
        # together. `position_P` is the place of each expert in this order.
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
        """Dispatch the tokens x [T, D], whose K experts are ids [T, K].

        The rows arrive sorted by local expert, then by source rank, then by token.
        """
        # Sort the pairs by rank and expert, and exchange how many pairs each expert gets.
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
        # Sort the arrived rows by expert. They lie by source rank, and by expert within a rank.
        experts_Re = torch.arange(local, device=x_TD.device).repeat(len(counts_Re))
        expert_N = experts_Re.repeat_interleave(counts_Re.view(-1))
        arrival = expert_N.argsort(stable=True)
        rows = self._gathered("rows", arrived, arrival)
        offsets = torch.nn.functional.pad(counts_Re.sum(dim=0).cumsum(dim=0), (1, 0))
        return SentPairs(rows, offsets, order, arrival, splits_out, splits_in)

    def summed(self, rows_ND: Tensor, weights_TK: Tensor, handle: SentPairs) -> Tensor:
        """Combine the experts' outputs [N, D] into the weighted sums [T, D]."""
        T, K = weights_TK.shape
        # Put the outputs into the order of arrival again, and send them home.
        back = self._rows("arrived", len(rows_ND), rows_ND).index_copy_(0, handle.arrival, rows_ND)
        room = self._rows("out", T * K, rows_ND)
        home = self._exchanged(room, back, handle.splits_out, handle.splits_in)
        # Undo the first sorting: the K rows of a token lie together, and are added up.
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
        """Send `rows` and fill `received` with the rows of other ranks. Returns a tensor with the
        received rows, which carries the gradient if `rows` need one.
        """
        if rows.requires_grad:
            return all_to_all_single(received, rows, splits_in, splits_out, group=self.group)
        dist.all_to_all_single(received, rows, splits_in, splits_out, group=self.group)
        return received

    def _gathered(self, name: str, rows: Tensor, index: Tensor) -> Tensor:
        """Copy the rows at `index`, into the buffer called `name` if buffers are kept."""
        kept = self._rows(name, len(index), rows) if self.keep_buffers else None
        return torch.index_select(rows, 0, index, out=kept)

    def _rows(self, name: str, count: int, like: Tensor) -> Tensor:
        """Make a buffer of `count` rows, with the row length and dtype of `like`. Kept buffers are
        found by `name`.
        """
        if not self.keep_buffers:
            return like.new_empty(count, like.shape[1])
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < count:
            buffer = self._buffers[name] = like.new_empty(count, like.shape[1])
        return buffer[:count]


def slabs(sample: Sample, buffer_RMX: Tensor) -> list[Tensor]:
    """Cut the rows that arrived out of a rank-major buffer: for each source rank, the slots that
    its rows fill.
    """
    counts_R = sample.rows_RR[:, sample.rank].tolist()
    return [slab[:count] for slab, count in zip(buffer_RMX, counts_R, strict=True)]


def poison(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with NaN. All bits are set, which is a NaN in every floating-point dtype,
    fp8 included.
    """
    for tensor in tensors:
        if tensor.numel():
            tensor.view(torch.uint8).fill_(0xFF)
