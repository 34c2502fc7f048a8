"""Records of routes: ids of experts, token by token, as rollouts hand them to trainers.

    recording(model) ─ pack_routes ─▶ [B, tokens, layers, K]
                                              │ pad_routes
                                              ▼
                                      [B, length, layers, K] ─▶ replay(model, …)

Rollout engines and trainers carry the same: logical ids in a small integer dtype, ours in uint8
where that suffices, else in int16. A token has no record where its K ids are not K experts: the
experts of a token differ from one another, so a row with an id twice is none. So zeros mean no
record, as engines fill in for tokens that they have not computed, and so does −1, which is the
largest value of an unsigned dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epmoe.local.recording import Routes
from epmoe.local.route import OWN_CHOICE
from epmoe.native.arguments import INTS, check_tensor, describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

BYTES = {torch.uint8: 256, torch.int8: 128}
"""Dtypes of records of few experts, with the most experts that they can name."""
WIDE = (torch.int16, torch.uint16, *INTS)
"""Dtypes of records of any number of experts."""


def pack_routes(
    record: Mapping[str, Sequence[Routes]], num_experts: int, *, batch: int = 1
) -> Tensor:
    """Put the experts of all calls of a rollout, such as those of `generate`, into one tensor.

    Args:
        record: what `recording` yields, around calls of one model without gradients.
        num_experts: E.
        batch: B, the sequences of each call, whose tokens are [B, T] or flat.

    Returns:
        Ids [B, tokens, layers, K] in uint8 or, with more experts, int16: the tokens of all calls
        one after another, and the layers in the order of the record. Tokens without experts, such
        as padding, have no record.

    Raises ValueError if layers have had other calls than one another, or calls no whole number
    of tokens for each sequence.
    """
    # All layers must have had the same calls, each of complete sequences.
    sizes = {name: [len(call.ids) for call in calls] for name, calls in record.items()}
    first = next(iter(sizes.values()), [])
    are_same = all(of_layer == first for of_layer in sizes.values())
    are_complete = all(size % batch == 0 for size in first)
    if not first or not are_same or not are_complete:
        raise ValueError(
            f"`record` must have the same calls of each layer, of {batch} sequences each, got "
            f"{sizes}"
        )

    # Join the calls of a layer along tokens, then the layers.
    layers = []
    for calls in record.values():
        parts = [call.ids.view(batch, -1, call.ids.shape[1]) for call in calls]
        layers.append(torch.cat(parts, 1))
    ids = torch.stack(layers, 2)

    # No record is 255 in uint8: no expert has this number, or no token has it K times.
    top_k = ids.shape[-1]
    fits_uint8 = num_experts < 256 or num_experts == 256 and top_k > 1
    dtype = torch.uint8 if fits_uint8 else torch.int16
    return ids.masked_fill(_unrecorded(ids, num_experts), -1).to(dtype)


def pad_routes(
    records: Iterable[Tensor | NDArray[Any]], length: int, starts: Iterable[int] | int = 0
) -> Tensor:
    """Put records of sequences [tokens, layers, K] into one tensor [B, length, layers, K].

    Other positions of the tensor have no record.

    Args:
        records: tensors or arrays of numpy [tokens, layers, K], all of one integer dtype.
        length: positions of each sequence in the result.
        starts: the position of a record's first token, one number for all or one for each: behind
            padding, or behind a prompt whose tokens came from a cache.

    Returns:
        [B, length, layers, K] in the dtype of the records, for `replay`.

    Raises:
        TypeError: there are no records, or they have several dtypes.
        ValueError: a record does not fit into `length`, or records have other layers or K than one
            another.
    """
    tensors = list(map(torch.as_tensor, records))
    if isinstance(starts, int):
        starts = [starts] * len(tensors)

    # All must have one dtype, and the same layers and K.
    if len({record.dtype for record in tensors}) != 1:
        got = ", ".join(map(describe, tensors)) or "none"
        raise TypeError(f"`records` must be tensors of one dtype, got {got}")
    if len({record.shape[1:] for record in tensors}) > 1:
        got = ", ".join(map(describe, tensors))
        raise ValueError(f"`records` must have the same layers and K, got {got}")

    # Put each at its start, among positions without a record.
    first = tensors[0]
    shape = (len(tensors), length, *first.shape[1:])
    padded = first.new_full(shape, _no_record(first.dtype))
    for record, place, start in zip(tensors, padded, starts, strict=True):
        if not 0 <= start <= length - len(record):
            raise ValueError(
                f"a record of {len(record)} tokens from {start} on must fit into {length} positions"
            )
        place[start : start + len(record)] = record
    return padded


def unpack_routes(
    routes: Tensor, num_layers: int, num_experts: int, top_k: int, device: torch.device
) -> list[Tensor]:
    """Take records [tokens, layers, K] or [B, tokens, layers, K] apart.

    Returns ids int32 [B, tokens, K] for each layer. The ids of a token without a record are
    `OWN_CHOICE`.
    """
    if routes.dim() == 3:
        routes = routes[None]
    dtypes = [dtype for dtype, most in BYTES.items() if num_experts <= most]
    check_tensor("routes", routes, (*dtypes, *WIDE), ("B", "tokens", num_layers, top_k))
    ids = routes.to(device, torch.int32)
    return list(with_own_choice(ids, num_experts).unbind(2))


def with_own_choice(ids: Tensor, num_experts: int) -> Tensor:
    """Replace the ids of tokens without a record by `OWN_CHOICE`: int32 or int64 [..., K]."""
    return ids.masked_fill(_unrecorded(ids, num_experts), OWN_CHOICE)


def _no_record(dtype: torch.dtype) -> int:
    """−1 in a dtype of records."""
    if dtype.is_signed or dtype.is_floating_point:
        return -1
    return torch.iinfo(dtype).max


def _unrecorded(ids: Tensor, num_experts: int) -> Tensor:
    """Whether the K ids of a token are not K different experts, bool [..., 1]."""
    unknown = ((ids < 0) | (ids >= num_experts)).any(-1, keepdim=True)
    in_order = ids.sort(-1).values
    is_twice = (in_order[..., 1:] == in_order[..., :-1]).any(-1, keepdim=True)
    return unknown | is_twice
