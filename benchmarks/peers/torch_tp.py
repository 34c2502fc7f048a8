"""A tensor-parallel layer: torch's collectives around our route, permute, experts and finalize.

Every rank has F / R columns of every expert and computes the tokens of all ranks. The GEMMs are the
fastest that `GroupedExperts` finds, so that layouts are compared and not libraries. With
"all-reduce" all ranks have all tokens and logits beforehand, as tensor-parallel attention leaves
them. With "all-gather" each rank has its own, as with data-parallel attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe import GroupedExperts, finalize, permute, quantize_fp8, route
from epmoe.bench.layer_sides import WholeLayer
from epmoe.bench.peers import LeftOut, Peer
from epmoe.config.config import ROW_BLOCKS
from epmoe.native.formats import SCALE_BLOCK


class TensorParallel(Peer):
    """One of the two. `gathers`: whether tokens travel within the layer, and sums go to the rank of
    their token.
    """

    install = "torch"

    def __init__(self, name: str, gathers: bool) -> None:
        self.name = name
        self.gathers = gathers

    def version(self) -> str:
        return torch.__version__

    @contextmanager
    def layer(self, case: WholeLayer) -> Iterator[Callable[[], Tensor]]:
        group = case.group
        config = case.ep.config
        R = group.size()
        E = config.model.num_experts
        K = config.model.num_experts_per_tok
        T = len(case.x_TD)
        # Each rank gets an equal part of F, in whole blocks of scales.
        width = case.experts.w_down.shape[2]
        step = SCALE_BLOCK if case.experts.is_fp8 else 1
        if width % (R * step):
            raise LeftOut(f"F = {width} does not divide into {R} parts of multiples of {step}")
        experts = sharded(case.experts, group)
        # Rows of an expert decide the alignment.
        per_expert = R * T * K / E
        blocks = (block for block in ROW_BLOCKS if experts.alignment > 1 and block <= per_expert)
        alignment = max(blocks, default=experts.alignment)  # as dispatch has it
        # All experts are here, in parts: no id is left out.
        identity = torch.arange(E, dtype=torch.int32, device=case.x_TD.device)
        # Tokens of all ranks, as all-reduce finds them, and as all-gather writes them.
        x_BD = gathered(case.x_TD, group)
        logits_BE = gathered(case.logits_TE, group)
        y_TD = torch.empty_like(case.x_TD)

        def run() -> Tensor:
            # With data-parallel attention tokens have yet to come.
            if self.gathers:
                dist.all_gather_into_tensor(x_BD, case.x_TD, group=group)
                dist.all_gather_into_tensor(logits_BE, case.logits_TE, group=group)
            # Every rank routes all tokens.
            ids, weights = route(logits_BE, K, bias=case.bias_E, **config.routing.options)
            # Rows in the order of experts, in fp8 with their scales.
            x, scales = quantize_fp8(x_BD) if experts.is_fp8 else (x_BD, None)
            p = permute(x, ids, identity, E, alignment=alignment)
            if scales is not None:
                of_rows = scales.new_empty(len(p.rows), scales.shape[1])
                scales = of_rows.index_copy_(
                    0, p.row_of_pair.flatten().long(), scales.repeat_interleave(K, dim=0)
                )
            # Every expert, of which this rank has a part of F.
            out = experts(
                p.rows,
                p.expert_offsets,
                scales,
                tokens_per_expert=p.tokens_per_expert,
                alignment=alignment,
                rows_per_expert=per_expert,
            )
            # The parts of all ranks add up to y.
            y_BD = finalize(out, p, weights)
            if self.gathers:
                dist.reduce_scatter_tensor(y_TD, y_BD, group=group)
                return y_TD
            dist.all_reduce(y_BD, group=group)
            return y_BD[group.rank() * T :][:T]

        yield run


def sharded(experts: GroupedExperts, group: dist.ProcessGroup) -> GroupedExperts:
    """All E experts, of which this rank gets its part of F from their owners. Collective."""
    R = group.size()

    def exchanged(parts: Tensor) -> Tensor:
        """parts [R, e, …], one for each rank → [E, …], those for this rank."""
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)
        return received.flatten(0, 1)

    def gate_up(weights: Tensor) -> Tensor:
        e, rows, columns = weights.shape
        parts = weights.view(e, 2, R, rows // (2 * R), columns).permute(2, 0, 1, 3, 4)
        return exchanged(parts).flatten(1, 2)

    def down(weights: Tensor) -> Tensor:
        e, rows, columns = weights.shape
        return exchanged(weights.view(e, rows, R, columns // R).permute(2, 0, 1, 3))

    options: dict[str, Any] = {"batch_invariant": experts.batch_invariant}
    if experts.gate_up_scales is not None and experts.down_scales is not None:
        options |= {
            "gate_up_scales": gate_up(experts.gate_up_scales),
            "down_scales": down(experts.down_scales),
        }
    return GroupedExperts(
        gate_up(experts.w_gate_up), down(experts.w_down), **options
    ).requires_grad_(False)


def gathered(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks."""
    out = rows.new_empty(group.size() * len(rows), rows.shape[1])
    dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
    return out


PEERS = [
    TensorParallel("torch TP, all-reduce", False),
    TensorParallel("torch TP, all-gather", True),
]
