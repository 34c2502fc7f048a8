"""SGLang's own runtime for the tests: its configuration, its groups and its MoE layer, over the
ranks of torchrun.

DeepGEMM's grouped GEMMs are plain torch here, and so are the activation and its fp8, which SGLang
has for CUDA only. Everything else of a layer is SGLang's: the factory of dispatchers, the layer,
the runner, and its steps before and after the GEMMs (Triton, interpreted on a CPU).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
import transformers.utils
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
CUDA = torch.cuda.is_available()


class _Anything(ModuleType):
    """A module with every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _Absent(MetaPathFinder, Loader):
    """Lets SGLang be imported without packages that its layers for other models, and its other
    kernels, name.

    torchvision's wheel fits torch's CUDA builds only, and sgl_kernel has hundreds of megabytes.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        absent = fullname.partition(".")[0] in ("torchvision", "sgl_kernel")
        return ModuleSpec(fullname, self, is_package=True) if absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


transformers.utils.is_torchvision_available()  # remembers that there is none
sys.meta_path.append(_Absent())
import sglang.kernels.ops.quantization.fp8_kernel as fp8_kernel  # noqa: E402
import sglang.srt.eplb.expert_location as expert_location  # noqa: E402
import sglang.srt.layers.moe.fused_moe_triton.layer as layer_module  # noqa: E402
import sglang.srt.layers.moe.moe_runner.deep_gemm as runner_module  # noqa: E402
from sglang.srt.distributed.parallel_state import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers import deep_gemm_wrapper, dp_attention  # noqa: E402
from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK  # noqa: E402
from sglang.srt.layers.moe.utils import initialize_moe_config  # noqa: E402
from sglang.srt.layers.quantization.fp8 import Fp8Config  # noqa: E402
from sglang.srt.model_executor.model_runner import ModelRunner  # noqa: E402
from sglang.srt.plugins import hook_registry, load_plugins  # noqa: E402
from sglang.srt.runtime_context import (  # noqa: E402
    SpawnRanks,
    get_context,
    get_exec,
    get_parallel,
    get_schedule,
    publish,
)
from sglang.srt.state_capturer import base as capturers  # noqa: E402
from sglang.srt.state_capturer.routed_experts import (  # noqa: E402
    RoutedExpertsCapturer,
    set_global_experts_capturer,
)

from epmoe import quantize_fp8  # noqa: E402
from epmoe.integrations import sglang  # noqa: E402

__all__ = [
    "ModelRunner",
    "StandardTopKOutput",
    "TopK",
    "block_fp8",
    "capturer",
    "data_parallel",
    "deterministic",
    "get_exec",
    "layer_module",
    "load_plugins_of_epmoe",
    "locate_experts",
    "make_layer",
    "start",
]


def load_plugins_of_epmoe() -> None:
    """What every process of SGLang does first. A tree on the path that is not installed has no
    entry point.
    """
    if not any(entry.name == "epmoe" for entry in entry_points(group="sglang.srt.plugins")):
        sglang.register()
        hook_registry.HookRegistry.apply_hooks()
    load_plugins()


def block_fp8() -> Fp8Config:
    """What a checkpoint like DeepSeek-V3's says of its weights."""
    return Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128]
    )


def start(**more: Any) -> None:
    """What `python -m sglang.launch_server --tp R --moe-a2a-backend deepep_v2` sets up in each of
    its processes.
    """
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    # The options of the command, and the groups of the processes.
    options = {
        "tp_size": size,
        "ep_size": size,
        "moe_a2a_backend": "deepep_v2",
        "moe_runner_backend": "deep_gemm",
    }
    server_args = (
        get_context()
        .override_server_args(device="cuda" if CUDA else "cpu", **options, **more)
        .install()
    )
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=local))
    if CUDA:
        torch.cuda.set_device(local)
    backend = "nccl" if CUDA else "gloo"
    init_distributed_environment(size, rank, "env://", local, backend)
    initialize_model_parallel(backend)
    initialize_moe_config()
    # Kernels in place of those that only GPUs have.
    deep_gemm_wrapper.grouped_gemm_nt_bf16_contig = _grouped_gemm
    deep_gemm_wrapper.grouped_gemm_nt_f8f8bf16_contig = _grouped_gemm_fp8
    if not CUDA:  # whose driver pins its memory
        capturers.ALLOC_MEMORY_FUNCS = {
            "cpu": lambda dims, dtype, **_: torch.zeros(dims, dtype=dtype)
        }
    runner_module._legacy_silu_and_mul = _silu_and_mul
    fp8_kernel.sglang_per_token_group_quant_fp8 = lambda x, *_, **__: quantize_fp8(
        x, granularity="block"
    )


