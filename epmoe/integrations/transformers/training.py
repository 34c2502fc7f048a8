"""A module's experts with gradients: its weights and gate, and the GEMMs of `epmoe.local.gemm.gradients`.

    trains ─▶ computation ─▶ experts(rows of a round), with gradients of rows and parameters

The arithmetic is that of grouped.py, with GEMMs that have gradients. A rank without rows stays in the graph: its
parameters get gradients of 0, for which FSDP and DDP wait.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from epmoe.integrations.batches import Arrived
from epmoe.integrations.transformers import fp8
from epmoe.integrations.transformers.grouped import (
    Computation,
    between_products,
    gemm_for,
    local_parameters,
    weights_and_biases,
)
from epmoe.local.gemm.gradients import train_bias, train_gemm
from epmoe.native.arguments import wants_gradients


def trains(experts: Any, parameters: list[Tensor], x: Tensor, weights: Tensor) -> bool:
    """Whether autograd wants a backward pass. Ranks agree on it, since they run the same model.

    `parameters` are those that the call takes of the module: a parametrization, such as PEFT's, makes tensors that
    require grad of frozen parameters. Raises RuntimeError where the module is quantized.
    """
    if not wants_gradients(chain((x, weights), parameters, experts.parameters())):
        return False
    if fp8.is_quantized(experts):
        raise RuntimeError(
            "quantized experts have no gradients with epmoe: run under torch.inference_mode() or torch.no_grad(), or "
            "load the checkpoint with `FineGrainedFP8Config(dequantize=True)` to train it"
        )
    return True


def computation(experts: Any, parameters: list[Tensor], held: slice) -> Computation:
    """The function of `grouped.computation`, with gradients, for a module with plain weights."""
    up, down, biases = weights_and_biases(experts, local_parameters(parameters, held))
    gemm = gemm_for(up.detach(), down.detach(), trained=True)

    def outputs(arrived: Arrived) -> Tensor:
        offsets = arrived.expert_offsets
        n = len(arrived.rows)

        def product(rows: Tensor, which: int) -> Tensor:
            weights = down if which else up
            out: Tensor = train_gemm(rows.to(weights.dtype).contiguous(), weights, offsets, gemm)
            return out + train_bias(biases[which], offsets, n, gemm) if biases else out

        return between_products(experts, arrived.rows, product)

    return Computation(outputs)


def sliced(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's slice of what all ranks of a mesh have. Each rank gets the gradients of all slices."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def gathered(part: Tensor, num_tokens: int, mesh: DeviceMesh) -> Tensor:
    """What `sliced` has cut, whole again: [num_tokens, D]. Each rank's slice gets its part of the gradients."""
    shape = torch.Size((num_tokens, part.shape[1]))
    return DTensor.from_local(part.contiguous(), mesh, [Shard(0)], shape=shape, stride=(shape[1], 1)).full_tensor()
