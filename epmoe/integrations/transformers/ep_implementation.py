"""The EP implementation of transformers ≥ 5.23: each rank holds its share of the expert weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from epmoe.integrations.batches import Arrived, Computation
from epmoe.integrations.transformers import fp8
from epmoe.integrations.transformers.experts import can_group, computation, parameters_of, trains
from epmoe.integrations.transformers.graphs import allow_in_graphs, call
from epmoe.integrations.transformers.settings import share


class EpmoeEP(EPImplementation):
    """Spreads experts over `ep_mesh`. The ranks of one `tp_mesh` have the same batch; each sends a
    slice of it.
    """

    # Gradients are those of transformers' own implementations: an expert's is the sum over all
    # ranks, each rank of `tp_mesh` has the whole gradients of x and of the weights, and FSDP
    # divides.

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._module = experts
        if can_group(experts) and fp8.is_quantized(experts):
            fp8.check(experts)
            # FSDP takes weights and scales of two dtypes only where they need no grad.
            experts.requires_grad_(False)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """This rank's tokens [T,D], global expert ids and weights [T,K] → weighted
        outputs [T,D].
        """
        parameters = parameters_of(self._module) if can_group(self._module) else []
        return call(self, EpmoeEP._forward, parameters, hidden_states, top_k_index, top_k_weights)

    def _forward(
        self, parameters: list[Tensor], x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """Run the experts of a module over the ranks, in place of its `forward`."""
        num_experts = self.num_local_experts * self.ep_mesh.size()
        layers = share(x_TD, ids_TK, num_experts, self.ep_mesh.get_group())
        trained = trains(self._module, parameters, x_TD, weights_TK)
        if layers.static and not trained:
            if not parameters:
                raise ValueError(
                    "static mode needs experts in fp32, fp16, bf16 or fp8 with transformers' "
                    '`experts_implementation="grouped_mm"`: other kernels need counts on the host'
                )
            allow_in_graphs(self, EpmoeEP._forward)
        # The experts: epmoe's where they compute the same, else the module's own.
        ours = Computation(self._by_pairs, trains=trained)
        if parameters:
            ours = computation(self._module, parameters, slice(self.num_local_experts), trained)
        # Ranks that share a batch send a slice each.
        num_tokens = x_TD.shape[0]
        sharers = self.tp_mesh.size()
        slice_tokens = -(-num_tokens // sharers)
        if sharers > 1:
            x_TD = self._slice(x_TD, slice_tokens, trained)
            ids_TK = self._slice(ids_TK, slice_tokens, trained)
            weights_TK = self._slice(weights_TK, slice_tokens, trained)
        longest = slice_tokens if self.shares_batch else None
        output = layers.run(x_TD, ids_TK, weights_TK, ours, layers.tag_of(self), longest=longest)
        if sharers == 1:
            return output
        return self._gather(output, num_tokens, slice_tokens, trained)

    def _by_pairs(self, arrived: Arrived) -> Tensor:
        """Compute outputs by the module's own forward, which takes pairs of a row and an expert,
        and needs n on the host.
        """
        rows = arrived.plain()
        offsets = arrived.segments.offsets
        n = int(offsets[-1])
        if n == 0 and len(rows):
            return rows
        # The output of a row of zeros keeps the parameters in autograd's graph.
        if n == 0:
            zeros = rows.new_zeros(1, rows.shape[1])
            first_expert = offsets.new_zeros(1, 1).long()
            return self.experts_forward(zeros, first_expert, rows.new_ones(1, 1))[:0]
        ids = torch.repeat_interleave(offsets.diff().long(), output_size=n)
        return self.experts_forward(rows[:n], ids[:, None], rows.new_ones(n, 1))

    def _slice(self, tensor: Tensor, slice_tokens: int, trained: bool) -> Tensor:
        """This rank's slice of a tensor that all ranks of `tp_mesh` have. The gradient is that of
        all slices.
        """
        if trained:
            whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
            return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()
        start = slice_tokens * self.tp_mesh.get_local_rank()
        return tensor[start : start + slice_tokens]

    def _gather(self, output: Tensor, num_tokens: int, slice_tokens: int, trained: bool) -> Tensor:
        """Gather the slices of all ranks of `tp_mesh`, [num_tokens, D]. A slice gets its part of
        the gradient.
        """
        D = output.shape[1]
        if trained:
            options: dict[str, Any] = {"shape": torch.Size((num_tokens, D)), "stride": (D, 1)}
            sliced = DTensor.from_local(output.contiguous(), self.tp_mesh, [Shard(0)], **options)
            return sliced.full_tensor()
        # Slices of equal length, as a gather wants them.
        padded = nn.functional.pad(output, (0, 0, 0, slice_tokens - output.shape[0]))
        slices = padded.new_empty(self.tp_mesh.size(), *padded.shape)
        dist.all_gather(list(slices), padded, group=self.tp_mesh.get_group())
        return slices.flatten(0, 1)[:num_tokens]
