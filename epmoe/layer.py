"""An MoE layer over an `ExpertParallel`, in six calls."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from epmoe.service import ExpertParallel


class MoELayer(nn.Module):
    """Router, exchange and experts of one layer. Any number of layers share one `ExpertParallel` and its windows.

    router_weight [E, D] (its dtype is the one that logits are computed in); `experts` maps (rows [N, D],
    expert_offsets [e+1], scales or None) to outputs [N, D], as `SwiGLUExperts` does; bias [E] fp32 steers the choice;
    `apply_router_weight_on_input` is that of `ExpertParallel.dispatch`.
    """

    router_weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        ep: ExpertParallel,
        router_weight: Tensor,
        experts: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        *,
        bias: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> None:
        want = (ep.config.model.num_experts, ep.config.model.hidden_size)
        if router_weight.shape != want:
            raise ValueError(f"`router_weight` must be {list(want)}, got {list(router_weight.shape)}")
        super().__init__()
        self.ep, self.experts = ep, experts
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.register_buffer("router_weight", router_weight)
        self.register_buffer("bias", bias)

    def forward(self, x_TD: Tensor, num_tokens: int | Tensor | None = None) -> Tensor:
        """x [T, D] of this rank's tokens → y [T, D]; rows at and past `num_tokens` are padding and yield zeros.

        Every rank of the group takes part in every call, also with T = 0.
        """
        router_in_TD = x_TD.to(self.router_weight.dtype)
        logits_TE = F.linear(router_in_TD, self.router_weight)
        routing = self.ep.route(logits_TE, bias=self.bias, num_tokens=num_tokens)
        d = self.ep.dispatch(
            x_TD, routing.ids, routing.weights, num_tokens=num_tokens,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
        )  # fmt: skip
        expert_rows_ND = self.experts(d.rows, d.expert_offsets, getattr(d, "scales", None))
        return self.ep.combine(expert_rows_ND, d)
