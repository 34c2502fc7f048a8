"""A whole MoE layer over an `ExpertParallel`: router, exchange and experts, in six calls."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from epmoe.service import ExpertParallel


class MoELayer(nn.Module):
    """Router, exchange and experts of one layer. Any number of layers share one `ExpertParallel` and its windows.

    Args:
        ep: of the group whose ranks hold the experts.
        router_weight: [E, D]; the logits are computed in its dtype.
        experts: maps rows [N, D], expert_offsets int32 [e+1] and scales (fp32 [N, D/128] with an fp8 payload, otherwise
            None) to outputs [N, D], as `SwiGLUExperts` does.
        bias: fp32 [E], added to the scores for the choice of experts only.
        apply_router_weight_on_input: as of `ExpertParallel.dispatch`.

    Raises:
        ValueError: `router_weight` has another shape than the config says.
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
        """x [T, D] of this rank's tokens → y [T, D] in x's dtype. Collective: every rank calls, also with T = 0.

        Rows at and past `num_tokens`, an int or an int32 scalar tensor on the device, are padding and yield zeros.
        Raises what `ExpertParallel.dispatch` and `ExpertParallel.combine` raise.
        """
        router_in_TD = x_TD.to(self.router_weight.dtype)
        logits_TE = F.linear(router_in_TD, self.router_weight)
        routing = self.ep.route(logits_TE, bias=self.bias, num_tokens=num_tokens)
        d = self.ep.dispatch(
            x_TD, routing.ids, routing.weights, num_tokens=num_tokens,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
        )  # fmt: skip
        expert_rows_ND = self.experts(d.rows, d.expert_offsets, d.scales)
        return self.ep.combine(expert_rows_ND, d)
