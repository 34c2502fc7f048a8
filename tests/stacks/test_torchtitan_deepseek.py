"""torchtitan's own DeepSeek-V3, small, with its FSDP and its checkpoints, trained with epmoe and
with its all-to-all.

`make stacks-torchtitan` runs it. Its trainer and its attention need GPUs; a loop and torch's
attention stand in.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import torchtitan.tools.utils as titan
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# Set before torchtitan's other modules take them.
titan.device_type = "cpu"
titan.device_module = torch.cpu
from torchtitan.components.checkpointer.base import ModelWrapper  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import apply_overrides  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts  # noqa: E402
from torchtitan.models.deepseek_v3.config_registry import (  # noqa: E402
    deepseek_v3_debugmodel,
    deepseek_v3_debugmodel_hybridep,
)
from torchtitan.trainer import Trainer  # noqa: E402

B = 2
L = 16
VOCAB = 64
LAYERS = 3
# FSDP of torch 2.13 does not take the parameters of torchtitan's default, spmd_types
BACKEND = "partial_dtensor"
OURS = ["epmoe.integrations.torchtitan.dispatcher", "epmoe.integrations.torchtitan.selective_ac"]


@pytest.fixture(scope="module", autouse=True)
def group():
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's trainer
    dist.init_process_group("gloo")
    yield
    set_spmd_backend("spmd_types")
    dist.destroy_process_group()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, **_: Any
) -> torch.Tensor:
    """Causal, of [B, L, heads, D]."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


def precise(
    self: GroupedExperts, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor
) -> torch.Tensor:
    """torchtitan's compute in bf16 whatever they are given, which would hide what
    differs in fp32.
    """
    offsets = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
    w1, w2, w3 = (
        w.to_local() if isinstance(w, DTensor) else w
        for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
    )
    gate, up = (F.grouped_mm(x_RD, w.transpose(1, 2), offs=offsets) for w in (w1, w3))
    return F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offsets)


def model_of(config: Trainer.Config) -> torch.nn.Module:
    """A model as torchtitan's trainer makes it, with weights of a fixed seed."""
    set_spmd_backend(config.parallelism.spmd_backend)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    with torch.device("meta"):
        model = spec.model.build()
    for module in model.modules():
        if isinstance(module, FlexAttention):
            module.forward = attention
        elif (
            isinstance(module, GroupedExperts)
            and config.training.mixed_precision_param == "float32"
        ):
            module.forward = MethodType(precise, module)
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    model.to_empty(device="cpu")
    torch.manual_seed(config.debug.seed)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.context = get_spmd_context(parallel_dims=dims)
    return model.train()


def config_of(
    ours: bool, ac: Any = None, dtype: str = "float32", seed: int = 0, ep: int | None = None
):
    """The configuration of torchtitan's own small model, smaller still. `ep`: ranks of EP, all by
    default.
    """
    config = deepseek_v3_debugmodel_hybridep() if ours else deepseek_v3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    config.override.imports = list(OURS) if ours else []
    config.activation_checkpoint = ac
    config.parallelism = ParallelismConfig(
        expert_parallel_degree=ep or dist.get_world_size(), spmd_backend=BACKEND
    )
    config.training = TrainingConfig(local_batch_size=B, seq_len=L, mixed_precision_param=dtype)
    config.debug.seed = seed
    return config


def losses(steps: int, ours: bool, **options: Any) -> tuple[list[float], int]:
    """Mean losses of all ranks at all steps, and the rounds of epmoe that they took."""
    model = model_of(config_of(ours, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rounds = rounds_of(model)
    before = 0
    totals = []
    before = rounds.count if rounds else 0
    for step in range(steps):
        with model.context():
            loss = loss_of(model, step)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        totals.append(total.item() / dist.get_world_size())
    return totals, rounds.count - before if rounds else 0


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    first = torch.randint(VOCAB, (B, 1), generator=generator)
    tokens = (first * 3 ** torch.arange(L + 1) + torch.arange(L + 1)) % VOCAB  # a rule to learn
    logits = model(tokens[:, :-1], positions=torch.arange(L).expand(B, L))
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def rounds_of(model: torch.nn.Module) -> Any:
    dispatchers = [m.token_dispatcher for m in model.modules() if isinstance(m, RoutedExperts)]
    assert len(dispatchers) == LAYERS - 1
    return (
        dispatchers[0].exchange.ep.exchange.rounds if hasattr(dispatchers[0], "exchange") else None
    )


@pytest.mark.timeout(900)  # four ranks on two busy cores took 213 s
def test_a_hundred_steps_have_the_losses_of_all_to_all():
    want, _ = losses(100, ours=False)
    got, rounds = losses(100, ours=True)
    assert rounds == 100 * 2 * (LAYERS - 1)
    assert want[-1] < want[0] / 2
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= 1e-5 * want[0]


@pytest.mark.parametrize("ep", [None, 2], ids=["EP of all", "EP of 2"])
def test_two_micro_batches_are_in_flight(ep: int | None):
    """As in the 1F1B schedule of a pipeline; over four ranks, EP of 2 has fewer ranks than the
    data.
    """
    gradients = []
    for ours in (False, True):
        model = model_of(config_of(ours, ep=ep))
        with model.context():
            losses = [loss_of(model, step) for step in range(2)]
            for loss in losses:
                loss.backward()
        gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    for name, want in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][name], want, rtol=0.0, atol=1e-5 * float(want.abs().max()), msg=name
        )


@pytest.mark.parametrize("saves", [False, True], ids=["of torchtitan", "with epmoe"])
def test_a_checkpoint_of_torchtitan(saves: bool, tmp_path_factory: pytest.TempPathFactory):
    """It is loaded over two ranks of EP by the model with the other exchange."""
    folder = [str(tmp_path_factory.mktemp("checkpoint"))]
    dist.broadcast_object_list(folder)
    losses = []
    for ours, ep, use in ((saves, None, dcp.save), (not saves, 2, dcp.load)):
        model = model_of(config_of(ours, ep=ep, seed=len(losses)))
        wrapper = ModelWrapper(model)
        state = wrapper.state_dict()
        use(state, checkpoint_id=folder[0])
        wrapper.load_state_dict(state)
        with torch.no_grad(), model.context():
            losses.append(loss_of(model, 0))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    "ac, rounds", [(SelectiveAC.Config(), 2), (FullAC.Config(), 3)], ids=["selective", "full"]
)
def test_checkpoints_have_the_same_bits(ac: Any, rounds: int):
    want, _ = losses(3, ours=True)
    got, taken = losses(3, ours=True, ac=ac)
    assert got == want
    assert taken == 3 * rounds * (LAYERS - 1)


def test_bf16_is_within_the_spread_over_seeds():
    want, other = (losses(30, ours=False, dtype="bfloat16", seed=seed)[0] for seed in (0, 1))
    got, _ = losses(30, ours=True, dtype="bfloat16")
    spread = sum(abs(a - b) for a, b in zip(want, other, strict=True))
    assert sum(abs(a - b) for a, b in zip(got, want, strict=True)) < spread
