"""torch's tools, accelerate, transformers and PEFT around models with experts on several ranks.

Each cell of the table in docs/training.md, "Tools", is right, which is equal to one process, or raises before a weight
changes. There is no third outcome.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from exchanges import make_config
from tool_models import D, E, K, Kind, Model, assert_same, tokens, train, train_alone, whole
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from epmoe import ExpertParallel, checkpoint, pack_routes, recording, replay
from epmoe.local.spread import is_spread
from epmoe.training import clip_grad_norm_, fully_shard, ignore_experts, spread_adapters

RATE, MAX_NORM = 1e-2, 0.05
adamw = functools.partial(torch.optim.AdamW, lr=RATE, eps=1e-3, foreach=False)


@dataclass
class Case:
    """One cell: a kind of experts, as it is or `prepared` as the page says."""

    kind: Kind
    prepared: bool
    ep: ExpertParallel
    folder: Path
    models: list[nn.Module] = field(default_factory=list)

    def model(self) -> Model:
        model = Model(self.kind, self.ep)
        self.models.append(model)
        return model

    def wrapped(self) -> nn.Module:
        """Under DDP, for cells of other tools."""
        return DistributedDataParallel(ignore_experts(self.model()))

    def is_right(
        self, model: nn.Module, optimizer: Callable[..., Any] = adamw, max_norm: float | None = None, steps: int = 2
    ) -> None:
        alone = Model(self.kind)
        assert_same(whole(model), train_alone(alone, optimizer(alone.parameters()), max_norm, range(steps)))


TOOLS: dict[str, Callable[[Case], None]] = {}


def tool(name: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    return lambda run: TOOLS.setdefault(name, run)


def trains(case: Case, model: nn.Module, optimizer: Callable[..., Any] = adamw, alone: Any = None) -> None:
    train(model, optimizer(model.parameters()))
    case.is_right(model, alone or optimizer)


@tool("`DistributedDataParallel`")
def ddp(case: Case) -> None:
    model = case.model()
    trains(case, DistributedDataParallel(ignore_experts(model) if case.prepared else model))


@tool("`FullyShardedDataParallel` (FSDP1)")
def fsdp1(case: Case) -> None:
    trains(case, fsdp.FullyShardedDataParallel(case.model(), device_id=torch.device("cpu"), use_orig_params=True))


@tool("`fully_shard` (FSDP2)")
def fsdp2(case: Case) -> None:
    trains(case, (fully_shard if case.prepared else fsdp.fully_shard)(case.model()))


@tool("`fully_shard` with replicas (HSDP)")
def hsdp(case: Case) -> None:
    replicas = 2 if case.ep.size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (replicas, case.ep.size // replicas), mesh_dim_names=("replicate", "shard"))
    trains(case, (fully_shard if case.prepared else fsdp.fully_shard)(case.model(), mesh=mesh))


class Both:
    """Two optimizers."""

    def __init__(self, others: Any, experts: Any) -> None:
        self.optimizers = others, experts

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()


@tool("`ZeroRedundancyOptimizer`")
def zero(case: Case) -> None:
    redundant = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=RATE, eps=1e-3)

    def split(parameters: Iterator[nn.Parameter]) -> Both:
        given = list(parameters)
        return Both(redundant([p for p in given if not is_spread(p)]), adamw([p for p in given if is_spread(p)]))

    trains(case, case.wrapped(), split if case.prepared else redundant, alone=adamw)


def scaled(case: Case, scaler: Any) -> None:
    """Steps with a scaled loss, and one in which a rank's experts overflow: all ranks leave it out."""
    model = case.wrapped()
    optimizer = adamw(model.parameters())

    def step(number: int) -> Tensor:
        x = tokens(number, dist.get_rank())
        optimizer.zero_grad()
        return (model(x) - x).square().mean()

    for number in range(2):
        scaler.scale(step(number)).backward()
        scaler.step(optimizer)
        scaler.update()
    case.is_right(model)
    before, scale = whole(model), scaler.get_scale()
    scaler.scale(step(2)).backward()
    if dist.get_rank() == 0:
        next(p for p in model.parameters() if is_spread(p)).grad.to_local().fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert_same(whole(model), before, 0.0)
    assert scaler.get_scale() < scale


