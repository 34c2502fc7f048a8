"""The sides that `epmoe bench --training` compares: a whole layer, forward and backward, over
epmoe's exchange and over torch's `all_to_all_single`.

Letters in names and shapes: T counts the tokens of this rank, D is the hidden size, E counts the
experts of the model, K the experts of a token, and N the rows that arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.bench.sample import Sample
from epmoe.bench.sides import AllToAll, Side
from epmoe.layer import MoELayer
from epmoe.local.experts import GroupedExperts
from epmoe.local.simulate import Kind, simulate_logits
from epmoe.training import TrainingExchange, route

Through = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The part of a layer behind the router: it takes tokens [T, D], ids [T, K] and weights [T, K],
runs dispatch, experts and combine, and returns y [T, D].
"""


class TrainedLayer(Side):
    """The side of a layer with router, exchange and experts, for T tokens of this rank. `out` is
    the forward pass, and `back` the backward pass.

    The logits are simulated, so that the routing is that of the benchmark. They are written into
    the first E values of each token, from where the router reads them.
    """

    # The host needs longer to enqueue a pass than to enqueue a round.
    head_start_ms = 5

    def __init__(
        self, name: str, sample: Sample, routing: Kind, experts: GroupedExperts, through: Through
    ) -> None:
        model = sample.config.model
        R = sample.placement.ep_size
        T = sample.tokens
        self.name = name
        self.sample = sample
        self.through = through
        self.options = sample.config.routing.options | {"top_k": model.num_experts_per_tok}
        # Write the logits into the first values of each token. The router is an identity matrix,
        # which reads them from there. They are clamped, because −Inf times the zeros of the router
        # would be NaN.
        own_tokens = slice(sample.rank * T, (sample.rank + 1) * T)
        logits_TE = simulate_logits(routing, R * T, model.num_experts, ep_size=R)[own_tokens]
        num_logits = min(sample.hidden, model.num_experts)
        x_TD = sample.x_TD.detach().clone()
        x_TD[:, :num_logits] = logits_TE[:, :num_logits].clamp(min=-64).to(x_TD)
        generator = torch.Generator().manual_seed(sample.rank)
        self.grad_TD = torch.randn(x_TD.shape, generator=generator).to(x_TD)
        self.x_TD = x_TD.requires_grad_()
        self.router_ED = torch.eye(model.num_experts, sample.hidden).to(x_TD).requires_grad_()
        self.inputs = [self.x_TD, self.router_ED, *experts.parameters()]

    def out(self) -> Tensor:
        logits_TE = F.linear(self.x_TD, self.router_ED)
        routing = route(logits_TE, **self.options)
        return self.through(self.x_TD, *routing)

    def back(self, y_TD: Tensor) -> list[Tensor]:
        return in_memory_order(torch.autograd.grad(y_TD, self.inputs, self.grad_TD))

    def arrived(self, y_TD: Tensor) -> list[Tensor]:
        return [y_TD.detach()]

    def results(self) -> list[Tensor]:
        """Run one pass. Returns y and all gradients."""
        y_TD = self.out()
        return [*self.arrived(y_TD), *self.back(y_TD)]

    def memory_bytes(self) -> int:
        """Run one pass, and find how many bytes of a GPU it takes at most. Inputs, weights and
        gradients are included.
        """
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.back(self.out())
        pass_bytes = torch.cuda.max_memory_allocated() - before
        return pass_bytes + sum(tensor.nbytes for tensor in (*self.inputs, self.grad_TD))


class EagerLayer(Side):
    """The side of a `MoELayer`, as users have it, with the tokens and weights of a `TrainedLayer`
    and over the same exchange. Its experts share the memory of `experts`.

    `rows` is the number of rows that arrive. Raises ValueError if the layer of the configuration
    needs more than these experts and this router.
    """

    def __init__(
        self, layer: TrainedLayer, exchange: TrainingExchange, experts: GroupedExperts, rows: int
    ) -> None:
        # A `MoELayer` over several ranks turns the parameters of its experts into DTensors. So it
        # gets experts of its own: the parameters of `experts` must stay plain tensors.
        layer_experts = GroupedExperts(
            experts.w_gate_up.detach(), experts.w_down.detach(), gemm=experts.wanted
        )
        router_ED = layer.router_ED.detach()
        self.name = "the layer, eager"
        self.layer = MoELayer(
            exchange.ep, router_ED, layer_experts, exchange=exchange, num_rows=rows
        )
        self.x_TD = layer.x_TD
        self.grad_TD = layer.grad_TD
        self.inputs = [self.x_TD, *self.layer.requires_grad_().parameters()]

    def out(self) -> Tensor:
        y_TD: Tensor = self.layer(self.x_TD)
        return y_TD

    def back(self, y_TD: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y_TD, self.inputs, self.grad_TD)


class OverExchange:
    """A `Through` over epmoe's exchange, with the same calls as a `MoELayer`.

    The first call counts the rows that arrive, for which the host waits. Later calls return this
    number of rows, so that they can be captured into CUDA graphs.
    """

    def __init__(self, exchange: TrainingExchange, experts: GroupedExperts) -> None:
        self.exchange = exchange
        self.experts = experts
        self.num_rows: int | Literal["exact"] = "exact"

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        routed = self.exchange.dispatch(
            x_TD, ids_TK, weights_TK, weights_on="both", num_rows=self.num_rows
        )
        self.num_rows = len(routed.rows)
        outputs_ND = self.experts(
            routed.rows, routed.expert_offsets, row_weights=routed.row_weights
        )
        return self.exchange.combine(outputs_ND, routed)


def over_all_to_all(pairs: AllToAll, experts: GroupedExperts) -> Through:
    """Make a `Through` over torch's `all_to_all_single`, with a row for each pair of a token and an
    expert.
    """

    def through(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        sent = pairs.sent(x_TD, ids_TK)
        outputs_ND = experts(sent.rows, sent.expert_offsets.int())
        return pairs.summed(outputs_ND, weights_TK, sent)

    return through


def pass_figures(layer: TrainedLayer, forward: float, backward: float) -> dict[str, float]:
    """Make the figures of a layer, by the keys of the columns. `forward` and `backward` are the
    times of the two passes in µs.
    """
    # Each pair of a token and an expert takes three products, with a multiplication and an addition
    # for each element of a weight. The backward pass takes twice as many.
    model = layer.sample.config.model
    pairs = layer.sample.tokens * model.num_experts_per_tok
    flop = 6 * pairs * model.hidden_size * (model.intermediate_size or 0)
    return {
        "layer": forward + backward,
        "forward": forward,
        "backward": backward,
        "forward_tflops": flop / forward * 1e-6,
        "backward_tflops": 2 * flop / backward * 1e-6,
    }


def in_memory_order(gradients: Iterable[Tensor]) -> list[Tensor]:
    """View gradients with their dimensions in the order of memory, so that they are contiguous. A
    GEMM may return the gradient of a weight transposed.
    """
    ordered = []
    for gradient in gradients:
        dims = sorted(range(gradient.ndim), key=gradient.stride, reverse=True)
        ordered.append(gradient.permute(dims))
    return ordered
