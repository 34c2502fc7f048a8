"""The input of a benchmark: the tokens of one rank, their routing, the output that a round must
give for them, and how many rows travel between which ranks.
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
        """The payloads that rows of this configuration can have. Without whole fp8 blocks, of 128
        elements each, that is plain alone.
        """
        has_blocks = config.model.hidden_size % 128 == 0
        return list(cls) if has_blocks else [cls.PLAIN]

    @property
    def wires(self) -> tuple[PayloadName, PayloadName]:
        """The values of `exchange.payload` and `exchange.combine_payload`."""
        out: PayloadName = "auto" if self is Payload.PLAIN else "fp8"
        back: PayloadName = "fp8" if self is Payload.FP8_BOTH else "auto"
        return out, back

    def applied(self, config: EPConfig) -> EPConfig:
        """Copy `config` with this payload."""
        out, back = self.wires
        exchange = config.exchange.model_copy(update={"payload": out, "combine_payload": back})
        return config.model_copy(update={"exchange": exchange})


class Sample:
    """T tokens of one rank. All sides of a benchmark get the same sample.

    Each expert multiplies its rows by a factor of its own, so that the right output is known. Every
    rank simulates the routing of all R ranks. So an expert that is popular on one rank is popular
    on all, and each rank knows how many rows will arrive.

    `needs_TR` is bool [T, R] and says whether a rank holds an expert of a token. `rows_RR` is int64
    [R, R] and counts the rows from each source rank (first index) to each destination.
    `expected_TD` has the weighted sum over the experts of each token, in the dtype of the model.
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
        # Count the rows between ranks from the routing of all ranks.
        needs_RTR = ranks_needed(self.placement, ids.view(R, tokens, ids.shape[1]).long())
        self.needs_TR = needs_RTR[rank]
        self.rows_RR = needs_RTR.sum(dim=1)
        # Make the tokens of this rank. A token's sum is the token itself times the weighted sum of
        # its experts' factors.
        own_tokens = slice(rank * tokens, (rank + 1) * tokens)
        ids_TK = ids[own_tokens]
        weights_TK = weights[own_tokens]
        generator = torch.Generator().manual_seed(rank)
        x_TD = torch.randn(tokens, self.hidden, generator=generator).to(self.dtype)
        factors_E = torch.linspace(0.5, 1.5, model.num_experts)
        sums_T1 = (weights_TK * factors_E[ids_TK.long()]).sum(dim=1, keepdim=True)
        factors_e = factors_E[self.placement.logical_experts(rank)]
        # Put everything on the device of the exchange.
        self.x_TD = x_TD.to(device)
        self.ids_TK = ids_TK.to(device)
        self.weights_TK = weights_TK.to(device)
        self.expected_TD = (x_TD.float() * sums_T1).to(device, self.dtype)
        self.factors_e1 = factors_e.unsqueeze(1).to(device, self.dtype)

    def experts(self, rows_ND: Tensor, scales: Tensor | None, offsets: Tensor) -> Tensor:
        """Compute the outputs [N, D] of this rank's experts for the N rows that arrived.

        `offsets` [e + 1] has the first row of each expert, and N at its end. `scales` are those of
        fp8 rows.
        """
        # The expert of a row is the one in whose segment the row lies.
        row_N = torch.arange(int(offsets[-1]), device=rows_ND.device)
        expert_N = torch.searchsorted(offsets[1:].long(), row_N, right=True)
        rows = rows_ND[: len(row_N)]
        if scales is not None:
            rows = dequantize_rows(rows, scales[: len(row_N)], self.dtype)
        return rows * self.factors_e1[expert_N]

    def check(self, name: str, y_TD: Tensor, expects: str = "sum", *, fp8: bool = False) -> None:
        """Raise RuntimeError unless `y_TD` is the right output of the side called `name`.

        `expects` is `ExchangeSide.expects`. The error may be as large as the rounding of `dtype`,
        or of fp8 rows with `fp8`.
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
        """Whether this rank holds one of the K experts of each row: bool [N, 1]. It takes the
        placement to be linear and without copies.
        """
        experts = self.config.model.num_experts // self.config.topology.ep_size
        return (ids_NK // experts == self.rank).any(dim=1, keepdim=True)

    def row_bytes(self, payload: Payload) -> tuple[int, int]:
        """Bytes of a row on the wire, first in dispatch, then in combine."""
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
    """Which ranks the tokens of all ranks go to: bool [R, T, R], by source rank, token and
    destination. `ids_RTK` has the logical experts of each token.
    """
    R, T, _ = ids_RTK.shape
    # Choose copies as dispatch does: rank r sends its token t to copy (t + r) mod n of n.
    turn_RT1 = torch.arange(R).view(R, 1, 1) + torch.arange(T).view(1, T, 1)
    copy_RTK = turn_RT1 % placement.num_copies().long()[ids_RTK]
    owner_RTK = torch.tensor(placement.owners)[placement.copies_table().long()[ids_RTK, copy_RTK]]
    return torch.zeros(R, T, R, dtype=torch.bool).scatter_(2, owner_RTK, True)
