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
    """Compute the weighted outputs [T, D] of this rank's tokens [T, D], given expert ids and
    weights [T, K].

    The group is that of `configure(group=…)`, by default the world. A single process is a group of
    one.
    """
    # Newer transformers than 5.17 say so.
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
    layers = share(x_TD, ids_TK, module.num_experts)
    trains = experts.trains(module, parameters, x_TD, weights_TK)
    if layers.static and not trains:
        allow_in_graphs(module, _forward)
    ours = experts.computation(module, parameters, layers.held, trains)
    return layers.run(x_TD, ids_TK, weights_TK, ours, layers.tag_of(module))


def warn_where_ignored() -> None:
    """Make transformers warn of models whose code never looks at `experts_implementation`, such as
    Llama 4.
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
