"""Records of routes: tensors with the experts of each token, which a rollout passes to a trainer.

    recording(model) ─ pack_routes ─▶ [B, tokens, layers, K]
                                              │ pad_routes
                                              ▼
                                      [B, length, layers, K] ─▶ replay(model, …)

Here B is the number of sequences, and each token has K experts in each layer. Rollout engines and
trainers use the same form: ids of logical experts in a small integer dtype. epmoe writes uint8 if
that suffices, otherwise int16.

Some tokens have no record. They are recognised by their K ids, which are not K different experts.
For example, all K ids may be 0, which engines fill in for tokens that they have not computed. Or
all may be −1, which is the largest value of an unsigned dtype.
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
"""Dtypes for records of few experts, each with the number of experts that it can name."""
WIDE = (torch.int16, torch.uint16, *INTS)
"""Dtypes for records of any number of experts."""


def pack_routes(
    record: Mapping[str, Sequence[Routes]], num_experts: int, *, batch: int = 1
) -> Tensor:
    """Put the experts of all calls of a rollout, such as those of `generate`, into one tensor.

    Args:
        record: the result of `recording` around calls of one model without gradients.
        num_experts: E, the number of logical experts.
        batch: B, the number of sequences in each call. The tokens of a call are [B, T] or flat.

    Returns:
        Ids [B, tokens, layers, K], in uint8 or, if there are too many experts for it, in int16. The
        tokens of all calls follow one another. The layers are in the order of the record. Tokens
        without experts, such as padding, have no record.

    Raises ValueError if the layers did not have the same calls, or if a call does not have the same
    number of tokens for each sequence.
    """
    # All layers must have had the same calls, with the same number of tokens for each sequence.
    sizes = {name: [len(call.ids) for call in calls] for name, calls in record.items()}
    first = next(iter(sizes.values()), [])
    are_same = all(of_layer == first for of_layer in sizes.values())
    are_complete = all(size % batch == 0 for size in first)
    if not first or not are_same or not are_complete:
        raise ValueError(
            f"`record` must have the same calls of each layer, of {batch} sequences each, got "
            f"{sizes}"
        )

    # Join the calls of each layer along their tokens, then stack the layers.
    layers = []
    for calls in record.values():
        parts = [call.ids.view(batch, -1, call.ids.shape[1]) for call in calls]
        layers.append(torch.cat(parts, 1))
    ids = torch.stack(layers, 2)

    # In uint8 "no record" is 255. With fewer than 256 experts no expert has this number. With 256
    # experts one has it, but a token does not have the same expert K times if K is more than 1.
    top_k = ids.shape[-1]
    fits_uint8 = num_experts < 256 or (num_experts == 256 and top_k > 1)
    dtype = torch.uint8 if fits_uint8 else torch.int16
    return ids.masked_fill(_unrecorded(ids, num_experts), -1).to(dtype)


def pad_routes(
    records: Iterable[Tensor | NDArray[Any]], length: int, starts: Iterable[int] | int = 0
) -> Tensor:
    """Put the records of B sequences, each [tokens, layers, K], into one tensor.

    Positions of the result that no record covers are marked as tokens without a record.

    Args:
        records: tensors or numpy arrays [tokens, layers, K], all of the same integer dtype.
        length: how many positions each sequence has in the result.
        starts: the position of each record's first token: one number for all records, or a number
            for each. It is more than 0 if a sequence begins with padding, or with a prompt whose
            tokens came from a cache and have no record.

    Returns:
        [B, length, layers, K] in the dtype of the records, for `replay`.

    Raises:
        TypeError: there are no records, or they have different dtypes.
        ValueError: a record does not fit into `length`, or records differ in their layers or K.
    """
    tensors = list(map(torch.as_tensor, records))
    if isinstance(starts, int):
        starts = [starts] * len(tensors)

    # All records must have the same dtype, layers and K.
    if len({record.dtype for record in tensors}) != 1:
        got = ", ".join(map(describe, tensors)) or "none"
        raise TypeError(f"`records` must be tensors of one dtype, got {got}")
    if len({record.shape[1:] for record in tensors}) > 1:
        got = ", ".join(map(describe, tensors))
        raise ValueError(f"`records` must have the same layers and K, got {got}")

    # Fill the result with "no record", then put each record at its start.
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
    """Split records [tokens, layers, K] or [B, tokens, layers, K] into those of each layer.

    Returns ids int32 [B, tokens, K] for each layer, on `device`. A token without a record has the
    ids `OWN_CHOICE`, which tell the layer to let its router choose. Raises TypeError or ValueError
    if `routes` has another dtype, or other layers or K.
    """
    if routes.dim() == 3:
        routes = routes[None]
    dtypes = [dtype for dtype, most in BYTES.items() if num_experts <= most]
    check_tensor("routes", routes, (*dtypes, *WIDE), ("B", "tokens", num_layers, top_k))
    ids = routes.to(device, torch.int32)
    return list(with_own_choice(ids, num_experts).unbind(2))


def with_own_choice(ids: Tensor, num_experts: int) -> Tensor:
    """In ids int32 or int64 [..., K], replace those of tokens without a record by `OWN_CHOICE`."""
    return ids.masked_fill(_unrecorded(ids, num_experts), OWN_CHOICE)


def _no_record(dtype: torch.dtype) -> int:
    """The value of ids that stands for "no record" in this dtype: −1, or the largest value."""
    if dtype.is_signed or dtype.is_floating_point:
        return -1
    return torch.iinfo(dtype).max


def _unrecorded(ids: Tensor, num_experts: int) -> Tensor:
    """Whether each token's K ids are not K different experts, bool [..., 1]."""
    unknown = ((ids < 0) | (ids >= num_experts)).any(-1, keepdim=True)
    in_order = ids.sort(-1).values
    is_twice = (in_order[..., 1:] == in_order[..., :-1]).any(-1, keepdim=True)
    return unknown | is_twice
