"""A whole MoE layer that trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epmoe.local.experts import without_autocast
from epmoe.native.arguments import FLOATS, check_tensor, describe
from epmoe.training.exchange import Exchange
from epmoe.training.route import counted


class MoELayer(nn.Module):
    """Router, exchange and experts with gradients. Any number of layers share one `Exchange`.

    The experts apply the weights to their rows, so that combine only adds: the backward pass then needs no outputs of
    experts. A token whose routing is not finite yields zeros, and its logits get gradients of 0.

    Args:
        exchange: of the group whose ranks hold the experts.
        router_weight: fp32, fp16 or bf16 [E, D], of which the layer makes a parameter. Logits have its dtype.
        experts: maps rows [N, D], expert_offsets int32 [e + 1] and row weights fp32 [N] to weighted outputs [N, D], as
            `epmoe.training.GroupedExperts` do.
        bias: fp32 [E], a buffer, added to the scores for the choice of experts only.
        shared: maps tokens [T, D] to what is added to y [T, D].
        num_rows: as of `Exchange.dispatch`.
        tag: number of the layer, equal on all ranks; by default the next one of the exchange.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: `router_weight` or `bias` has another shape than the config says.
    """

    bias: Tensor | None

    def __init__(
        self,
        exchange: Exchange,
        router_weight: Tensor,
        experts: Callable[[Tensor, Tensor, Tensor], Tensor],
        *,
        bias: Tensor | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
        num_rows: int | Literal["exact"] = "exact",
        tag: int | None = None,
    ) -> None:
        if not isinstance(exchange, Exchange):
            raise TypeError(f"`exchange` must be an epmoe.training.Exchange, got {describe(exchange)}")
        config = exchange.ep.config
        check_tensor("router_weight", router_weight, FLOATS, (config.model.num_experts, config.model.hidden_size))
        if bias is not None:
            check_tensor("bias", bias, (torch.float32,), (config.model.num_experts,))
        elif config.routing.selection_bias:
            raise ValueError("`bias` must be given, since `routing.selection_bias` says that the router has one")
        if config.routing.logit_bias:
            raise ValueError("`routing.logit_bias` must be False: this layer adds none to the logits")
        super().__init__()
        self.exchange, self.experts, self.shared, self.num_rows = exchange, experts, shared, num_rows
        self.router_weight = nn.Parameter(router_weight)
        self.register_buffer("bias", bias)
        self.tag = exchange.ep.new_tag() if tag is None else tag
        self._routing = config.routing.options

    def forward(self, x: Tensor, num_tokens: int | Tensor | None = None) -> Tensor:
        """x [T, D] of this rank's tokens, or [B, T, D] of B·T tokens → y of the same shape and dtype.

        Collective, and so is the backward pass, also without tokens. An exception on this rank gives the round up, and
        the other ranks learn of it (`exchange.on_abort`).

        Args:
            x: tokens, in a dtype that the experts take.
            num_tokens: rows at and past it are padding and yield zeros.

        Returns:
            y.

        Raises:
            TypeError: x is no tensor, or has another dtype.
            ValueError: x has another shape or device.
            EPError: what dispatch and combine raise.
        """
        if not isinstance(x, Tensor) or x.dim() not in (2, 3):
            raise TypeError(f"`x` must be [T, D] or [B, T, D], got {describe(x)}")
        x_TD, exchange = x.flatten(0, -2), self.exchange
        top_k = exchange.ep.config.model.num_experts_per_tok
        with exchange.giving_up(x.dtype, tag=self.tag):
            with without_autocast(x.device):
                logits_TE = F.linear(x_TD.to(self.router_weight.dtype), self.router_weight)
            routing = counted(exchange.number, logits_TE, top_k, self.bias, num_tokens, **self._routing)
            routed = exchange.dispatch(
                x_TD, *routing, weights_on="rows", num_rows=self.num_rows, num_tokens=num_tokens, tag=self.tag
            )
            assert routed.row_weights is not None
            y_TD = exchange.combine(self.experts(routed.rows, routed.expert_offsets, routed.row_weights), routed)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view(x.shape)

    def extra_repr(self) -> str:
        """What `repr` says of the exchange."""
        return repr(self.exchange)