@tool("`torch.amp.GradScaler`")
def grad_scaler(case: Case) -> None:
    scaled(case, torch.amp.GradScaler("cpu", init_scale=8.0))


@tool("`ShardedGradScaler`")
def sharded_grad_scaler(case: Case) -> None:
    scaled(case, ShardedGradScaler("cpu", init_scale=8.0))


@tool("`nn.utils.clip_grad_norm_`")
def clip(case: Case) -> None:
    model = case.wrapped()

    def clips() -> None:
        if case.prepared:
            clip_grad_norm_(model, MAX_NORM)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    train(model, adamw(model.parameters()), clips)
    case.is_right(model, max_norm=MAX_NORM)


@tool("accelerate")
def accelerated(case: Case) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator, model = accelerate.Accelerator(cpu=True), case.model()
    model, optimizer = accelerator.prepare(ignore_experts(model) if case.prepared else model, adamw(model.parameters()))
    for step in range(2):
        x = tokens(step, dist.get_rank())
        optimizer.zero_grad()
        accelerator.backward((model(x) - x).square().mean())
        clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
    case.is_right(model, max_norm=MAX_NORM)


@tool("accelerate's `clip_grad_norm_`")
def accelerated_clip(case: Case) -> None:
    accelerator, model = pytest.importorskip("accelerate").Accelerator(cpu=True), case.wrapped()
    train(model, adamw(model.parameters()), lambda: accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
    case.is_right(model, max_norm=MAX_NORM)


@tool("transformers' `Trainer`")
def trainer(case: Case) -> None:
    transformers = pytest.importorskip("transformers")

    class WithLoss(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            x = x.flatten(0, 1)
            return {"loss": (self.model(x) - x).square().mean()}

    class Clips(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            clip_grad_norm_(model, MAX_NORM)

    model = WithLoss(case.model())
    arguments = transformers.TrainingArguments(
        str(case.folder), use_cpu=True, max_steps=2, per_device_train_batch_size=1, report_to=[], save_strategy="no",
        max_grad_norm=0.0 if case.prepared else MAX_NORM, disable_tqdm=True, logging_strategy="no",
        lr_scheduler_type="constant", remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    data = [{"x": tokens(step, rank)} for step in range(2) for rank in range(dist.get_world_size())]

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    optimizer = adamw(model.parameters())
    prepared = ignore_experts(model) if case.prepared else model
    runs = InOrder(
        prepared, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[Clips] * case.prepared
    )
    runs.train()
    case.is_right(model.model, max_norm=MAX_NORM)


@tool("transformers' `save_pretrained`")
def pretrained(case: Case) -> None:
    transformers = pytest.importorskip("transformers")
    inner = case.model()

    class Pretrained(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.inner = inner

    Pretrained(transformers.PretrainedConfig()).save_pretrained(case.folder / str(dist.get_rank()))


class Merged(nn.Module):
    """A model in one process, to whose weights the factors of a model of PEFT are added, as parameters of its own."""

    def __init__(self, alone: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.alone, values = alone.requires_grad_(False), whole(model)
        self.factors = nn.ParameterDict()
        self.of: dict[str, tuple[str, str, float]] = {}
        for path, wrapper in model.named_modules():
            if hasattr(wrapper, "parameter_name"):
                names = [f"{path}.lora_{end}.default.weight" for end in "AB"]
                self.factors |= {name.replace(".", "/"): values[name] for name in names}
                block = path.removeprefix("base_model.model.").replace(".base_layer", "")
                self.of[f"{block}.{wrapper.parameter_name}"] = (*names, wrapper.scaling["default"])

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.alone.named_parameters())
        for name, (of_a, of_b, scaling) in self.of.items():
            a, b = (self.factors[of.replace(".", "/")] for of in (of_a, of_b))
            low, high = a.unflatten(0, (E, -1)), b.unflatten(1, (-1, E))
            weights[name] = weights[name] + torch.einsum("ore,eri->eoi", high, low) * scaling
        return torch.func.functional_call(self.alone, weights, (x,))


@tool("PEFT's `target_parameters`")
def peft(case: Case) -> None:
    peft = pytest.importorskip("peft")
    names = ("w_gate_up", "w_down") if case.kind == "grouped" else ("up", "down")
    targets = [f"moe.experts.{name}" for name in names]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
    model = peft.get_peft_model(case.model(), config)
    if case.prepared:
        ignore_experts(spread_adapters(model))
    merged = Merged(Model(case.kind), model)
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        train(model, adamw(trained))
    except RuntimeError:
        model.unload()
        raise
    train_alone(merged, adamw(merged.factors.parameters()))
    got = {name: value for name, value in whole(model).items() if "lora_" in name}
    assert_same(got, {name.replace("/", "."): value.detach() for name, value in merged.factors.items()})


def resumes(
    case: Case,
    wrap: Callable[[Model], nn.Module],
    optimizer: Callable[..., Any] = adamw,
    save: Any = None,
    load: Any = None,
) -> None:
    """Two steps, saved and loaded into another model, and a third one there."""
    first, second = wrap(case.model()), wrap(case.model())
    of_first, of_second = optimizer(first.parameters()), optimizer(second.parameters())
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(0.5)
    train(first, of_first)
    (save or checkpoint.save)(first, case.folder / "saved", of_first)
    (load or checkpoint.load)(second, case.folder / "saved", of_second)
    train(second, of_second, steps=[2])
    case.is_right(second, optimizer, steps=3)


def under_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(ignore_experts(model))


@tool("`torch.compile` of each block")
def compiled_blocks(case: Case) -> None:
    def wrap(model: Model) -> nn.Module:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend="aot_eager")
        return under_ddp(model)

    resumes(case, wrap)


@tool("`torch.compile` of the model")
def compiled(case: Case) -> None:
    resumes(case, lambda model: torch.compile(under_ddp(model), backend="aot_eager"))


@tool("`checkpoint_wrapper`")
def checkpointed(case: Case) -> None:
    def wrap(model: Model) -> nn.Module:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        return under_ddp(model)

    resumes(case, wrap)


class Replayed(nn.Module):
    """Each call replays the experts of a call without gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), recording(self.module) as record:
            self.module(x)
        with replay(self.module, pack_routes(record, E)):
            y: Tensor = self.module(x)
        return y


@tool("`epmoe.replay` of records")
def replayed(case: Case) -> None:
    trains(case, Replayed(case.wrapped()))


@tool("`AveragedModel`")
def averaged(case: Case) -> None:
    model = case.wrapped()
    average, optimizer = AveragedModel(model), adamw(model.parameters())
    states = []
    for step in range(2):
        train(model, optimizer, steps=[step])
        average.update_parameters(model)
        states.append(whole(model))
    assert_same(whole(average), {name: (states[0][name] + states[1][name]) / 2 for name in states[0]})


@tool("`torch.save` of each rank's state dict")
def saved_by_each(case: Case) -> None:
    model, file = case.model(), case.folder / f"{dist.get_rank()}.pt"
    before = whole(model)
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(torch.load(file))
    assert_same(whole(model), before, 0.0)


@tool("`torch.save` of rank 0's state dict")
def saved_by_first(case: Case) -> None:
    model, file = case.model(), case.folder / "0.pt"
    before = whole(model)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), file)
    dist.barrier()
    try:
        model.load_state_dict(torch.load(file))
    finally:
        assert_same(whole(model), before, 0.0)


@tool("`torch.save` of rank 0's optimizer")
def optimizer_saved_by_first(case: Case) -> None:
    model, file = case.wrapped(), case.folder / "0.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    train(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), file)
    dist.barrier()
    optimizer.load_state_dict(torch.load(file))
    optimizer.step()


def dcp_save(model: nn.Module, folder: Path, optimizer: Any, asynchronous: bool = False) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    if asynchronous:
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)


def dcp_load(model: nn.Module, folder: Path, optimizer: Any) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@tool("torch.distributed.checkpoint")
def torch_dcp(case: Case) -> None:
    resumes(case, under_ddp, save=dcp_save, load=dcp_load)


@tool("`async_save`")
def torch_async(case: Case) -> None:
    resumes(case, under_ddp, save=functools.partial(dcp_save, asynchronous=True), load=dcp_load)


@tool("`full_state_dict=True`")
def full(case: Case) -> None:
    model = case.wrapped()
    options = StateDictOptions(full_state_dict=True)
    state = copy.deepcopy(get_model_state_dict(model, options=options))
    alone = Model(case.kind)
    alone.load_state_dict({key: value for key, value in state.items() if "_extra_state" not in key})
    assert_same(whole(model), whole(alone), 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, state, options=options)
    assert_same(whole(model), whole(alone), 0.0)


class OwnOptimizer(torch.optim.Optimizer):
    """One of a user, which goes parameter by parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.update(p, self.state[p]), alpha=-RATE)

    def update(self, p: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError


class Sm3(OwnOptimizer):
    """State with a row for each index of each dimension, in place of one for each expert."""

    def update(self, p: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        dims = range(p.dim())
        rest = [[other for other in dims if other != dim] for dim in dims]
        if not state:
            state |= {f"sums{dim}": torch.zeros_like(p.amax(rest[dim], keepdim=True)) for dim in dims}
        sums = functools.reduce(torch.minimum, [state[f"sums{dim}"] for dim in dims]) + p.grad.square()
        state |= {f"sums{dim}": sums.amax(rest[dim], keepdim=True) for dim in dims}
        return p.grad / (sums.sqrt() + 1e-3)


class Muon(OwnOptimizer):
    """Orthogonal updates of each matrix, [n, k] or each of [E, n, k]."""

    def update(self, p: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        if not state:
            state["momentum"] = torch.zeros_like(p)
        update = state["momentum"].mul_(0.9).add_(p.grad)
        update = update / (update.square().sum((-2, -1), keepdim=True).sqrt() + 1e-3)
        for _ in range(2):
            update = 1.5 * update - 0.5 * update @ update.mT @ update
        return update


def in_groups(optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """With a group of parameters for the experts."""

    def make(parameters: Iterator[nn.Parameter]) -> Any:
        given = list(parameters)
        groups = [p for p in given if not is_spread(p)], [p for p in given if is_spread(p)]
        return optimizer([{"params": group} for group in groups if group])

    return make


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "`AdamW`": functools.partial(torch.optim.AdamW, lr=RATE, eps=1e-3),
    "`AdamW(foreach=True)`": functools.partial(adamw, foreach=True),
    "`AdamW(fused=True)`": functools.partial(adamw, foreach=False, fused=True),
    "`SGD`": functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9),
    "`Adafactor`": functools.partial(torch.optim.Adafactor, lr=RATE),
    "optimizers like SM3": Sm3,
    "optimizers like Muon": Muon,
}


def optimizes(case: Case, optimizer: Callable[..., Any]) -> None:
    resumes(case, under_ddp, in_groups(optimizer) if case.prepared else optimizer)


TOOLS |= {name: functools.partial(optimizes, optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()}

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
ROWS = dict(re.findall(r"^\| (.+?) \| ((?:right|raises).+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
"""The table of the page: what a tool does as it is, and as the page says."""
QUICK = ["`DistributedDataParallel`", "`fully_shard` (FSDP2)", "`nn.utils.clip_grad_norm_`", "`AdamW`"]


@pytest.fixture(scope="module")
def ep() -> Iterator[ExpertParallel]:
    options = {"experts": E, "top_k": K, "hidden": D, "max_tokens": 16, "routing": {"renormalize": True}}
    with ExpertParallel(make_config(dist.get_world_size(), timeout_s=60.0, **options), device="cpu") as made:
        yield made


def test_torch_does_not_choose_foreach_for_experts_and_others(ep):
    """On GPUs it would, and raise."""
    model = Model("grouped", ep)
    for optimizer, foreach in (
        (torch.optim.AdamW(model.parameters()), [False]),
        (in_groups(torch.optim.AdamW)(model.parameters()), [None, None]),
        (torch.optim.SGD(model.parameters(), foreach=True), [True]),
    ):
        optimizer.step()
        assert [group["foreach"] for group in optimizer.param_groups] == foreach


def test_the_page_has_each_tool():
    assert ROWS.keys() == TOOLS.keys()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if name in QUICK else pytest.mark.slow)
        for name in TOOLS
        for kind in ("grouped", "own")
    ],
)
def test_each_cell_is_right_or_raises_before_a_weight_changes(ep, folder, name, kind):
    for prepared, said in enumerate(dict.fromkeys(ROWS[name].split(" | "))):  # two equal cells are one call
        case = Case(kind, bool(prepared), ep, folder / str(prepared))
        case.folder.mkdir(exist_ok=True)
        problem = None
        try:
            TOOLS[name](case)
        except AssertionError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problems: list[str | None] = [None] * ep.size
        dist.all_gather_object(problems, problem)
        found = [each for each in problems if each is not None]
        if words := re.match(r'raises "(.+?)"', said):
            assert found and all(words[1] in each for each in found), found
            assert_same(whole(case.models[0]), whole(Model(kind)), 0.0)
        else:
            assert said.startswith("right") and not found, found
        ep.check()


@pytest.mark.parametrize("kind", ["grouped", "own"])
@pytest.mark.parametrize("how", ["ddp", "fsdp", "experts are sharded, too"])
def test_replicas_of_experts(size, kind, how):
    """One norm of gradients, and the numbers of one process."""
    if size % 2:
        pytest.skip("needs 2 or 4 ranks")
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "ep"))
    sharded = how.startswith("experts")
    options = {"experts": E, "top_k": K, "hidden": D, "max_tokens": 16, "routing": {"renormalize": True}}
    with ExpertParallel(make_config(size // 2, **options), mesh["ep"] if sharded else mesh, device="cpu") as ep:
        model: nn.Module = Model(kind, ep)
        if sharded and size > 2:
            with pytest.raises(ValueError, match=f"must be spread over the {size} ranks .* got {size // 2}"):
                ignore_experts(model)
        for block in model.blocks if sharded else ():
            fsdp.fully_shard(block.moe.experts, mesh=mesh["replicate"])
        model = under_ddp(model) if how == "ddp" else fully_shard(model)
        train(model, adamw(model.parameters()), lambda: clip_grad_norm_(model, MAX_NORM))
        alone = Model(kind)
        assert_same(whole(model), train_alone(alone, adamw(alone.parameters()), MAX_NORM))
        ep.check()


@pytest.mark.parametrize("placement", [{"num_redundant_experts": 2}, {"strategy": "round_robin"}])
def test_placements_that_no_dtensor_has_only_serve(size, placement):
    with ExpertParallel(make_config(size, experts=E, top_k=K, hidden=D, placement=placement), device="cpu") as ep:
        [block, _] = Model("grouped", ep).blocks
        with torch.no_grad():
            block(tokens(0, ep.rank))
        why = "num_redundant_experts" if "num_redundant_experts" in placement else "torch.chunk"
        with pytest.raises(RuntimeError, match=f"must have DTensors only in calls with gradients, got .*{why}"):
            block(tokens(0, ep.rank))
        for prepare in (ignore_experts, fully_shard):
            with pytest.raises(ValueError, match=why):
                prepare(block)


def test_own_experts_that_are_not_spread_are_refused(ep):
    with pytest.raises(ValueError, match=r"`experts` must be spread, since `up` requires grad"):
        Model("own", ep, spreads=False)
