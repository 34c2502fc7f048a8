"""A rank's rows of a tensor [E, …] for torch.distributed.checkpoint: any experts in any order, with
copies.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

_COPIES = (torch.ops.aten.new_empty.default, torch.ops.aten.detach.default)


class Rows(Tensor):
    """A tensor [E, …] of all logical experts. This rank has rows of it in any order, which no
    DTensor can describe.

    torch.distributed.checkpoint saves and loads it, also asynchronously. It has no other operators.
    It shares the memory of `local` [e, …]; `held` has the logical expert of each row, −1 for a row
    of none.
    """

    local: Tensor
    held: list[int]

    @staticmethod
    def __new__(cls, local: Tensor, held: list[int], num_experts: int) -> Self:
        shape = (num_experts, *local.shape[1:])
        made: Self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        made.local = local
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # torch's stager calls these, and copies the attributes itself.
        if func not in _COPIES:
            raise NotImplementedError(
                f"`epmoe.checkpoint` has rows of experts here, which have no {func}"
            )
        return cls(args[0].local, args[0].held, len(args[0]))

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        """One item for each expert: torch writes those of all ranks once."""
        properties = TensorProperties.create_from_tensor(self.local)
        # Copies of an expert on this rank have the same offsets: one item for them.
        chunks = {chunk.offsets: chunk for chunk in self.__create_chunk_list__()}
        items = []
        for offsets, chunk in chunks.items():
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
            index = MetadataIndex(key, offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The place of each row in [E, …]."""
        sizes = torch.Size((1, *self.shape[1:]))
        rest = (0,) * (self.dim() - 1)
        return [ChunkStorageMetadata(torch.Size((x, *rest)), sizes) for x in self.held if x >= 0]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The row [1, …] of a chunk. Where torch loads, its number among the chunks tells copies of
        an expert apart.
        """
        assert index.offset is not None
        x = index.offset[0]
        number = index.index
        numbered = [i for i, held in enumerate(self.held) if held >= 0]
        row = self.held.index(x)
        if number is not None and number < len(numbered) and self.held[numbered[number]] == x:
            row = numbered[number]
        return self.local[row : row + 1]
