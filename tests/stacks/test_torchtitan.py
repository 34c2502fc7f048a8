"""epmoe carries the tokens of torchtitan's own MoE layers, as its all-to-all does. `make
stacks-torchtitan` runs it.

Each rank has the same router and shared experts, and its part of the experts. Only what carries the
tokens differs. One rank a GPU where there are GPUs.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.protocols.module import Module

from epmoe.integrations.torchtitan import EpmoeSelectiveAC, EpmoeTokenDispatcher

# torch 2.11 lacks it. torchtitan 0.3 otherwise runs with this release.
if not hasattr(torch.compiler, "_is_non_strict_tracing"):
    torch.compiler._is_non_strict_tracing = lambda: False

D = 64
WIDTH = 32
E = 8
K = 3
B = 2
L = 24
LAYERS = 2
ON_GPUS = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPUS else torch.device("cpu")
SEAT = "epmoe.integrations.torchtitan.dispatcher"
INIT = {"weight": partial(nn.init.trunc_normal_, std=0.2), "bias": nn.init.zeros_}
EXPERTS = {name: partial(nn.init.trunc_normal_, std=0.1) for name in ("w1_EFD", "w2_EDF", "w3_EFD")}


@pytest.fixture(scope="session", autouse=True)
def group():
    # Of windows, which on GPUs are for bfloat16 by default.
    os.environ["EPMOE_MODEL__DTYPE"] = "float32"
    if ON_GPUS:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPUS else "gloo")
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def mesh(group):
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    # With spmd_types, torchtitan's own all-to-all needs more than gloo has.
    set_spmd_backend("partial_dtensor")
    yield mesh
    set_spmd_backend("spmd_types")


class Blocks(Module):
    """Layers with residual sums."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layers: list[MoE.Config]

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(i): layer.build() for i, layer in enumerate(config.layers)}
        )

    def forward(self, x):
        for layer in self.layers.values():
            x = x + layer(x)
        return x


class PreciseExperts(GroupedExperts):
    """torchtitan's compute in bf16 whatever they are given, which would hide what
    differs in fp32.
    """

    def forward(self, x_RD, num_tokens_per_expert_E):
        offsets = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        w1, w2, w3 = (w.transpose(1, 2) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        gate, up = (F.grouped_mm(x_RD, w, offs=offsets) for w in (w1, w3))
        return F.grouped_mm(F.silu(gate) * up, w2, offs=offsets)


class Settings(Module):
    """The rest of a trainer's configuration."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        ac: SelectiveAC.Config


def config_of(backend: str, factor: float | None = None) -> Blocks.Config:
    layers = []
    for _ in range(LAYERS):
        routed = make_routed_experts_config(
            dim=D,
            hidden_dim=WIDTH,
            num_experts=E,
            top_k=K,
            param_init=EXPERTS,
            comm_backend=backend,
            non_blocking_capacity_factor=factor,
            num_max_tokens_per_rank=B * L if backend == "hybridep" else None,
        )
        router = make_router_config(
            dim=D, num_experts=E, gate_param_init=INIT, top_k=K, score_func="softmax"
        )
        shared = make_ffn_config(dim=D, hidden_dim=WIDTH, w1_param_init=INIT, w2w3_param_init=INIT)
        layers.append(
            make_moe_config(
                num_experts=E, router=router, routed_experts=routed, shared_experts=shared
            )
        )
    return Blocks.Config(layers=layers)


def model_of(
    mesh,
    backend: str,
    seat: object = None,
    factor: float | None = None,
    seed: int = 0,
    precise: bool = True,
) -> Blocks:
    """A model with this rank's experts."""
    config = config_of(backend, factor)
    if seat is not None:
        apply_overrides(OverrideConfig(imports=[seat]), config)
    torch.manual_seed(seed)
    model = config.build()
    generator = torch.Generator().manual_seed(seed)
    e = E // mesh.size()
    rank = mesh.get_local_rank()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    for layer in model.layers.values():
        experts = layer.routed_experts.inner_experts
        for name in EXPERTS:
            full = getattr(experts, name)
            setattr(experts, name, nn.Parameter(full[rank * e : (rank + 1) * e].detach().clone()))
        if precise:
            experts.__class__ = PreciseExperts
        layer._init_self_buffers(buffer_device=DEVICE)
        layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return model.to(DEVICE)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(B, L, D, generator=generator).to(DEVICE)


def is_expert(name: str) -> bool:
    return "inner_experts" in name


def train(model: Blocks, steps: int, dtype=torch.float32, forward=None) -> list[float]:
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        x = batch(step).to(dtype)
        y = (forward or model)(x)
        loss = (y.float() - x.float().roll(1, -1)).square().mean()
        loss.backward()
        for name, parameter in model.named_parameters():
            if not is_expert(name) and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def test_a_step_has_the_gradients_of_all_to_all(mesh):
    gradients = []
    for backend, seat in (("standard", None), ("hybridep", SEAT)):
        model = model_of(mesh, backend, seat)
        x = batch(0).requires_grad_()
        model(x).square().mean().backward()
        gradients.append({"x": x.grad} | {name: p.grad for name, p in model.named_parameters()})
    for name, want in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], want, rtol=2e-5, atol=2e-8, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_of_experts_and_gate_have_the_bits_of_all_to_all(mesh, dtype):
    gradients = []
    for backend, seat in (("standard", None), ("hybridep", SEAT)):
        layer = model_of(mesh, backend, seat, precise=dtype == torch.float32).to(dtype).layers["0"]
        layer(batch(0).to(dtype)).backward(batch(1).to(dtype))
        gradients.append({name: p.grad for name, p in layer.named_parameters()})
    assert sum("inner_experts" in name or "gate" in name for name in gradients[0]) == 4
    for name, want in gradients[0].items():
        if ON_GPUS and not is_expert(name):  # sums over D, in another order
            most = float(want.abs().max()) * (1e-5 if dtype == torch.float32 else 2e-2)
            torch.testing.assert_close(gradients[1][name], want, rtol=0.0, atol=most, msg=name)
        else:
            assert torch.equal(gradients[1][name], want), name


