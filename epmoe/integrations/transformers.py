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

With `configure(static=True)` the host looks at no count, and forward passes can be compiled and captured into CUDA
graphs:

    configure(static=True, max_num_tokens_per_rank=128)
    model.generate(**inputs, cache_implementation="static")  # transformers compiles it
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from epmoe.integrations.compiled import call, give_number
from epmoe.integrations.grouped import can_group, grouped_experts, parameters_of
from epmoe.integrations.session import close, configure, poll, share, shared

try:
    import transformers
except ImportError as error:
    raise ImportError("epmoe.integrations.transformers needs transformers: pip install 'epmoe[hf]'") from error
from packaging.version import Version

if Version(transformers.__version__) < Version("5.17"):
    raise ImportError(
        f"epmoe.integrations.transformers needs transformers 5.17 or newer, got {transformers.__version__}"
    )
from transformers.integrations.moe import ExpertsInterface

__all__ = ["close", "configure", "experts_forward", "poll", "shared"]


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
    return call(self, _spread, parameters_of(self), hidden_states, top_k_index, top_k_weights)


def _spread(
    module: Any, parameters: list[torch.Tensor], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    layers = share(x, ids, module.num_experts)
    owned = layers.ep.placement.local_experts(layers.ep.rank)  # in one block
    if layers.static:
        give_number(module, _spread)

    def experts(rows: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
        return grouped_experts(module, parameters, rows, expert_offsets, first=owned[0] if owned else 0)

    tag = layers.tag_of(module)
    return layers.run(x, ids, weights, experts, layers.longest_batch(x.shape[0], tag), tag)


ExpertsInterface.register("epmoe", experts_forward)

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError:  # transformers < 5.23 has the experts function only
    pass
else:

    class EpmoeEP(EPImplementation):
        """Experts spread over `ep_mesh`. The ranks of one `tp_mesh` have the same batch; each sends a slice of it."""

        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self._module = experts

        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            """This rank's tokens [T,D], global expert ids and weights [T,K] → weighted outputs [T,D]."""
            parameters = parameters_of(self._module) if can_group(self._module) else []
            return call(self, EpmoeEP._spread, parameters, hidden_states, top_k_index, top_k_weights)

        def _spread(
            self, parameters: list[torch.Tensor], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            layers = share(x, ids, self.num_local_experts * self.ep_mesh.size(), self.ep_mesh.get_group())
            if layers.static:
                if not parameters:
                    raise ValueError(
                        "static mode needs experts in fp32, fp16 or bf16 with transformers' "
                        '`experts_implementation="grouped_mm"`: other kernels need counts on the host'
                    )
                give_number(self, EpmoeEP._spread)
            num_tokens, sharers = x.shape[0], self.tp_mesh.size()
            slice_tokens = -(-num_tokens // sharers)
            start = slice_tokens * self.tp_mesh.get_local_rank()
            mine = slice(start, start + slice_tokens)
            tag = layers.tag_of(self)
            longest = slice_tokens if self.shares_batch else layers.longest_batch(slice_tokens, tag)

            def experts(rows: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
                if parameters:
                    return grouped_experts(self._module, parameters, rows, expert_offsets)
                return self._by_pairs(rows, expert_offsets)

            output = layers.run(x[mine], ids[mine], weights[mine], experts, longest, tag)
            return output if sharers == 1 else self._gather(output, slice_tokens)[:num_tokens]

        def _by_pairs(self, rows: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
            """By the module's own forward, which takes pairs of a row and an expert, and needs n on the host."""
            n = int(expert_offsets[-1])
            if n == 0:
                return rows
            ids = torch.repeat_interleave(expert_offsets.diff().long(), output_size=n)
            return self.experts_forward(rows[:n], ids[:, None], rows.new_ones(n, 1))

        def _gather(self, output: torch.Tensor, slice_tokens: int) -> torch.Tensor:
            """The slices of all ranks that share the batch, each padded to `slice_tokens` rows."""
            padded = nn.functional.pad(output, (0, 0, 0, slice_tokens - output.shape[0]))
            slices = padded.new_empty(self.tp_mesh.size(), *padded.shape)
            dist.all_gather(list(slices), padded, group=self.tp_mesh.get_group())
            return slices.flatten(0, 1)

    EPImplementationInterface.register("epmoe", EpmoeEP)
    __all__ += ["EpmoeEP"]
