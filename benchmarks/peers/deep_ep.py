"""DeepEP: the low-latency kernels (`Buffer`, expert-major rows) and, from 2.0 on, `ElasticBuffer`
(rank-major rows).

The calls are those of sgl-deep-ep 0.1.2.post1, DeepEP 2.1 for CUDA 13. `Buffer` has had these calls
since DeepEP 1.2. Wheels on PyPI are each for one torch: 0.1.0 to 0.1.2 for 2.13, 0.1.2.post1 for
2.14. torch 2.11 lacks a constructor that they link, and from 0.1.1 on they link functions of NCCL
2.30.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.peers import LeftOut, Peer
from epmoe.bench.sample import Payload, Sample
from epmoe.bench.sides import ExchangeSide

_MOST_TOKENS = 128  # of a rank; the low-latency kernels are for small batches


class DeepEPExchange(ExchangeSide):
    """A side over a buffer of the library. A handle is the arrived rows, and what combine needs."""

    def __init__(self, buffer: Any, sample: Sample) -> None:
        import deep_ep

        super().__init__("DeepEP", sample)
        self.buffer = buffer
        self.ids_TK = sample.ids_TK.to(getattr(deep_ep, "topk_idx_t", torch.int64))

    def outputs(self, handle: Any) -> Tensor:
        return handle[0].clone()


class LowLatency(DeepEPExchange):
    """Rows [e, M·R, D] in bf16, of which the first `count` of each expert are real; combine applies
    the weights.
    """

    expects = "weights"

    def out(self) -> Any:
        x_TD = self.sample.x_TD
        E = self.sample.config.model.num_experts
        rows, counts, handle, _, _ = self.buffer.low_latency_dispatch(
            x_TD, self.ids_TK, len(x_TD), E, use_fp8=False
        )
        return rows, handle, counts

    def back(self, handle: Any) -> Tensor:
        return self.buffer.low_latency_combine(
            self.expert_outputs, self.ids_TK, self.sample.weights_TK, handle[1]
        )[0]

    def arrived(self, handle: Any) -> list[Tensor]:
        rows, _, counts = handle
        return [rows[i, :count] for i, count in enumerate(counts.tolist())]


class Elastic(DeepEPExchange):
    """Rows [N, D], one for each (token, rank). The host reads no count, so N is the most that may
    come.
    """

    def out(self) -> Any:
        rows, _, _, handle, _ = self.buffer.dispatch(
            self.sample.x_TD,
            self.ids_TK,
            self.sample.weights_TK,
            num_experts=self.sample.config.model.num_experts,
            do_handle_copy=False,
            do_cpu_sync=False,
        )
        return rows, handle

    def back(self, handle: Any) -> Tensor:
        return self.buffer.combine(self.expert_outputs, handle[1])[0]

    def arrived(self, handle: Any) -> list[Tensor]:
        return [handle[0]]


class DeepEP(Peer):
    install = (
        "sgl-deep-ep (DeepEP 2; for one torch and NCCL 2.30), or deep_ep from "
        "github.com/deepseek-ai/DeepEP"
    )

    def __init__(self, kernels: str) -> None:
        self.name = f"DeepEP {kernels}"
        self.kernels = kernels

    def version(self) -> str:
        import deep_ep

        if self.kernels == "elastic" and not hasattr(deep_ep, "ElasticBuffer"):
            raise ImportError("this DeepEP has no ElasticBuffer")
        for package in ("sgl-deep-ep", "deep_ep"):
            try:
                return f"({package} {version(package)})"
            except PackageNotFoundError:
                continue
        return ""

    @contextmanager
    def exchange(
        self, sample: Sample, payload: Payload, group: dist.ProcessGroup
    ) -> Iterator[ExchangeSide]:
        import deep_ep

        model = sample.config.model
        T = sample.tokens
        if payload is not Payload.PLAIN or sample.dtype != torch.bfloat16:
            raise LeftOut("this driver sends bf16 rows")
        # Rank-major rows, with one buffer for any batch.
        if self.kernels == "elastic":
            buffer = deep_ep.ElasticBuffer(
                group,
                num_max_tokens_per_rank=T,
                hidden=model.hidden_size,
                num_topk=model.num_experts_per_tok,
                prefer_overlap_with_compute=False,
                explicitly_destroy=True,
            )
            side: ExchangeSide = Elastic(buffer, sample)
        elif T <= _MOST_TOKENS:
            size = (T, model.hidden_size, group.size(), model.num_experts)
            buffer = deep_ep.Buffer(
                group,
                num_rdma_bytes=deep_ep.Buffer.get_low_latency_rdma_size_hint(*size),
                low_latency_mode=True,
                num_qps_per_rank=model.num_experts // group.size(),
                explicitly_destroy=True,
            )
            side = LowLatency(buffer, sample)
        else:
            raise LeftOut(f"its buffers are for up to {_MOST_TOKENS} tokens a rank")
        yield side
        # No rank frees its buffer while another one may write into it.
        torch.cuda.synchronize()
        dist.barrier(group)
        buffer.destroy()


PEERS = [DeepEP("low-latency"), DeepEP("elastic")]