def test_scores_in_fp32_weight_gradients_in_bf16_as_in_all_to_all(mesh):
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, grad_y = (torch.randn(L, D, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    scores, ids = torch.rand(L, E, generator=generator).to(DEVICE).topk(K)
    counts = ids.flatten().bincount(minlength=E)
    gradients = []
    for backend, seat in (("standard", None), ("hybridep", SEAT)):
        dispatcher = model_of(mesh, backend, seat).layers["0"].routed_experts.token_dispatcher
        weights = scores.clone().requires_grad_()
        rows, _, metadata = dispatcher.dispatch(x.clone().requires_grad_(), weights, ids, counts)
        outputs = (rows * 3.0).detach().requires_grad_()
        dispatcher.combine(outputs, metadata, x).backward(grad_y)
        gradients.append(outputs.grad)
    assert torch.equal(*gradients)


def test_spmd_types_the_default_backend(mesh):
    want = train(model_of(mesh, "hybridep", SEAT), 2)
    set_spmd_backend("spmd_types")
    try:
        with set_current_spmd_mesh(mesh):
            assert train(model_of(mesh, "hybridep", SEAT), 2) == want
    finally:
        set_spmd_backend("partial_dtensor")


@pytest.mark.parametrize("factor", [None, 1.0])
def test_a_hundred_steps_have_the_losses_of_all_to_all(mesh, factor):
    want = train(model_of(mesh, "standard"), 100)
    got = train(model_of(mesh, "hybridep", SEAT, factor), 100)
    assert want[-1] < want[0] / 1.2
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= 1e-5 * want[0]


def test_bf16_is_within_the_spread_over_seeds(mesh):
    want, other = (
        train(model_of(mesh, "standard", seed=seed, precise=False), 30, torch.bfloat16)
        for seed in (0, 1)
    )
    got = train(model_of(mesh, "hybridep", SEAT, precise=False), 30, torch.bfloat16)
    assert abs(got[-1] - want[-1]) <= abs(other[-1] - want[-1])


def test_selective_checkpoints_keep_the_rounds(mesh):
    model = model_of(mesh, "hybridep", SEAT)
    plain = train(copy.copy(model_of(mesh, "hybridep", SEAT)), 3)
    holder = Settings.Config(ac=SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[]))
    apply_overrides(OverrideConfig(imports=["epmoe.integrations.torchtitan.selective_ac"]), holder)
    policy = holder.ac.build()
    assert isinstance(policy, EpmoeSelectiveAC)
    rounds = model.layers["0"].routed_experts.token_dispatcher.exchange.ep.exchange.rounds
    for name, layer in list(model.layers.items()):
        model.layers[name] = policy._wrap_block(layer, base_fqn=f"layers.{name}")
    before = rounds.count
    assert train(model, 3) == plain
    assert rounds.count - before == 3 * 2 * LAYERS


def test_what_cannot_work_says_so(mesh):
    with pytest.raises(ValueError, match="hybridep backend"):
        EpmoeTokenDispatcher.Config(num_experts=E, top_k=K).build()
    config = EpmoeTokenDispatcher.Config(
        num_experts=E, top_k=K, hidden_dim=D, num_max_tokens_per_rank=8
    )
    with pytest.raises(ValueError, match="needs expert parallelism"):
        config.build().wire_meshes(ep_mesh=None)
