"""Records of routes: ids of experts, token by token, as rollouts hand them to trainers.

    recording(model) ─ pack_routes ─▶ [B, tokens, layers, K] ─ pad_routes ─▶ [B, length, layers, K]
    ─ replay(model, …)

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
    """The experts of all calls of a rollout, such as those of `generate`, in one tensor.

    Args:
        record: what `recording` yields, around calls of one model without gradients.
        num_experts: E.
        batch: B, the sequences of each call, whose tokens are [B, T] or flat.

    Returns:
        Ids [B, tokens, layers, K] in uint8 or, with more experts, int16: the tokens of all calls
        one after another, and the layers in the order of the record. Tokens without experts, such
        as padding, have no record.

    Raises ValueError where layers have had other calls than one another, or calls no whole number
    of tokens for each sequence.
    """
    sizes = {name: [len(call.ids) for call in calls] for name, calls in record.items()}
    of_layer, *others = {*map(tuple, sizes.values())} or {()}
    if others or not of_layer or any(size % batch for size in of_layer):
        raise ValueError(
            f"`record` must have the same calls of each layer, of {batch} sequences each, got "
            f"{sizes}"
        )
    layers = (
        torch.cat([c.ids.view(batch, -1, c.ids.shape[1]) for c in calls], 1)
        for calls in record.values()
    )
    ids = torch.stack(list(layers), 2)
    dtype = (
        torch.uint8
        if num_experts < 256 or num_experts == 256 and ids.shape[-1] > 1
        else torch.int16
    )
    return ids.masked_fill(_unrecorded(ids, num_experts), -1).to(dtype)


def pad_routes(
    records: Iterable[Tensor | NDArray[Any]], length: int, starts: Iterable[int] | int = 0
) -> Tensor:
    """Records of sequences [tokens, layers, K] → [B, length, layers, K], in which other positions
    have no record.

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
    begins = [starts] * len(tensors) if isinstance(starts, int) else list(starts)
    if not tensors or {each.dtype for each in tensors} - {tensors[0].dtype}:
        raise TypeError(
            "`records` must be tensors of one dtype, got "
            f"{', '.join(map(describe, tensors)) or 'none'}"
        )
    padded = tensors[0].new_full(
        (len(tensors), length, *tensors[0].shape[1:]), _no_record(tensors[0].dtype)
    )
    if len({each.shape[1:] for each in tensors}) > 1:
        raise ValueError(
            f"`records` must have the same layers and K, got {', '.join(map(describe, tensors))}"
        )
    for record, place, start in zip(tensors, padded, begins, strict=True):
        if not 0 <= start <= length - len(record):
            raise ValueError(
                f"a record of {len(record)} tokens from {start} on must fit into {length} positions"
            )
        place[start : start + len(record)] = record
    return padded


def unpack_routes(
    routes: Tensor, num_layers: int, num_experts: int, top_k: int, device: torch.device
) -> list[Tensor]:
    """Records [tokens, layers, K] or [B, tokens, layers, K] → for each layer ids int32 [B, tokens,
    K], in which a token without a record takes `OWN_CHOICE`.
    """
    if routes.dim() == 3:
        routes = routes[None]
    dtypes = [dtype for dtype, most in BYTES.items() if num_experts <= most]
    check_tensor("routes", routes, (*dtypes, *WIDE), ("B", "tokens", num_layers, top_k))
    ids = routes.to(device, torch.int32)
    return list(with_own_choice(ids, num_experts).unbind(2))


def with_own_choice(ids: Tensor, num_experts: int) -> Tensor:
    """Ids int32 or int64 [..., K], in which a token without a record takes `OWN_CHOICE`."""
    return ids.masked_fill(_unrecorded(ids, num_experts), OWN_CHOICE)


def _no_record(dtype: torch.dtype) -> int:
    """−1 in a dtype of records."""
    return -1 if dtype.is_signed or dtype.is_floating_point else torch.iinfo(dtype).max


def _unrecorded(ids: Tensor, num_experts: int) -> Tensor:
    """bool [..., 1], whether the K ids of a token are not K experts."""
    unknown = ((ids < 0) | (ids >= num_experts)).any(-1, keepdim=True)
    in_order = ids.sort(-1).values
    is_twice = (in_order[..., 1:] == in_order[..., :-1]).any(-1, keepdim=True)
    return unknown | is_twice
