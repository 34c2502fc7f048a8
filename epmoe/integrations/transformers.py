"""epmoe in Hugging Face transformers: importing this module registers the name `"epmoe"` in two ways.

As an EP implementation (transformers ≥ 5.23): each rank holds its share of the expert weights.

    import epmoe.integrations.transformers
    parallel = DistributedConfig(tp_size=1, fsdp_size=8, ep_size=8, ep_implementation="epmoe")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=parallel)

As an experts function (transformers ≥ 5.17): each rank holds all weights and computes its share of the experts.

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="epmoe")

Every rank may bring its own batch, of any length, also an empty one. A rank that finishes `generate` early must keep
stepping: the EP implementation does so by default, and the experts function needs `synced_gpus=True`. Inference only,
under `torch.no_grad()`, because torch's FSDP refuses inference mode. All layers share one `ExpertParallel`; see
`configure`, `close` and `shared`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from epmoe.integrations.shared import close, configure, share, shared

try:
    import transformers
except ImportError as error:
    raise ImportError("epmoe.integrations.transformers needs transformers: pip install 'epmoe[hf]'") from error
from packaging.version import Version

if Version(transformers.__version__) < Version("5.17"):
    raise ImportError(
        f"epmoe.integrations.transformers needs transformers 5.17 or newer, got {transformers.__version__}"
    )
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

__all__ = ["close", "configure", "experts_forward", "shared"]


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function: this rank's tokens [T,D], expert ids and weights [T,K] → weighted outputs [T,D].

    Its group is that of `configure(group=…)`, by default the world. A single process is a group of one.
    """
    if getattr(self, "_is_expert_parallel", False):  # transformers 5.17 does not set it
        raise ValueError(
            '`experts_implementation="epmoe"` must be left out where the experts are already spread over ranks: '
            'with `DistributedConfig(ep_size=…)`, `ep_implementation="epmoe"` alone does it'
        )
    layers = share(hidden_states, top_k_index, self.num_experts)
    owned = torch.tensor(layers.ep.placement.local_experts(layers.ep.rank), device=hidden_states.device)

    def experts(rows: torch.Tensor, local_ids: torch.Tensor) -> torch.Tensor:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, rows, *_top_1(rows, owned[local_ids]))

    rounds = layers.agree_on_rounds(hidden_states.shape[0])
    return layers.run(hidden_states, top_k_index, top_k_weights, experts, rounds)


def _top_1(rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n,1] and unit weights [n,1]: the experts only compute, and `combine` applies the weights and sums."""
    return ids[:, None], rows.new_ones(len(ids), 1)


ExpertsInterface.register("epmoe", experts_forward)

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError:  # transformers < 5.23 has the experts function only
    pass
else:

    class EpmoeEP(EPImplementation):
        """Experts spread over `ep_mesh`. The ranks of one `tp_mesh` have the same batch; each sends a slice of it."""

        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            """This rank's tokens [T,D], global expert ids and weights [T,K] → weighted outputs [T,D]."""
            num_experts = self.num_local_experts * self.ep_mesh.size()
            layers = share(hidden_states, top_k_index, num_experts, self.ep_mesh.get_group())
            num_tokens, sharers = hidden_states.shape[0], self.tp_mesh.size()
            slice_tokens = -(-num_tokens // sharers)
            start = slice_tokens * self.tp_mesh.get_local_rank()
            mine = slice(start, start + slice_tokens)
            rounds = (layers.rounds if self.shares_batch else layers.agree_on_rounds)(slice_tokens)
            output = layers.run(hidden_states[mine], top_k_index[mine], top_k_weights[mine], self._experts, rounds)
            return output if sharers == 1 else self._gather(output, slice_tokens)[:num_tokens]

        def _experts(self, rows: torch.Tensor, local_ids: torch.Tensor) -> torch.Tensor:
            return self.experts_forward(rows, *_top_1(rows, local_ids))

        def _gather(self, output: torch.Tensor, slice_tokens: int) -> torch.Tensor:
            """The slices of all ranks that share the batch, each padded to `slice_tokens` rows."""
            padded = nn.functional.pad(output, (0, 0, 0, slice_tokens - output.shape[0]))
            slices = [torch.empty_like(padded) for _ in range(self.tp_mesh.size())]
            dist.all_gather(slices, padded, group=self.tp_mesh.get_group())
            return torch.cat(slices)

    EPImplementationInterface.register("epmoe", EpmoeEP)
    __all__ += ["EpmoeEP"]
