"""LoRA of PEFT on experts that are spread over ranks: train, clip, save, resume and serve, as one
process does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchanges import make_config
from helpers import ON_THE_CPU, randn, slow
from interrupted_steps import FILES, check_folder_of_steps
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from epmoe import ExpertParallel, MoELayer, checkpoint
from epmoe.checkpoint import folders, peft_folder, state_dicts
from epmoe.training import clip_grad_norm_, fully_shard, ignore_experts, spread_adapters

pytestmark = ON_THE_CPU

E = 12
K = 2
D = 32
F = 16
T = 6
STEPS = 6
TARGETS = ["mlp.experts.w_gate_up", "mlp.experts.w_down"]


@pytest.fixture(scope="module", autouse=True)
def peft() -> Any:
    """Imported only where these tests run, since it takes seconds."""
    return pytest.importorskip("peft")


class Model(nn.Module):
    def __init__(self, ep: ExpertParallel, **options: object) -> None:
        super().__init__()
        self.q_proj = nn.Linear(D, D, bias=False)
        with torch.no_grad():
            self.q_proj.weight.copy_(randn(D, D, seed=9) / D**0.5)
        experts = ep.config.model.num_experts
        shapes = (experts, D), (experts, 2 * F, D), (experts, D, F)
        weights = (randn(*shape, seed=i) / shape[-1] ** 0.5 for i, shape in enumerate(shapes))
        self.mlp = MoELayer.from_full(ep, *weights, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.q_proj(x))


def adapted(ep: ExpertParallel, modules: tuple[str, ...] = ("q_proj",)) -> nn.Module:
    import peft

    torch.manual_seed(ep.rank)  # ranks draw other factors
    config = peft.LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=list(modules),
        target_parameters=TARGETS,
        init_lora_weights=False,
    )
    return peft.get_peft_model(Model(ep), config)


@pytest.fixture
def alone() -> Iterator[ExpertParallel]:
    """A group of this rank alone."""
    groups = [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())]
    with ExpertParallel(
        make_config(1, experts=E, top_k=K, hidden=D, max_tokens=64), groups[dist.get_rank()]
    ) as ep:
        yield ep


def whole(model: nn.Module) -> dict[str, Tensor]:
    named = (
        (name.removeprefix("module."), value)
        for name, value in model.named_parameters()
        if value.requires_grad
    )
    return {
        name: getattr(value, "full_tensor", lambda value=value: value)().detach().clone()
        for name, value in named
    }


def train(model: nn.Module, batches: list[Tensor], by: int) -> list[float]:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False
    )
    norms = []
    for x in batches:
        optimizer.zero_grad()
        (model(x).square().sum() / by).backward()
        norms.append(clip_grad_norm_(model, 1.0).item())
        optimizer.step()
    return norms


@pytest.mark.parametrize("wrap", ["nothing", "DDP", "FSDP"])
def test_steps_are_those_of_one_process(peft, make_ep, alone, rank, size, wrap, folder):
    ep = make_ep(experts=E, top_k=K, hidden=D)
    modules = () if wrap == "nothing" else ("q_proj",)
    model = adapted(ep, modules)
    single = adapted(alone, modules)
    spread_adapters(model)

    # The single process begins with the factors of the first rank.
    first = whole(model)
    with torch.no_grad():
        for name, value in single.named_parameters():
            if name in first:
                if "q_proj" in name:
                    dist.broadcast(first[name], 0)
                    model.get_parameter(name).copy_(first[name])
                value.copy_(first[name])

    # It takes the tokens of all ranks in a step, and has the same norms and factors.
    inputs = [[randn(T, D, seed=10 * step + r) for r in range(size)] for step in range(STEPS)]
    by = 1 if wrap == "nothing" else size
    trained = model
    if wrap == "DDP":
        trained = DistributedDataParallel(ignore_experts(model))
    elif wrap == "FSDP":
        fully_shard(model)
    norms = train(trained, [each[rank] for each in inputs], 1)
    wanted = train(single, [torch.cat(each) for each in inputs], by)
    assert norms == pytest.approx(wanted, rel=1e-4)
    got = whole(trained)
    want = whole(single)
    assert got.keys() == want.keys() and len(got) == 4 + 2 * len(modules)
    for name in want:
        assert (got[name] - want[name]).abs().max() < 1e-5, name

    # The saved folder is one that PEFT loads: over the same ranks, and in one process.
    with torch.no_grad():
        y = model(inputs[0][rank])
    checkpoint.save_adapter(model, folder / "adapter")
    again = spread_adapters(
        peft.PeftModel.from_pretrained(Model(ep), folder / "adapter", is_trainable=True)
    )
    with torch.no_grad():
        assert torch.equal(again(inputs[0][rank]), y)
    by_one = peft.PeftModel.from_pretrained(Model(alone), folder / "adapter")
    with torch.no_grad():
        assert (by_one(inputs[0][rank]) - y).abs().max() < 1e-4
    with pytest.raises(ValueError, match="must not exist yet"):
        checkpoint.save_adapter(model, folder / "adapter")

    # A layer that serves loads it, too.
    if wrap == "nothing":
        serving = make_ep(experts=E, top_k=K, hidden=D, capacity={"extra_bytes": 4})
        served = Model(serving, adapters=2, adapter_rank=4)
        served.mlp.load_adapter(1, folder / "adapter", "mlp")
        x = served.q_proj(inputs[0][rank])
        with torch.no_grad():
            got = inputs[0][rank] + served.mlp(x, adapter_ids=torch.ones(T, dtype=torch.int32))
        assert (got - y).abs().max() < 1e-4


class Biased(Model):
    """The same with a bias, which FSDP shards."""

    def __init__(self, ep: ExpertParallel) -> None:
        super().__init__(ep)
        self.q_proj = nn.Linear(D, D)


def test_biases_are_saved_under_fsdp(peft, make_ep, alone, rank, folder):
    ep = make_ep(experts=E, top_k=K, hidden=D)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=TARGETS, bias="all")
    model = spread_adapters(peft.get_peft_model(Biased(ep), config))
    fully_shard(model)

    # Ranks have drawn other factors: those of a step are the same on all.
    train(model, [randn(T, D, seed=rank)], 1)
    checkpoint.save_adapter(model, folder / "adapter")
    by_one = peft.PeftModel.from_pretrained(Biased(alone), folder / "adapter")
    saved = {
        name: value
        for name, value in by_one.named_parameters()
        if "lora_" in name or name.endswith(".bias")
    }
    want = whole(model)
    assert saved.keys() == want.keys()
    assert any(name.endswith("q_proj.base_layer.bias") for name in want)
    for name, value in saved.items():
        assert torch.equal(value, want[name]), name


def test_a_checkpoint_with_the_optimizer(make_ep, rank, folder):
    ep = make_ep(experts=E, top_k=K, hidden=D)
    models = [spread_adapters(adapted(ep, ())) for _ in range(2)]
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        for model in models
    ]
    x = randn(T, D, seed=rank)

    def step(which: int) -> None:
        optimizers[which].zero_grad()
        models[which](x).square().sum().backward()
        optimizers[which].step()

    step(0)
    checkpoint.save(models[0], folder / "state", optimizers[0])
    # The second model is emptied, and loads the first one.
    with torch.no_grad():
        for value in models[1].parameters():
            value.zero_()
    checkpoint.load(models[1], folder / "state", optimizers[1])
    # Further steps of both are the same.
    for _ in range(2):
        step(0)
        step(1)
    for one, other in zip(whole(models[0]).values(), whole(models[1]).values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("victim", "stride"), [(0, 29), (1, 29), slow(0, 1), slow(1, 1)])
def test_all_ranks_raise_wherever_a_handler_raises(
    make_ep, size, rank, folder, victim, stride, monkeypatch
):
    """The folder is there where all have succeeded."""
    if size == 1:
        pytest.skip("one rank waits for nobody")
    files = FILES | {folders.__file__, peft_folder.__file__, state_dicts.__file__}
    # The handler may raise from where this rank begins to look for the parts of its adapter.
    parts_of = peft_folder._parts
    ep = make_ep(experts=E, top_k=K, hidden=D)
    model = spread_adapters(adapted(ep))

    def step(begun: Callable[[], None]) -> None:
        def in_the_step(*arguments: Any) -> dict[str, Any]:
            begun()
            return parts_of(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(peft_folder, "_parts", in_the_step)
            checkpoint.save_adapter(model, folder / "end")

    check_folder_of_steps(rank, step, folder / "end", victim=victim, files=files, stride=stride)


def test_what_is_refused(make_ep, size, rank, folder):
    """Before a weight changes, and before a file loses experts."""
    if size == 1:
        pytest.skip("experts of one rank are no DTensors")
    ep = make_ep(experts=E, top_k=K, hidden=D)
    model = adapted(ep, ())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    # A call before the adapters are spread.
    with pytest.raises(RuntimeError, match="must have DTensors only"):
        model(randn(T, D))
    # An optimizer of the factors of before.
    spread_adapters(model)
    before = whole(model)
    model(randn(T, D, seed=rank)).sum().backward()
    with pytest.raises(RuntimeError, match="factors of before `spread_adapters`"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
    # PEFT's own save, which would have one rank's experts.
    if rank == 0:
        with pytest.raises(RuntimeError):
            model.save_pretrained(folder / "by peft")
    assert not list(folder.glob("by peft/*.safetensors"))
    # A model without adapters, and experts that no DTensor splits evenly.
    with pytest.raises(ValueError, match="must be one of PEFT, got Model"):
        checkpoint.save_adapter(Model(ep), folder / "ours")
    chunk = -(-(E + 1) // size)
    uneven = {"strategy": "explicit", "assignment": [x // chunk for x in range(E + 1)]}
    with pytest.raises(
        ValueError, match=r"`w_down` \[13, 32, 16\] must be split evenly, and by experts alone"
    ):
        spread_adapters(adapted(make_ep(experts=E + 1, top_k=K, hidden=D, placement=uneven), ()))
