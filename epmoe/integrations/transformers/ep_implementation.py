"""The EP implementation of transformers ≥ 5.23: each rank holds its share of the expert weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation

from epmoe.integrations.batches import Arrived, SharedExpertParallel
from epmoe.integrations.transformers import fp8, training
from epmoe.integrations.transformers.graphs import allow_in_graphs, call
from epmoe.integrations.transformers.grouped import Computation, can_group, computation, parameters_of
from epmoe.integrations.transformers.settings import share


class EpmoeEP(EPImplementation):
    """Experts spread over `ep_mesh`. The ranks of one `tp_mesh` have the same batch; each sends a slice of it."""

    # Gradients are those of transformers' own implementations: an expert's is the sum over all ranks, each rank of
    # `tp_mesh` has the whole gradients of x and of the weights, and FSDP divides.

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._module = experts
        if can_group(experts) and fp8.is_quantized(experts):
            fp8.check(experts)
            experts.requires_grad_(False)  # FSDP takes weights and scales of two dtypes only where they need no grad

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """This rank's tokens [T,D], global expert ids and weights [T,K] → weighted outputs [T,D]."""
        parameters = parameters_of(self._module) if can_group(self._module) else []
        return call(self, EpmoeEP._forward, parameters, hidden_states, top_k_index, top_k_weights)

    def _forward(self, parameters: list[Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        layers = share(x, ids, self.num_local_experts * self.ep_mesh.size(), self.ep_mesh.get_group())
        if training.trains(self._module, parameters, x, weights):
            return self._train(layers, parameters, x, ids, weights)
        if layers.static:
            if not parameters:
                raise ValueError(
                    "static mode needs experts in fp32, fp16, bf16 or fp8 with transformers' "
                    '`experts_implementation="grouped_mm"`: other kernels need counts on the host'
                )
            allow_in_graphs(self, EpmoeEP._forward)
        num_tokens = x.shape[0]
        sharers = self.tp_mesh.size()
        slice_tokens = -(-num_tokens // sharers)
        start = slice_tokens * self.tp_mesh.get_local_rank()
        mine = slice(start, start + slice_tokens)
        tag = layers.tag_of(self)
        ours = Computation(self._by_pairs)
        if parameters:
            ours = computation(self._module, parameters, slice(self.num_local_experts))
        longest = slice_tokens if self.shares_batch else layers.longest_batch(slice_tokens, tag, ours.aligned)
        output = layers.run(x[mine], ids[mine], weights[mine], ours.experts, longest, tag, ours.aligned)
        return output if sharers == 1 else self._gather(output, slice_tokens)[:num_tokens]

    def _train(
        self, layers: SharedExpertParallel, parameters: list[Tensor], x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        layers.check_trains()
        num_tokens = x.shape[0]
        tag = layers.tag_of(self)
        sharers = self.tp_mesh.size()
        ours = Computation(self._by_pairs_in_graph)
        if parameters:
            ours = training.computation(self._module, parameters, slice(self.num_local_experts))
        if sharers > 1:
            x, ids, weights = (training.sliced(tensor, self.tp_mesh) for tensor in (x, ids, weights))
        slice_tokens = -(-num_tokens // sharers)
        longest = slice_tokens if self.shares_batch else layers.longest_batch(slice_tokens, tag)
        output = layers.run(x, ids, weights, ours.experts, longest, tag, trains=True)
        return output if sharers == 1 else training.gathered(output, num_tokens, self.tp_mesh)

    def _by_pairs(self, arrived: Arrived) -> Tensor:
        """Outputs by the module's own forward, which takes pairs of a row and an expert, and needs n on the host."""
        rows = arrived.plain()
        n = int(arrived.expert_offsets[-1])
        if n == 0:
            return rows
        ids = torch.repeat_interleave(arrived.expert_offsets.diff().long(), output_size=n)
        return self.experts_forward(rows[:n], ids[:, None], rows.new_ones(n, 1))

    def _by_pairs_in_graph(self, arrived: Arrived) -> Tensor:
        """Outputs with gradients. Without rows, the output of a row of zeros keeps the parameters in the graph."""
        if len(arrived.rows):
            return self._by_pairs(arrived)
        row = arrived.rows.new_zeros(1, arrived.rows.shape[1])
        zero = arrived.expert_offsets.new_zeros(1, 1).long()
        return self.experts_forward(row, zero, row.new_ones(1, 1))[:0]

    def _gather(self, output: Tensor, slice_tokens: int) -> Tensor:
        """The slices of all ranks that share the batch, each padded to `slice_tokens` rows."""
        padded = nn.functional.pad(output, (0, 0, 0, slice_tokens - output.shape[0]))
        slices = padded.new_empty(self.tp_mesh.size(), *padded.shape)
        dist.all_gather(list(slices), padded, group=self.tp_mesh.get_group())
        return slices.flatten(0, 1)
