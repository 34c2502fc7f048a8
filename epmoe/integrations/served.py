"""`GroupedExperts` of a layer of a serving framework, over the open rounds of its exchange."""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.exchange.handles import Dispatched
from epmoe.local.experts import GroupedExperts, is_called_alone
from epmoe.local.gemm.gemm import Segments


class ServedExperts:
    """Calls of `GroupedExperts` whose checks the first round of a kind makes: later ones are
    compared with it, as in a `MoELayer`.
    """

    def __init__(self, experts: GroupedExperts) -> None:
        self.experts = experts
        # Dtype and D of rounds whose rows fit.
        self._fitting: tuple[torch.dtype, int] | None = None

    def __call__(self, rows_ND: Tensor, scales: Tensor | None, d: Dispatched) -> Tensor:
        """Outputs [N, D] of rows that `d` has brought, all or the first ones, and of their scales.

        Raises what `GroupedExperts` do.
        """
        experts = self.experts
        kind = (d.dtype, d.hidden_size)
        if kind == self._fitting and not torch.is_grad_enabled() and is_called_alone(experts):
            segments = Segments(
                d.expert_offsets, d.tokens_per_expert, d.alignment, d.rows_per_expert
            )
            return experts.serve(rows_ND, scales, segments, None)
        # Hooks, gradients, or a first round.
        outputs_ND: Tensor = experts(rows_ND, d.expert_offsets, scales, **d.segments)
        self._fitting = kind
        return outputs_ND
