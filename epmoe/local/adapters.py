"""LoRA adapters of experts. A low-rank product of each row's adapter is added to both products of
its expert.

    rows [N,D] ─ a [e,C,D] ─▶ [N,C] ─ mask ─▶ [N,C] ─ b [e,2F,C] ─▶ [N,2F]

The mask zeroes the columns of other adapters than the row's.

The A adapters lie side by side in C columns, and each row is multiplied by all of them. So these
products use the segments of the experts: no rows are sorted, and the host does not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from epmoe.local.experts import GroupedExperts
from epmoe.local.gemm.gemm import Added, Factors
from epmoe.local.gemm.table import GEMMS, choose
from epmoe.local.spread import local_view
from epmoe.local.weight_formats import plain_shape
from epmoe.native.arguments import FLOATS, check_tensor, dtype_name

# The number of a row that has no adapter.
NO_ADAPTER = -1
# Grouped GEMMs want strides of its multiples.
_LINE_BYTES = 16


def _writable_anywhere() -> torch.inference_mode:
    """For making buffers: those made in inference mode could not be written outside it."""
    return torch.inference_mode(False)


class LoRA(NamedTuple):
    """One adapter of some experts, of rank r. It adds b · a to each weight; None adds nothing.

    Factors are fp32, fp16 or bf16, on any device. b includes the adapter's scaling.
    """

    gate_up: tuple[Tensor, Tensor] | None
    """a [e, r, D] and b [e, 2F, r], in the order of `GroupedExperts.w_gate_up`"""
    down: tuple[Tensor, Tensor] | None
    """a [e, r, F] and b [e, D, r]"""


class ExpertAdapters(nn.Module):
    """Room for adapters of this rank's experts, for serving. At first all are zeros, which add
    nothing.

    The weights are buffers in the dtype of outputs, and no part of a state dict: an adapter comes
    from a file of its own. `MoELayer.load_adapter` and `MoELayer.put_adapter` see to it that all
    ranks have the same; `put_local` and `clear_local` change this rank alone. All write in place,
    so CUDA graphs go on.

    Args:
        experts: of this rank.
        count: A, adapters at a time.
        rank: the largest r of an adapter. Lower ones are filled up with zeros.

    Raises:
        ValueError: `count` or `rank` is below 1, or the experts are `batch_invariant`: products of
            adapters are not.
    """

    gate_up_a: Tensor
    gate_up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    numbers: set[int]
    """The numbers of adapters that this rank holds."""
    lost: set[int]
    """The numbers of adapters that this rank has held, and that are zeros now, since weights of
    experts went without them. Calls that name adapters are refused until each of these was put
    again or cleared.
    """

    def __init__(self, experts: GroupedExperts, count: int, rank: int) -> None:
        for name, value in (("adapters", count), ("adapter_rank", rank)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}")
        if experts.batch_invariant:
            raise ValueError(
                "`experts` must not be batch_invariant with adapters, whose products are not"
            )
        super().__init__()
        self.count = count
        self.rank = rank
        self.numbers = set()
        self.lost = set()

        # Columns of all adapters, in whole lines.
        step = _LINE_BYTES // experts.dtype.itemsize
        C = -(-count * rank // step) * step

        # Room for their factors, zeros.
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

    # Buffers of either mode can be written in inference mode.
    @torch.inference_mode()
    def put_local(self, number: int, adapter: LoRA) -> None:
        """Put an adapter under this number, on this rank, from the next call on.

        Args:
            number: from 0 to A − 1.
            adapter: of this rank's experts, on any device and in any float dtype.

        Raises:
            TypeError: a factor is no float tensor.
            ValueError: the number or a shape is another one; or a value is not finite in the dtype
                of outputs, which would reach the rows of other adapters.
        """
        adapter = self.checked(number, adapter)
        room = self._room(number)
        self._empty(number)
        # An exception, such as a Ctrl-C, may leave a part of it.
        self.lost.add(number)
        for name, factors in adapter._asdict().items():
            if factors is None:
                continue
            a, b = factors
            a_room, b_room = room[name]
            # Ranks above that of the adapter stay zeros.
            r = a.shape[1]
            a_room[:, :r].copy_(a)
            b_room[:, :, :r].copy_(b)
        self.numbers.add(number)
        self.lost.discard(number)

    def checked(self, number: int, adapter: LoRA) -> LoRA:
        """Check an adapter, with the errors of `put_local`. Returns it on the device and in the
        dtype of outputs.
        """
        room = self._room(number)
        made: dict[str, Factors | None] = {}
        for name, factors in adapter._asdict().items():
            made[name] = None
            if factors is None:
                continue
            # The shapes of the experts, with one rank that there is room for.
            a, b = factors
            a_room, b_room = room[name]
            e, _, k = a_room.shape
            n = b_room.shape[1]
            check_tensor(f"{name} a", a, FLOATS, (e, "r", k))
            r = a.shape[1]
            check_tensor(f"{name} b", b, FLOATS, (e, n, r))
            if r > self.rank:
                raise ValueError(
                    f"`{name}` must have a rank of at most `adapter_rank` = {self.rank}, got {r}"
                )
            # One value that is not finite would reach the rows of all adapters.
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
        """Remove the adapter with this number on this rank: its factors become zeros. Raises
        ValueError for a number out of range.
        """
        self._empty(number)
        self.numbers.discard(number)
        self.lost.discard(number)

    def lose(self, number: int) -> None:
        """Refuse calls until this adapter was put again or cleared, since other ranks may have
        another one.
        """
        if number in range(self.count):
            self.lost.add(number)

    def regroup(self, experts: int, whole: bool) -> None:
        """Make room for so many experts, since this rank has joined another group.

        Adapters stay if all slots of all ranks hold the same experts as before (`whole`). Otherwise
        all are lost: an adapter of some experts only would be another one.
        """
        with _writable_anywhere():
            for name, buffer in list(self.named_buffers()):
                # Room for so many, with what the first ones had.
                if len(buffer) != experts:
                    fitted = buffer.new_zeros(experts, *buffer.shape[1:])
                    fitted[: len(buffer)] = buffer[:experts]
                    self.register_buffer(name, fitted, persistent=False)
        if not whole:
            self._lose()
        self._choose()

    def of_rows(self, numbers: Tensor) -> Added:
        """What a call of `GroupedExperts` adds, by the adapter of each row, int32 [N].

        Numbers of no adapter add nothing, since columns beyond the last adapter are zeros. So
        undefined rows may have any number.
        """
        # Each adapter has `rank` columns that follow one another.
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
        """The memory of all adapters of one expert, for moves of experts."""
        return [buffer[local] for buffer in self.buffers()]

    def extra_repr(self) -> str:
        """What `repr` says of the sizes."""
        return f"{self.count} of rank {self.rank}"

    def _choose(self) -> None:
        """Choose a GEMM that takes the factors of both products."""
        for_gate_up, *_ = choose("torch", self.gate_up_a, self.gate_up_b)
        for_down, *_ = choose("torch", self.down_a, self.down_b)
        # A GEMM that comes later in `GEMMS` takes more weights.
        name = max(for_gate_up, for_down, key=list(GEMMS).index)
        self._gemm = GEMMS[name]

    @torch.inference_mode()
    def _lose(self) -> None:
        """Zero all adapters, and count those that were here as lost."""
        for buffer in self.buffers():
            buffer.zero_()
        self.lost |= self.numbers
        self.numbers.clear()

    def _empty(self, number: int) -> None:
        """Zero the factors of an adapter."""
        for a, b in self._room(number).values():
            a.zero_()
            b.zero_()

    @_writable_anywhere()
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Cast or move the adapters. If that makes values that are not finite, all are lost."""
        are_lost = False
        for name, buffer in list(self.named_buffers()):
            # `fn` gets an empty tensor. `to_empty` would leave memory undefined that no state dict
            # fills.
            like = fn(buffer.new_empty(0))
            if buffer.is_meta:
                # There were no values.
                moved = torch.zeros(buffer.shape).to(like)
                are_lost = True
            else:
                moved = buffer.to(like)
                # A cast may leave values that are not finite.
                was_cast = moved.dtype != buffer.dtype and not moved.is_meta
                if was_cast and not moved.isfinite().all():
                    are_lost = True
            setattr(self, name, moved)
        if are_lost:
            self._lose()
        self._choose()
        return self

    def _room(self, number: int) -> dict[str, Factors]:
        """Views of the factors of an adapter, by the names of `LoRA`."""
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < self.count:
            raise ValueError(
                f"the number of an adapter must be from 0 to {self.count - 1}, got {number!r}"
            )
        columns = slice(number * self.rank, (number + 1) * self.rank)
        return {
            "gate_up": Factors(self.gate_up_a[:, columns], self.gate_up_b[:, :, columns]),
            "down": Factors(self.down_a[:, columns], self.down_b[:, :, columns]),
        }
