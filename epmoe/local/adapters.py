"""LoRA adapters of experts, for serving. Each row has one adapter or none. The low-rank product of
the row's adapter is added to each of the two products of the row's expert.

    rows [N,D] ─ a [e,C,D] ─▶ [N,C] ─ mask ─▶ [N,C] ─ b [e,2F,C] ─▶ [N,2F]

All adapters of an expert lie side by side in C columns, and each row is multiplied by all of them.
The mask then sets the columns of adapters to zero that are not the row's. In this way the products
are grouped GEMMs over the same segments as those of the experts. No rows have to be sorted by
adapter, and the host does not wait for the GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from epmoe.local.experts import GroupedExperts
from epmoe.local.gemm.deep_gemm import DeepGemm
from epmoe.local.gemm.gemm import Added, Factors
from epmoe.local.gemm.table import GEMMS, choose
from epmoe.local.spread import local_view
from epmoe.local.weight_formats import plain_shape
from epmoe.native.arguments import FLOATS, check_tensor, dtype_name

# The number that stands for "no adapter" of a row.
NO_ADAPTER = -1
# Grouped GEMMs need strides that are multiples of this number of bytes.
_LINE_BYTES = 16


def _writable_anywhere() -> torch.inference_mode:
    """A context for making buffers that can be written later, inside and outside inference mode.

    A tensor that is made in inference mode could not be written outside it.
    """
    return torch.inference_mode(False)


class LoRA(NamedTuple):
    """One adapter, of rank r, of e experts. It adds the product b · a to a weight.

    The factors are fp32, fp16 or bf16, on any device. The factor b includes the adapter's scaling.
    A weight that the adapter does not change has None in place of its factors.
    """

    gate_up: tuple[Tensor, Tensor] | None
    """a [e, r, D] and b [e, 2F, r], in the order of `GroupedExperts.w_gate_up`"""
    down: tuple[Tensor, Tensor] | None
    """a [e, r, F] and b [e, D, r]"""


class ExpertAdapters(nn.Module):
    """Memory for several adapters of this rank's experts, for serving.

    At first all factors are zeros, which add nothing. The factors are buffers in the dtype of the
    experts' outputs. They are not part of a state dict, since an adapter has a file of its own.

    `MoELayer.load_adapter` and `MoELayer.put_adapter` put the same adapter on all ranks.
    `put_local` and `clear_local` change this rank alone. All of them write in place, so that
    captured CUDA graphs see the new adapter.

    Args:
        experts: the experts of this rank.
        count: how many adapters there is memory for.
        rank: the largest rank r of an adapter. Zeros fill up adapters of a lower rank.

    Raises:
        ValueError: `count` or `rank` is below 1; or the experts are `batch_invariant`, which the
            products of adapters are not.
    """

    gate_up_a: Tensor
    gate_up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    numbers: set[int]
    """The numbers of adapters that this rank holds."""
    lost: set[int]
    """The numbers of adapters that this rank had and can no longer vouch for. For example, experts
    have moved to this rank without their adapters. Calls that name adapters are refused until each
    of these adapters has been put again or cleared.
    """

    def __init__(self, experts: GroupedExperts, count: int, rank: int) -> None:
        for name, value in (("adapters", count), ("adapter_rank", rank)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}")
        if experts.batch_invariant:
            raise ValueError(
                "`experts` must not be batch_invariant with adapters, whose products are not"
            )
        _warn_of_dequantizing(experts)
        super().__init__()
        self.count = count
        self.rank = rank
        self.numbers = set()
        self.lost = set()

        # Round the columns of all adapters up, so that strides are as GEMMs need them.
        step = _LINE_BYTES // experts.dtype.itemsize
        C = -(-count * rank // step) * step

        # Make buffers for the factors of both weights, filled with zeros.
        e, D, F = plain_shape(local_view(experts.w_down.detach()))
        two_F = experts.w_gate_up.shape[1]
        shapes = {
            "gate_up_a": (e, C, D),
            "gate_up_b": (e, two_F, C),
            "down_a": (e, C, F),
            "down_b": (e, D, C),
        }
        with _writable_anywhere():
            for name, shape in shapes.items():
                zeros = torch.zeros(shape, dtype=experts.dtype, device=experts.w_down.device)
                self.register_buffer(name, zeros, persistent=False)
        self._choose()

    # In inference mode all buffers can be written, whatever mode they were made in.
    @torch.inference_mode()
    def put_local(self, number: int, adapter: LoRA) -> None:
        """Store an adapter under a number, on this rank alone. The next call uses it.

        Args:
            number: the number of the adapter, from 0 to `count` − 1.
            adapter: the adapter of this rank's experts, on any device and in any float dtype.

        Raises:
            TypeError: a factor is not a float tensor.
            ValueError: the number is out of range; or a factor has a wrong shape; or a value is not
                finite in the dtype of outputs, and would spoil the rows of other adapters.
        """
        adapter = self.checked(number, adapter)
        views = self._views(number)
        self._zero(number)
        # The adapter counts as lost until all of it is written. An exception meanwhile, such as a
        # Ctrl-C, may leave only a part of it.
        self.lost.add(number)
        for name, factors in adapter._asdict().items():
            if factors is None:
                continue
            a, b = factors
            a_view, b_view = views[name]
            # The columns behind the adapter's rank stay zeros.
            r = a.shape[1]
            a_view[:, :r].copy_(a)
            b_view[:, :, :r].copy_(b)
        self.numbers.add(number)
        self.lost.discard(number)

    def checked(self, number: int, adapter: LoRA) -> LoRA:
        """Check an adapter before it is stored under a number.

        Returns the adapter on the device and in the dtype of the experts' outputs. Raises the
        errors of `put_local`.
        """
        views = self._views(number)
        made: dict[str, Factors | None] = {}
        for name, factors in adapter._asdict().items():
            made[name] = None
            if factors is None:
                continue
            # The factors must have the experts' sizes and the same rank, at most `self.rank`.
            a, b = factors
            a_view, b_view = views[name]
            e, _, k = a_view.shape
            n = b_view.shape[1]
            check_tensor(f"{name} a", a, FLOATS, (e, "r", k))
            r = a.shape[1]
            check_tensor(f"{name} b", b, FLOATS, (e, n, r))
            if r > self.rank:
                raise ValueError(
                    f"`{name}` must have a rank of at most `adapter_rank` = {self.rank}, got {r}"
                )
            # A value of b that is not finite would spoil the rows of all other adapters. Their
            # columns are zeros by the mask, but zero times Inf or NaN is NaN.
            a = a.to(self.gate_up_a)
            b = b.to(self.gate_up_a)
            if not (a.isfinite().all() and b.isfinite().all()):
                raise ValueError(
                    f"`{name}` has values that are not finite in {dtype_name(a.dtype)}"
                )
            made[name] = Factors(a, b)
        return LoRA(**made)

    @torch.inference_mode()
    def clear_local(self, number: int) -> None:
        """Remove the adapter with this number, on this rank alone. Its factors become zeros.

        Raises ValueError if the number is out of range.
        """
        self._zero(number)
        self.numbers.discard(number)
        self.lost.discard(number)

    def lose(self, number: int) -> None:
        """Refuse calls with adapters until the adapter with this number is put again or cleared.

        A caller says this if it is not certain that all ranks have the same adapter.
        """
        if number in range(self.count):
            self.lost.add(number)

    def regroup(self, experts: int, whole: bool) -> None:
        """Make memory for another number of experts, after this rank has joined another group.

        `whole` says that all slots of all ranks hold the same experts as before, so that the
        adapters stay valid. Otherwise all adapters are lost, since each of them would lack the
        factors of some experts.
        """
        with _writable_anywhere():
            for name, buffer in list(self.named_buffers()):
                # Copy the factors of the first experts. There may be fewer or more experts now.
                if len(buffer) != experts:
                    fitted = buffer.new_zeros(experts, *buffer.shape[1:])
                    fitted[: len(buffer)] = buffer[:experts]
                    self.register_buffer(name, fitted, persistent=False)
        if not whole:
            self._lose()
        self._choose()

    def of_rows(self, numbers: Tensor) -> Added:
        """What a call of `GroupedExperts` has to add: the argument `added` of its `forward`.

        `numbers` has the number of each row's adapter, int32 [N]. A number that is not that of an
        adapter adds nothing: it selects no columns, or columns behind those of the last adapter,
        which are zeros. Undefined rows may therefore have any number.
        """
        # The `rank` columns of an adapter follow one another. Find the adapter of each column.
        C = self.gate_up_a.shape[1]
        columns_C = torch.arange(C, dtype=torch.int32, device=numbers.device)
        adapters_C = columns_C.div_(self.rank, rounding_mode="floor")
        return Added(
            gemm=self._gemm,
            gate_up=Factors(self.gate_up_a, self.gate_up_b),
            down=Factors(self.down_a, self.down_b),
            masked_columns=numbers[:, None] != adapters_C,
        )

    def of_expert(self, local: int) -> list[Tensor]:
        """The memory of all adapters of one expert, by its local number, for moves of experts."""
        return [buffer[local] for buffer in self.buffers()]

    def extra_repr(self) -> str:
        """What `repr` says of the sizes."""
        return f"{self.count} of rank {self.rank}"

    def _choose(self) -> None:
        """Choose one GEMM for the factors of both weights.

        It is called again after each change of dtype, device or size.
        """
        for_gate_up = choose("torch", self.gate_up_a, self.gate_up_b)[0]
        for_down = choose("torch", self.down_a, self.down_b)[0]
        # Of two different GEMMs, the one that comes later in `GEMMS` takes the other weights, too.
        name = max(for_gate_up, for_down, key=list(GEMMS).index)
        self._gemm = GEMMS[name]

    @torch.inference_mode()
    def _lose(self) -> None:
        """Set all adapters to zero. Those that this rank had are lost."""
        for buffer in self.buffers():
            buffer.zero_()
        self.lost |= self.numbers
        self.numbers.clear()

    def _zero(self, number: int) -> None:
        """Set the factors of an adapter to zero."""
        for a, b in self._views(number).values():
            a.zero_()
            b.zero_()

    @_writable_anywhere()
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Cast or move the adapters. torch calls it for `to`, `cuda`, `half` and the like.

        If a cast makes values that are not finite, or there were no values, all adapters are lost.
        """
        are_lost = False
        for name, buffer in list(self.named_buffers()):
            # Apply `fn` to an empty tensor, only to learn the new dtype and device. The function of
            # `to_empty` would leave the values undefined, and no state dict would fill them later.
            like = fn(buffer.new_empty(0))
            if buffer.is_meta:
                # A tensor on the meta device has no values.
                moved = torch.zeros(buffer.shape).to(like)
                are_lost = True
            else:
                moved = buffer.to(like)
                # A value may be out of the range of the new dtype.
                was_cast = moved.dtype != buffer.dtype and not moved.is_meta
                if was_cast and not moved.isfinite().all():
                    are_lost = True
            setattr(self, name, moved)
        if are_lost:
            self._lose()
        self._choose()
        return self

    def _views(self, number: int) -> dict[str, Factors]:
        """Views of the columns in which an adapter's factors lie, by the names of `LoRA`.

        Raises ValueError if `number` is not an int from 0 to `count` − 1.
        """
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < self.count:
            raise ValueError(
                f"the number of an adapter must be from 0 to {self.count - 1}, got {number!r}"
            )
        columns = slice(number * self.rank, (number + 1) * self.rank)
        return {
            "gate_up": Factors(self.gate_up_a[:, columns], self.gate_up_b[:, :, columns]),
            "down": Factors(self.down_a[:, columns], self.down_b[:, :, columns]),
        }


def _warn_of_dequantizing(experts: GroupedExperts) -> None:
    """Warn if calls with adapters dequantize fp8 weights, and calls without do not."""
    if not GEMMS[experts.gemm].takes_fp8 or not experts.is_fp8:
        return
    if any(GEMMS[name].takes_fp8 and GEMMS[name].takes_adapters for name in experts.gemms):
        return
    gate_up = local_view(experts.w_gate_up.detach())
    down = local_view(experts.w_down.detach())
    warnings.warn(
        "with adapters all fp8 weights are dequantized in every call, which is slow: "
        f"{DeepGemm().problem_with(gate_up, down)}",
        stacklevel=3,
    )