def locate_experts(layers: int, experts: int) -> None:
    """What SGLang says of a model's layers and logical experts before it makes them, by the model's
    own class.
    """
    config = SimpleNamespace(is_draft_worker=False, model_config=None)
    expert_location.ModelConfigForExpertLocation.from_model_config = lambda _: (
        expert_location.ModelConfigForExpertLocation(num_layers=layers, num_logical_experts=experts)
    )
    ModelRunner.maybe_init_expert_location_metadata(config)


def make_layer(
    experts: int, top_k: int, hidden: int, intermediate: int, layer_id: int = 0, **options: Any
) -> torch.nn.Module:
    """SGLang's MoE layer in bf16, its weights not yet set, made as SGLang makes a model: on its
    default device.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if CUDA else "meta"):
            layer = get_moe_impl_class(None)(
                experts,
                top_k,
                hidden,
                intermediate,
                layer_id=layer_id,
                params_dtype=torch.bfloat16,
                **options,
            )
    finally:
        torch.set_default_dtype(default)
    # On a CPU SGLang has another runner for bf16. Take that of GPUs.
    forward = getattr(layer.quant_method, "forward_cuda", None)
    if forward:
        layer.quant_method._forward_method = forward
    return layer if CUDA else layer.to_empty(device="cpu")


@contextmanager
def data_parallel(tokens: list[int]) -> Iterator[None]:
    """As if attention were data parallel, with so many tokens on each rank."""
    alone = SimpleNamespace(world_size=1, all_gather_into_tensor=Tensor.copy_)
    ranks = {"attn_dp_rank": get_parallel().tp_rank, "attn_tp_rank": 0}
    with get_parallel().override(
        attn_dp_size=len(tokens), attn_tp_size=1, attn_tp_group=alone, **ranks
    ):
        dp_attention.set_dp_buffer_len(sum(tokens), 0, False, tokens)
        yield


@contextmanager
def capturer(experts: int, top_k: int, tokens: int) -> Iterator[RoutedExpertsCapturer]:
    """SGLang's own, as of `--enable-return-routed-experts`, for a model of one layer."""
    config = SimpleNamespace(
        hf_text_config=SimpleNamespace(num_experts_per_tok=top_k, num_hidden_layers=1)
    )
    with get_schedule().override(chunked_prefill_size=tokens):
        made = RoutedExpertsCapturer(config, tokens, tokens, 0, "cuda" if CUDA else "cpu")
    set_global_experts_capturer(made)
    yield made
    set_global_experts_capturer(None)


def deterministic() -> Any:
    """As of `--enable-deterministic-inference`."""
    return get_exec().deterministic.override(enable_deterministic_inference=True)


def _grouped_gemm(a: Tensor, b: Tensor, d: Tensor, m_indices: Tensor) -> None:
    """d[i] = a[i] @ b[m_indices[i]].T, as DeepGEMM's contiguous layout has it: the rows of an
    expert follow one another, in whole blocks of 128, and rows of −1 come last and are skipped.
    """
    assert a.shape[0] % 128 == 0
    blocks = m_indices.view(-1, 128)
    torch._assert_async(
        (blocks == blocks[:, :1]).all() & (m_indices >= -1).all() & (m_indices < len(b)).all()
    )
    ends = (m_indices[:, None] == torch.arange(len(b), device=a.device)).sum(0).cumsum(0).int()
    d.copy_(F.grouped_mm(a, b.transpose(1, 2), offs=ends))


def _grouped_gemm_fp8(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    m_indices: Tensor,
    **recipes: None,
) -> None:
    """As `_grouped_gemm`, for rows with a scale for 128 elements and weights with a scale for 128 ×
    128.
    """
    rows = a[0].float().unflatten(1, (-1, 128))
    weights = b[0].float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    rows = (rows * a[1][..., None]).flatten(1)
    weights = (weights * b[1][:, :, None, :, None]).flatten(3).flatten(1, 2)
    _grouped_gemm(rows.bfloat16(), weights.bfloat16(), d, m_indices)


def _silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)
