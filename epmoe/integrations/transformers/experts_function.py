"""The experts function of transformers: each rank holds all weights and computes its share of the
experts.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from epmoe.config.from_hf import EXPERTS_KEYS
from epmoe.integrations.transformers import experts
from epmoe.integrations.transformers.graphs import allow_in_graphs, call
from epmoe.integrations.transformers.settings import share


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the weighted sums [T, D] of the experts' outputs for this rank's tokens. Collective.

    transformers calls this as the forward of a module of experts, `self`. `hidden_states` [T, D]
    are the T tokens of this rank. `top_k_index` and `top_k_weights` [T, K] are the ids of the K
    experts of each token, and their weights. The group is that of `configure(group=…)`, by default
    the world. A single process is a group of one.
    """
    # transformers after 5.17 marks modules whose experts it has spread over ranks itself.
    if getattr(self, "_is_expert_parallel", False):
        raise ValueError(
            '`experts_implementation="epmoe"` must be left out where the experts are already '
            'spread over ranks: with `DistributedConfig(ep_size=…)`, `ep_implementation="epmoe"` '
            "alone does it"
        )
    return call(
        self, _forward, experts.parameters_of(self), hidden_states, top_k_index, top_k_weights
    )


def _forward(
    module: Any, parameters: list[Tensor], x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Run the experts of `module` over all ranks. Each rank has the weights of all experts, and
    computes the share that belongs to it. `parameters` is the list of `parameters_of`.
    """
    layers = share(x_TD, ids_TK, module.num_experts)
    trains = experts.trains(module, parameters, x_TD, weights_TK)
    if layers.static and not trains:
        allow_in_graphs(module, _forward)
    local_experts = experts.computation(module, parameters, layers.held, trains)
    return layers.run(x_TD, ids_TK, weights_TK, local_experts, layers.tag_of(module))


def warn_where_ignored() -> None:
    """Make transformers warn of models for which `experts_implementation="epmoe"` does nothing.

    The code of such a model, as that of Llama 4, calls its experts itself. This function replaces
    the method of transformers that chooses the implementation, once, when the package is imported.
    """
    check = PreTrainedModel.get_correct_experts_implementation

    def warning_check(self: Any, requested: str | None) -> str:
        chosen: str = check(self, requested)
        is_ignored = chosen == "epmoe" and not self._can_set_experts_implementation()
        has_experts = any(map(self.config.to_dict().get, EXPERTS_KEYS))
        if is_ignored and has_experts:
            warnings.warn(
                f'`experts_implementation="epmoe"` does nothing for {self.config.model_type}: its '
                "code in transformers calls its experts itself, so that every rank computes all "
                "of them. Put `MoELayer`s into the model, as docs/models.md says",
                stacklevel=2,
            )
        return chosen

    PreTrainedModel.get_correct_experts_implementation = warning_check
