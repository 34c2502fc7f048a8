"""The input of a benchmark: one rank's tokens and routing, the expected output, and the rows
between ranks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.local.quantize import dequantize_rows
from epmoe.local.simulate import Kind, simulate_routing
from epmoe.native.formats import WIRE_FORMATS, PayloadName


class Payload(StrEnum):
    """The format of rows on the wire."""

    PLAIN = "plain"
    FP8_OUT = "fp8-out"
    FP8_BOTH = "fp8-both"

    @classmethod
    def for_rows(cls, config: EPConfig) -> list[Self]:
        """All payloads, or plain alone if `hidden_size` is not a multiple of the 128 elements of an
        fp8 block.
        """
        has_blocks = config.model.hidden_size % 128 == 0
        return list(cls) if has_blocks else [cls.PLAIN]

    @property
    def wires(self) -> tuple[PayloadName, PayloadName]:
        """exchange.payload and exchange.combine_payload."""
        out: PayloadName = "auto" if self is Payload.PLAIN else "fp8"
        back: PayloadName = "fp8" if self is Payload.FP8_BOTH else "auto"
        return out, back

    def applied(self, config: EPConfig) -> EPConfig:
        """`config` with this payload."""
        out, back = self.wires
        exchange = config.exchange.model_copy(update={"payload": out, "combine_payload": back})
        return config.model_copy(update={"exchange": exchange})


class Sample:
    """T tokens of one rank, the same for all sides. An expert multiplies a row by a factor of its
    own.

    Every rank simulates the routing of all ranks. So an expert that is popular on one rank is
    popular on all, and each rank knows how many rows will arrive. needs_TR: bool [T, R], whether a
    rank holds an expert of a token. rows_RR: int64 [R, R], rows from each source (first index) to
    each destination.
    """

    def __init__(
        self,
        config: EPConfig,
        rank: int,
        tokens: int,
        routing: Kind = "uniform",
        device: torch.device | str = "cpu",
        id_dtype: torch.dtype = torch.int32,
    ) -> None:
        model = config.model
        R = config.topology.ep_size
        self.config = config
        self.placement = config.place_experts()
        self.rank = rank
        self.tokens = tokens
        self.hidden = model.hidden_size
        self.dtype = model.torch_dtype
        ids, weights = simulate_routing(
            routing,
            R * tokens,
            model.num_experts,
            model.num_experts_per_tok,
            id_dtype=id_dtype,
            ep_size=R,
        )
        # The rows between ranks, from the routing of all of them.
        needs_RTR = ranks_needed(self.placement, ids.view(R, tokens, ids.shape[1]).long())
        self.needs_TR = needs_RTR[rank]
        self.rows_RR = needs_RTR.sum(dim=1)
        # The tokens of this rank, and their sums if each expert multiplies by its factor.
        mine = slice(rank * tokens, (rank + 1) * tokens)
        ids_TK = ids[mine]
        weights_TK = weights[mine]
        generator = torch.Generator().manual_seed(rank)
        x_TD = torch.randn(tokens, self.hidden, generator=generator).to(self.dtype)
        factors_E = torch.linspace(0.5, 1.5, model.num_experts)
        sums_T1 = (weights_TK * factors_E[ids_TK.long()]).sum(dim=1, keepdim=True)
        factors_e = factors_E[self.placement.logical_experts(rank)]
        # All on the device of the exchange.
        self.x_TD = x_TD.to(device)
        self.ids_TK = ids_TK.to(device)
        self.weights_TK = weights_TK.to(device)
        self.expected_TD = (x_TD.float() * sums_T1).to(device, self.dtype)
        self.factors_e1 = factors_e.unsqueeze(1).to(device, self.dtype)

    def experts(self, rows_ND: Tensor, scales: Tensor | None, offsets: Tensor) -> Tensor:
        """Outputs of this rank's experts for the rows that arrived, [offsets[-1], D]."""
        # The expert of each row, by the segment in which it lies.
        row_N = torch.arange(int(offsets[-1]), device=rows_ND.device)
        expert_N = torch.searchsorted(offsets[1:].long(), row_N, right=True)
        rows = rows_ND[: len(row_N)]
        if scales is not None:
            rows = dequantize_rows(rows, scales[: len(row_N)], self.dtype)
        return rows * self.factors_e1[expert_N]

    def check(self, name: str, y_TD: Tensor, expects: str = "sum", *, fp8: bool = False) -> None:
        """Raise RuntimeError unless y is what `ExchangeSide` expects, to the precision of `dtype`,
        or of fp8 rows.
        """
        if expects == "sum":
            expected_TD = self.expected_TD
            problem = "the round's output is not the weighted sum over its experts"
        else:
            if expects == "echo":
                factors_T = self.needs_TR.sum(dim=1)
            else:
                factors_T = self.weights_TK.sum(dim=1)
            expected_TD = self.x_TD * factors_T[:, None].to(self.x_TD)
            problem = "the rows that came back differ from the rows that left"
        limit = 16 * torch.finfo(torch.bfloat16 if fp8 else self.dtype).eps
        if not torch.allclose(y_TD, expected_TD, rtol=limit, atol=limit):
            raise RuntimeError(f"{name}: {problem}")

    def needed_here(self, ids_NK: Tensor) -> Tensor:
        """bool [N, 1]: whether this rank holds one of the experts ids [N, K]. Placements are
        linear, without copies.
        """
        experts = self.config.model.num_experts // self.config.topology.ep_size
        return (ids_NK // experts == self.rank).any(dim=1, keepdim=True)

    def row_bytes(self, payload: Payload) -> tuple[int, int]:
        """Bytes of a row on the wire, in dispatch and in combine."""
        out, back = payload.wires
        return wire_bytes(self.hidden, self.dtype, out), wire_bytes(self.hidden, self.dtype, back)

    @property
    def remote_RR(self) -> Tensor:
        """`rows_RR` without the rows that stay on their rank."""
        return self.rows_RR - self.rows_RR.diag().diag()


def wire_bytes(hidden: int, dtype: torch.dtype, payload: str) -> int:
    """Bytes of a row on the wire and of its scales, rounded up to 16."""
    wire = WIRE_FORMATS[payload]
    nbytes = wire.row_bytes(hidden, dtype) + wire.scale_bytes(hidden)
    return -(-nbytes // 16) * 16


def ranks_needed(placement: Placement, ids_RTK: Tensor) -> Tensor:
    """bool [R, T, R]: whether source r sends token t to a rank. Copies of experts are chosen as in
    dispatch.
    """
    R, T, _ = ids_RTK.shape
    turn_RT1 = torch.arange(R).view(R, 1, 1) + torch.arange(T).view(1, T, 1)
    copy_RTK = turn_RT1 % placement.num_copies().long()[ids_RTK]
    owner_RTK = torch.tensor(placement.owners)[placement.copies_table().long()[ids_RTK, copy_RTK]]
    return torch.zeros(R, T, R, dtype=torch.bool).scatter_(2, owner_RTK, True)
