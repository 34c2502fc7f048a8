"""A tensor of all E experts of which this rank holds some rows, for torch.distributed.checkpoint.

The rows may be those of any experts, in any order, and an expert may occur more than once.
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

# Operators that torch's stager for asynchronous saves calls when it copies a tensor.
_STAGING_OPERATORS = (torch.ops.aten.new_empty.default, torch.ops.aten.detach.default)


class Rows(Tensor):
    """A tensor [E, …] of all logical experts, of which this rank holds e rows.

    A DTensor cannot describe these rows, because they may be in any order and have copies.
    torch.distributed.checkpoint saves and loads the tensor, also asynchronously. The tensor
    supports no other operators.
    """

    local: Tensor
    """the rows of this rank, [e, …], whose memory this tensor shares"""
    held: list[int]
    """the logical expert of each row of `local`, or −1 for a row that has no expert"""

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
        # The stager wants a new tensor of this class. It copies the attributes itself afterwards.
        if func not in _STAGING_OPERATORS:
            raise NotImplementedError(
                f"`epmoe.checkpoint` has rows of experts here, which have no {func}"
            )
        return cls(args[0].local, args[0].held, len(args[0]))

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        """Tell torch what this rank could write: one item for each expert that it holds.

        If several ranks hold an expert, torch writes the item of one of them.
        """
        properties = TensorProperties.create_from_tensor(self.local)
        # Copies of an expert on this rank have the same offsets, so that one item remains of them.
        chunks = {chunk.offsets: chunk for chunk in self.__create_chunk_list__()}
        items = []
        for offsets, chunk in chunks.items():
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
            index = MetadataIndex(key, offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Tell torch where each row of this rank lies in the tensor [E, …].

        Rows without an expert are left out.
        """
        sizes = torch.Size((1, *self.shape[1:]))
        rest = (0,) * (self.dim() - 1)
        return [ChunkStorageMetadata(torch.Size((x, *rest)), sizes) for x in self.held if x >= 0]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the row [1, …] that torch writes from or reads into.

        `index.offset` names the expert. When torch loads, `index.index` also says which of the
        chunks of `__create_chunk_list__` is meant. Each copy of an expert is then filled. When
        torch saves, any copy will do, and the first one is returned.
        """
        assert index.offset is not None
        expert = index.offset[0]
        row = self.held.index(expert)
        # The chunks are numbered without the rows that have no expert.
        rows_of_chunks = [i for i, held in enumerate(self.held) if held >= 0]
        chunk = index.index
        if chunk is not None and chunk < len(rows_of_chunks):
            row_of_chunk = rows_of_chunks[chunk]
            if self.held[row_of_chunk] == expert:
                row = row_of_chunk
        return self.local[row : row + 1]
