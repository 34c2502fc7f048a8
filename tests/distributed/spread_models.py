"""Models of transformers and their single layers, in one process and with their experts spread over
the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from helpers import RANKS_SHARE_GPUS
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import epmoe.integrations.transformers as integration
from epmoe.cli.demo import generate as demo

own_gpus = pytest.mark.skipif(RANKS_SHARE_GPUS, reason="transformers gives GPU r to rank r")
needs_ep = pytest.mark.skipif(
    not hasattr(integration, "EpmoeEP"), reason="EP implementations need transformers 5.23"
)
ENTRY_POINTS = ("ep_implementation", "experts_implementation")
"""Each rank holds its share of the expert weights, or all weights and takes its share
of the work.
"""
both_entry_points = pytest.mark.parametrize(
    "entry_point", [pytest.param(ENTRY_POINTS[0], marks=needs_ep), ENTRY_POINTS[1]]
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where transformers puts a model that is spread over ranks."""
LAYER_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
"""Error of one layer's output, relative to its largest value. In bfloat16 it has two roundings to 8
bits: before and after the sum over ranks.
"""


def by_turns(*choices: Iterable[object], first: int = 0) -> list:
    """All combinations of the choices, as parameters of a test. Every second one is slow.

    A combination is quick if the positions of its values in their choices and `first` have an even
    sum. So each value meets each value of every other choice, but of two choices alone only half:
    tests with `first` 0 and 1 together have all pairs.
    """
    cases = []
    for combination in itertools.product(*map(enumerate, choices)):
        values = [value for _, value in combination]
        marks = []
        if ENTRY_POINTS[0] in values:
            marks.append(needs_ep)
        if (sum(position for position, _ in combination) + first) % 2:
            marks.append(pytest.mark.slow)
        cases.append(pytest.param(*values, marks=marks))
    return cases


def needs_heads(name: str) -> None:
    """Skips where the ranks do not divide them."""
    if demo.MODELS[name]["num_key_value_heads"] % dist.get_world_size():
        pytest.skip("needs a number of heads that the ranks divide")


def random_ids(num_tokens: int, seed: int) -> Tensor:
    return torch.randint(1, 240, (1, num_tokens), generator=torch.Generator().manual_seed(seed)).to(
        DEVICE
    )


def load(path: str, **options):
    """The model with all its weights."""
    return AutoModelForCausalLM.from_pretrained(path, **options).to(DEVICE)


def single_and_spread(
    name: str,
    entry_point: str = "ep_implementation",
    dtype: torch.dtype = torch.float32,
    **parallel,
):
    """The model in this process, and the model spread over all ranks."""
    with demo.saved_model(name, dtype=dtype) as path:
        spread = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, **options_of(entry_point, **parallel)
        )
        return load(path, dtype=dtype), spread.to(
            DEVICE
        ) if entry_point == "experts_implementation" else spread


def options_of(entry_point: str, **parallel: int) -> dict[str, object]:
    """The options of from_pretrained that spread the experts, over all ranks by default."""
    if entry_point == "experts_implementation":
        return {"experts_implementation": "epmoe"}
    size = dist.get_world_size()
    sizes = parallel or {"tp_size": 1, "fsdp_size": size, "ep_size": size}
    return {"distributed_config": DistributedConfig(ep_implementation="epmoe", **sizes)}


class OneLayer:
    """The experts of a model's last layer: `single` in this process, `spread` over a mesh, by
    default of all ranks.
    """

    def __init__(
        self, name: str, entry_point: str, dtype: torch.dtype = torch.float32, mesh=None, **config
    ):
        # Two models of the same weights, one of them spread below.
        with pytest.MonkeyPatch.context() as patch:
            for key, value in config.items():
                patch.setitem(demo.MODELS[name], key, value)
            with demo.saved_model(name, dtype=dtype) as path:
                models = [load(path, dtype=dtype) for _ in range(2)]
        self.single, self.spread = (model.model.layers[-1].mlp.experts for model in models)
        self.num_experts = self.single.num_experts
        self.dtype = dtype
        self.hidden_size = models[0].config.hidden_size
        self.model = models[1]
        self.entry_point = entry_point
        # By the name of an experts implementation,
        if entry_point == "experts_implementation":
            self.spread.config._experts_implementation = "epmoe"
            return
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        # or by the plan of its own expert parallelism.
        plan = {"": "ep_dispatch_experts"} | dict.fromkeys(
            dict(self.spread.named_parameters()), "grouped_gemm"
        )
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
        # Sum 2.5, as in DeepSeek; fp32.
        weights = 2.5 * torch.rand(num_tokens, top_k, generator=generator).softmax(1)
        return x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)

    def check(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Compares the output of `spread` with that of `single`. Collective."""
        with torch.no_grad():
            got = self.spread(x, ids, weights)
            # A kernel need not accept zero rows.
            want = self.single(x, ids, weights) if len(x) else x
        assert got.dtype == want.dtype == self.dtype
        assert got.shape == want.shape
        if len(x):
            assert (got - want).abs().max() <= LAYER_TOLERANCE[self.dtype] * want.abs().max()
