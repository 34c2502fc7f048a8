"""DeepGEMM's fp8 MegaMoE for Hopper: a whole layer in one kernel, behind a kernel that quantizes
rows. Route is ours.

The calls are those of sgl-deep-gemm 0.1.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

import torch
from torch import Tensor

from epmoe.bench.layer_sides import WholeLayer
from epmoe.bench.peers import LeftOut, Peer


class MegaMoE(Peer):
    name = "DeepGEMM MegaMoE"
    install = "sgl-deep-gemm (with torch 2.11: 0.1.5, and apache-tvm-ffi)"

    def version(self) -> str:
        from deep_gemm import get_symm_buffer_for_sm90_mega_moe  # noqa: F401

        return version("sgl-deep-gemm")

    @contextmanager
    def layer(self, case: WholeLayer) -> Iterator[Callable[[], Tensor]]:
        import deep_gemm

        if not case.experts.is_fp8 or torch.cuda.get_device_capability() != (9, 0):
            raise LeftOut("it takes fp8 weights on compute capability 9.0")
        experts = case.experts
        model = case.ep.config.model
        T = len(case.x_TD)
        # Weights in the order of its kernel, once.
        weights = deep_gemm.transform_weights_for_mega_moe_sm90(
            (experts.w_gate_up.data, experts.gate_up_scales.data),
            (experts.w_down.data, experts.down_scales.data),
        )
        # A buffer that all ranks map.
        buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
            case.group,
            model.num_experts,
            T,
            model.num_experts_per_tok,
            model.hidden_size,
            model.intermediate_size,
        )
        y_TD = torch.empty_like(case.x_TD)
        inputs = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights

        def run() -> Tensor:
            # Our route, its two kernels.
            routing = case.routed()
            deep_gemm.mega_moe_pre_dispatch_sm90(
                case.x_TD, routing.ids, routing.weights, *inputs, T
            )
            deep_gemm.fp8_mega_moe(y_TD, *weights, buffer)
            return y_TD

        yield run
        # No rank frees its buffer while another one may write into it.
        torch.cuda.synchronize()
        case.group.barrier()
        buffer.destroy()


PEERS = [MegaMoE()]
