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
    """Spreads the experts of a module over the ranks of `ep_mesh`.

    The ranks of one `tp_mesh` have the same batch, so each of them sends only a slice of it.
    """

    # The gradients are the same as with transformers' own implementations. The gradient of an
    # expert's weights is the sum over all ranks. Each rank of `tp_mesh` gets the complete gradients
    # of its tokens and of their router weights. FSDP divides by the number of ranks.

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._module = experts
        if can_group(experts) and fp8.is_quantized(experts):
            fp8.check(experts)
            # FSDP refuses parameters of two dtypes that need gradients, as weights and scales are.
            experts.requires_grad_(False)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sums [T, D] of the experts' outputs. Collective.

        `hidden_states` [T, D] are the T tokens of this rank. `top_k_index` and `top_k_weights`
        [T, K] are the global ids of the K experts of each token, and their weights.
        """
        parameters = parameters_of(self._module) if can_group(self._module) else []
        return call(self, EpmoeEP._forward, parameters, hidden_states, top_k_index, top_k_weights)

    def _forward(
        self, parameters: list[Tensor], x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """Run the experts of the module over all ranks, in place of the module's `forward`.

        `parameters` is the list of `parameters_of`. It is empty where epmoe's GEMMs do not compute
        what the module computes.
        """
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
        # Compute the experts by epmoe's GEMMs where they give the same results, otherwise by the
        # module's own forward.
        experts = Computation(self._compute_by_module, trains=trained)
        if parameters:
            held = slice(self.num_local_experts)
            experts = computation(self._module, parameters, held, trained)
        # The ranks of `tp_mesh` have the same batch, and each sends a slice of it.
        num_tokens = x_TD.shape[0]
        tp_size = self.tp_mesh.size()
        slice_tokens = -(-num_tokens // tp_size)
        if tp_size > 1:
            x_TD = self._slice(x_TD, slice_tokens, trained)
            ids_TK = self._slice(ids_TK, slice_tokens, trained)
            weights_TK = self._slice(weights_TK, slice_tokens, trained)
        # Where all ranks have the same batch, this rank knows the longest slice.
        longest = slice_tokens if self.shares_batch else None
        tag = layers.tag_of(self)
        output = layers.run(x_TD, ids_TK, weights_TK, experts, tag, longest=longest)
        if tp_size == 1:
            return output
        return self._gather(output, num_tokens, slice_tokens, trained)

    def _compute_by_module(self, arrived: Arrived) -> Tensor:
        """Compute the outputs by the module's own forward.

        That function takes one expert and one weight for each row, so the host waits for the number
        of rows. The weights are 1, because combine applies the router's weights.
        """
        rows = arrived.plain()
        offsets = arrived.segments.offsets
        num_rows = int(offsets[-1])
        # No row has arrived, and `rows` is only padding, whose outputs nobody reads.
        if num_rows == 0 and len(rows):
            return rows
        # No row has arrived in training. The experts compute a row of zeros, so that autograd's
        # graph has their parameters, and the result is cut to no rows.
        if num_rows == 0:
            zeros = rows.new_zeros(1, rows.shape[1])
            first_expert = offsets.new_zeros(1, 1).long()
            return self.experts_forward(zeros, first_expert, rows.new_ones(1, 1))[:0]
        ids = torch.repeat_interleave(offsets.diff().long(), output_size=num_rows)
        return self.experts_forward(rows[:num_rows], ids[:, None], rows.new_ones(num_rows, 1))

    def _slice(self, tensor: Tensor, slice_tokens: int, trained: bool) -> Tensor:
        """Cut this rank's slice of `slice_tokens` rows out of a tensor that all ranks of `tp_mesh`
        have. With `trained`, the backward pass gathers the gradients of all slices.
        """
        if trained:
            whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
            return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()
        start = slice_tokens * self.tp_mesh.get_local_rank()
        return tensor[start : start + slice_tokens]

    def _gather(self, output: Tensor, num_tokens: int, slice_tokens: int, trained: bool) -> Tensor:
        """Gather the slices of all ranks of `tp_mesh` into [num_tokens, D]. With `trained`, the
        backward pass gives each rank the gradient of its own slice.
        """
        D = output.shape[1]
        if trained:
            options: dict[str, Any] = {"shape": torch.Size((num_tokens, D)), "stride": (D, 1)}
            sliced = DTensor.from_local(output.contiguous(), self.tp_mesh, [Shard(0)], **options)
            return sliced.full_tensor()
        # Pad the slices to the same length, as all_gather wants them, and cut the padding off.
        padded = nn.functional.pad(output, (0, 0, 0, slice_tokens - output.shape[0]))
        slices = padded.new_empty(self.tp_mesh.size(), *padded.shape)
        dist.all_gather(list(slices), padded, group=self.tp_mesh.get_group())
        return slices.flatten(0, 1)[:num_tokens]
