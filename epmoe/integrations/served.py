"""Calls the `GroupedExperts` of a serving framework's layer on the rows of a round."""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.exchange.handles import Dispatched
from epmoe.local.experts import GroupedExperts, is_called_alone
from epmoe.local.gemm.gemm import Segments


class ServedExperts:
    """Calls `GroupedExperts`, and repeats their checks only where rows are of a new kind.

    The first round with a certain dtype and hidden size makes all checks. Later rounds with the
    same dtype and hidden size skip them, as in a `MoELayer`.
    """

    def __init__(self, experts: GroupedExperts) -> None:
        self.experts = experts
        # Dtype and hidden size of the latest round that has passed all checks.
        self._checked: tuple[torch.dtype, int] | None = None

    def __call__(self, rows_ND: Tensor, scales: Tensor | None, d: Dispatched) -> Tensor:
        """Compute the experts' outputs [N, D] for the rows of the open round `d`.

        `rows_ND` are all rows of `d`, or the first N of them, and `scales` are the scales of fp8
        rows. Raises the errors of `GroupedExperts`.
        """
        experts = self.experts
        kind = (d.dtype, d.hidden_size)
        # Without gradients and hooks, and with rows of a kind that has passed, serve directly.
        if kind == self._checked and not torch.is_grad_enabled() and is_called_alone(experts):
            segments = Segments(
                d.expert_offsets, d.tokens_per_expert, d.alignment, d.rows_per_expert
            )
            return experts.serve(rows_ND, scales, segments, None)
        # Gradients, hooks of the module, and the first round of a kind need the module's own call.
        outputs_ND: Tensor = experts(rows_ND, d.expert_offsets, scales, **d.segments)
        self._checked = kind
        return outputs_ND
