"""Models of transformers, and single layers of them, in one process and with their experts spread over the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from epmoe.integrations import demo

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where transformers puts a model that is spread over ranks."""
ROWS = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
"""Relative to the largest value of one layer's output; in bfloat16 2 roundings to 8 bits, before and after the sum over
ranks."""


def random_ids(num_tokens: int, seed: int) -> Tensor:
    return torch.randint(1, 240, (1, num_tokens), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def load(path: str, **options):
    """The model with all its weights."""
    return AutoModelForCausalLM.from_pretrained(path, **options).to(DEVICE)


def both(name: str, way: str = "ep_implementation", dtype: torch.dtype = torch.float32, **parallel):
    """The model in one process, and spread over all."""
    with demo.saved_model(name, dtype=dtype) as path:
        single = load(path, dtype=dtype)
        if way == "experts_implementation":
            return single, load(path, dtype=dtype, experts_implementation="epmoe")
        size = dist.get_world_size()
        sizes = parallel or {"tp_size": 1, "fsdp_size": size, "ep_size": size}
        config = DistributedConfig(ep_implementation="epmoe", **sizes)
        return single, AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=config)


class OneLayer:
    """The experts of a model's last layer: `whole` in this process, `spread` over a mesh, by default of all ranks."""

    def __init__(self, name: str, way: str, dtype: torch.dtype = torch.float32, mesh=None, **config):
        with pytest.MonkeyPatch.context() as patch:
            for key, value in config.items():
                patch.setitem(demo.MODELS[name], key, value)
            with demo.saved_model(name, dtype=dtype) as path:
                models = [load(path, dtype=dtype) for _ in range(2)]
        self.whole, self.spread = (model.model.layers[-1].mlp.experts for model in models)
        self.num_experts, self.dtype = self.whole.num_experts, dtype
        self.hidden_size = models[0].config.hidden_size
        self.model = models[1]
        if way == "experts_implementation":
            self.spread.config._experts_implementation = "epmoe"
            return
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        plan = {"": "ep_dispatch_experts"} | dict.fromkeys(dict(self.spread.named_parameters()), "grouped_gemm")
        plan = dict(sorted(plan.items(), reverse=True))  # parameters before the module
        size = dist.get_world_size()
        alone = init_device_mesh(DEVICE, (size, 1), mesh_dim_names=("other", "tp"))["tp"]
        if mesh is None:
            mesh = init_device_mesh(DEVICE, (size,))
        apply_expert_parallelism(self.spread, mesh, alone, plan, ep_implementation="epmoe")

    def inputs(self, num_tokens: int, top_k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_tokens, self.hidden_size, generator=generator).to(self.dtype)
        ids = torch.rand(num_tokens, self.num_experts, generator=generator).argsort(1)[:, :top_k]
        weights = 2.5 * torch.rand(num_tokens, top_k, generator=generator).softmax(1)  # DeepSeek's sum, in fp32
        return x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)

    def check(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Collective: `spread` gives what `whole` gives."""
        with torch.no_grad():
            got = self.spread(x, ids, weights)
            want = self.whole(x, ids, weights) if len(x) else x  # no kernel has to take no rows
        assert got.dtype == want.dtype == self.dtype
        assert got.shape == want.shape
        if len(x):
            assert (got - want).abs().max() <= ROWS[self.dtype] * want.abs().max()
