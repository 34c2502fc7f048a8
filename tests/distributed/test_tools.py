"""torch's tools, accelerate, transformers and PEFT around models with experts on several ranks.

Each cell of the table in docs/training.md, "Tools", is right, which is equal to one process, or
raises before a weight changes. There is no third outcome.
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
from interrupted_steps import of_all
from tool_models import (
    EXPERTS,
    D,
    E,
    K,
    Kind,
    Model,
    OwnExperts,
    assert_same,
    loss_of,
    that_call_themselves,
    tokens,
    train,
    train_alone,
    weights_of,
    whole,
    with_checkpoint_within,
)
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
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint as recomputed

from epmoe import ExpertParallel, checkpoint, pack_routes, recording, replay
from epmoe.local.spread import is_spread
from epmoe.training import (
    TrainingExchange,
    clip_grad_norm_,
    fully_shard,
    ignore_experts,
    spread,
    spread_adapters,
)

RATE = 1e-2
MAX_NORM = 0.05
adamw = functools.partial(torch.optim.AdamW, lr=RATE, eps=1e-3, foreach=False)


@dataclass
class Case:
    """One cell: a kind of experts, as it is or `prepared` as the page says."""

    kind: Kind
    prepared: bool
    ep: ExpertParallel
    folder: Path
    models: list[nn.Module] = field(default_factory=list)

    def model(self, experts: type[nn.Module] | None = None) -> Model:
        model = Model(self.kind, self.ep, experts=experts)
        self.models.append(model)
        return model

    def wrapped(self) -> nn.Module:
        """Under DDP, for cells of other tools."""
        return DistributedDataParallel(ignore_experts(self.model()))

    def is_right(
        self,
        model: nn.Module,
        optimizer: Callable[..., Any] = adamw,
        max_norm: float | None = None,
        steps: int = 2,
    ) -> None:
        alone = Model(self.kind)
        assert_same(
            whole(model), train_alone(alone, optimizer(alone.parameters()), max_norm, range(steps))
        )


TOOLS: dict[str, Callable[[Case], None]] = {}


def tool(name: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    return lambda run: TOOLS.setdefault(name, run)


def trains(
    case: Case, model: nn.Module, optimizer: Callable[..., Any] = adamw, alone: Any = None
) -> None:
    train(model, optimizer(model.parameters()))
    case.is_right(model, alone or optimizer)


@tool("`DistributedDataParallel`")
def ddp(case: Case) -> None:
    model = case.model()
    trains(case, DistributedDataParallel(ignore_experts(model) if case.prepared else model))


@tool("`FullyShardedDataParallel` (FSDP1)")
def fsdp1(case: Case) -> None:
    trains(
        case,
        fsdp.FullyShardedDataParallel(
            case.model(), device_id=torch.device("cpu"), use_orig_params=True
        ),
    )


@tool("`fully_shard` (FSDP2)")
def fsdp2(case: Case) -> None:
    trains(case, (fully_shard if case.prepared else fsdp.fully_shard)(case.model()))


@tool("`fully_shard` with replicas (HSDP)")
def hsdp(case: Case) -> None:
    replicas = 2 if case.ep.size % 2 == 0 else 1
    mesh = init_device_mesh(
        "cpu", (replicas, case.ep.size // replicas), mesh_dim_names=("replicate", "shard")
    )
    trains(case, (fully_shard if case.prepared else fsdp.fully_shard)(case.model(), mesh=mesh))


class Both:
    """Two optimizers."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: [getattr(each, name)() for each in self.optimizers]


@tool("`ZeroRedundancyOptimizer`")
def zero(case: Case) -> None:
    redundant = functools.partial(
        ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=RATE, eps=1e-3
    )

    def split(parameters: Iterator[nn.Parameter]) -> Both:
        given = list(parameters)
        return Both(
            redundant([p for p in given if not is_spread(p)]),
            adamw([p for p in given if is_spread(p)]),
        )

    trains(case, case.wrapped(), split if case.prepared else redundant, alone=adamw)


def scaled(case: Case, scaler: Any) -> None:
    """A step with a scaled loss."""
    model = case.wrapped()
    optimizer = adamw(model.parameters())
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    case.is_right(model, steps=1)


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
    accelerator = accelerate.Accelerator(cpu=True)
    model = case.model()
    model, optimizer = accelerator.prepare(
        ignore_experts(model) if case.prepared else model, adamw(model.parameters())
    )
    for step in range(2):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, step))
        clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
    case.is_right(model, max_norm=MAX_NORM)


@tool("accelerate's `clip_grad_norm_`")
def accelerated_clip(case: Case) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = case.wrapped()
    train(
        model,
        adamw(model.parameters()),
        lambda: accelerator.clip_grad_norm_(model.parameters(), MAX_NORM),
    )
    case.is_right(model, max_norm=MAX_NORM)


@tool("transformers' `Trainer`")
def trainer(case: Case) -> None:
    transformers = pytest.importorskip("transformers")

    # The Trainer wants a loss from the model, and its clipping is replaced by a callback.
    class WithLoss(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            x = x.flatten(0, 1)
            return {"loss": (self.model(x) - x).square().mean()}

    class Clips(transformers.TrainerCallback):
        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            clip_grad_norm_(model, MAX_NORM)

    model = WithLoss(case.model())
    arguments = transformers.TrainingArguments(
        str(case.folder),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=1,
        report_to=[],
        save_strategy="no",
        max_grad_norm=0.0 if case.prepared else MAX_NORM,
        disable_tqdm=True,
        logging_strategy="no",
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    # Sequential samples: rank r takes the tokens of rank r, as the table's other tools do.
    data = [{"x": tokens(step, rank)} for step in range(2) for rank in range(dist.get_world_size())]

    optimizer = adamw(model.parameters())
    prepared = ignore_experts(model) if case.prepared else model
    runs = transformers.Trainer(
        prepared,
        arguments,
        train_dataset=data,
        optimizers=(optimizer, None),
        callbacks=[Clips] * case.prepared,
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


@tool("PEFT's `target_parameters`")
def peft(case: Case) -> None:
    peft = pytest.importorskip("peft")
    names = ("w_gate_up", "w_down") if case.kind == "grouped" else ("up", "down")
    targets = [f"moe.experts.{name}" for name in names]
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=targets, init_lora_weights=False
    )
    model, alone = (peft.get_peft_model(each, config) for each in (case.model(), Model(case.kind)))
    if case.prepared:
        ignore_experts(spread_adapters(model))
    # Both begin with the same factors.
    factors = {name: value for name, value in whole(model).items() if "lora_" in name}
    alone.load_state_dict(factors, strict=False)
    try:
        train(model, adamw([p for p in model.parameters() if p.requires_grad]))
    except RuntimeError:
        model.unload()
        raise
    # They have changed, and alike.
    want = train_alone(alone, adamw([p for p in alone.parameters() if p.requires_grad]))
    got = whole(model)
    assert factors and not any(torch.equal(got[name], factors[name]) for name in factors)
    assert_same({name: got[name] for name in factors}, {name: want[name] for name in factors})


def resumes(
    case: Case,
    wrap: Callable[[Model], nn.Module],
    optimizer: Callable[..., Any] = adamw,
    save: Any = None,
    load: Any = None,
) -> None:
    """Two steps, saved and loaded into another model, and a third one there."""
    first = wrap(case.model())
    second = wrap(case.model())
    of_first = optimizer(first.parameters())
    of_second = optimizer(second.parameters())
    # The second model has other weights, until it loads.
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


def each_block(case: Case, wrapper: Callable[..., Any]) -> None:
    def wrap(model: Model) -> nn.Module:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = wrapper(block)
        return under_ddp(model)

    resumes(case, wrap)


eagerly_compiled = functools.partial(torch.compile, backend="aot_eager")
TOOLS |= {
    "`torch.compile` of each block": functools.partial(each_block, wrapper=eagerly_compiled),
    "`torch.compile` of the model": functools.partial(
        resumes, wrap=lambda model: eagerly_compiled(under_ddp(model))
    ),
    "`checkpoint_wrapper`": functools.partial(each_block, wrapper=checkpoint_wrapper),
}


@tool("`torch.compile` under `fully_shard`")
def compiled_and_sharded(case: Case) -> None:
    model = case.model()
    for module in (*model.blocks, model):
        (fully_shard if case.prepared else fsdp.fully_shard)(module)
    trains(case, eagerly_compiled(model))


@tool("`torch.compile` of each block, with `allow_unspec_int_on_nn_module`")
def compiled_with_numbers_that_change(case: Case) -> None:
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        each_block(case, eagerly_compiled)


class Recomputes(nn.Module):
    """A block within a checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = recomputed(self.module, x, use_reentrant=False)
        return y


@tool("`checkpoint` in what `torch.compile` takes")
def checkpoints_within_compiled(case: Case) -> None:
    model = case.model()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = eagerly_compiled(Recomputes(block))
    # DDP would split the graph.
    trains(case, fully_shard(model))


@tool("`checkpoint` in the `forward` of experts")
def checkpoints_within_experts(case: Case) -> None:
    for reentrant in (False, True):
        trains(
            case,
            under_ddp(case.model(with_checkpoint_within(EXPERTS[case.kind], reentrant))),
        )


@tool("experts that call themselves")
def recursive_experts(case: Case) -> None:
    trains(case, under_ddp(case.model(that_call_themselves(EXPERTS[case.kind]))))


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
    average = AveragedModel(model)
    optimizer = adamw(model.parameters())
    states = []
    for step in range(2):
        train(model, optimizer, steps=[step])
        average.update_parameters(model)
        states.append(whole(model))
    assert_same(
        whole(average), {name: (states[0][name] + states[1][name]) / 2 for name in states[0]}
    )


@tool("`AveragedModel(multi_avg_fn=…)`")
def averaged_by_foreach(case: Case) -> None:
    model = case.wrapped()
    average = (
        AveragedModel(model, avg_fn=get_ema_avg_fn(0.5))
        if case.prepared
        else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    )
    optimizer = adamw(model.parameters())
    average.update_parameters(model)
    average.update_parameters(model)
    before = whole(model)
    train(model, optimizer)
    average.update_parameters(model)
    after = whole(model)
    assert_same(whole(average), {name: (before[name] + after[name]) / 2 for name in before})


@tool("`model.double()` and back by `float()`")
def cast_and_back(case: Case) -> None:
    trains(case, under_ddp(case.model().double().float()))


@tool("layers that share experts, under `torch.compile`")
def shared_experts(case: Case) -> None:
    model = case.model()
    model.blocks[1].moe.experts = model.blocks[0].moe.experts
    wrapped = eagerly_compiled(under_ddp(model))
    before = whole(model)
    # Sharded,
    checkpoint.save(wrapped, case.folder / "saved")
    zero_(model)
    checkpoint.load(wrapped, case.folder / "saved")
    assert_same(whole(model), before, 0.0)
    # and whole.
    state = copy.deepcopy(checkpoint.full_state_dict(wrapped))
    zero_(model)
    checkpoint.load_full_state_dict(wrapped, state)
    assert_same(whole(model), before, 0.0)


@tool("PEFT's `save_pretrained` under FSDP2, with `modules_to_save`")
def peft_saved(case: Case) -> None:
    peft = pytest.importorskip("peft")
    names = ("w_gate_up", "w_down") if case.kind == "grouped" else ("up", "down")
    config = peft.LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=[f"moe.experts.{name}" for name in names],
        modules_to_save=["dense"],
        init_lora_weights=False,
    )
    model = spread_adapters(peft.get_peft_model(case.model(), config))
    fully_shard(model)
    folder = case.folder / "adapter"
    if case.prepared:
        checkpoint.save_adapter(model, folder)
        alone = peft.PeftModel.from_pretrained(Model(case.kind), folder)
        assert_same(whole(alone), whole(model), 0.0)
        return
    try:
        model.save_pretrained(folder / str(dist.get_rank()))
    finally:
        model.unload()


def number_of(case: Case, value: Tensor) -> float:
    """What Python reads of a tensor: as the page says, of all ranks' experts."""
    whole_value = value.full_tensor() if case.prepared and is_spread(value) else value
    return whole_value.item()


@tool("clipping by `item()` of each norm")
def clip_by_item(case: Case) -> None:
    model = case.wrapped()

    def clips() -> None:
        gradients = [p.grad for p in model.parameters()]
        norm = sum(number_of(case, gradient.norm()) ** 2 for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, MAX_NORM / (norm + 1e-6)))

    train(model, adamw(model.parameters()), clips)
    case.is_right(model, max_norm=MAX_NORM)


@tool("a step that `isfinite()` of gradients skips")
def skip_by_isfinite(case: Case) -> None:
    model = case.wrapped()
    optimizer = adamw(model.parameters())

    def step_if_finite() -> None:
        if all([number_of(case, p.grad.isfinite().all()) for p in model.parameters()]):
            optimizer.step()

    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 1 and dist.get_rank() == 0:  # one rank alone has gradients that are not finite
            next(p for p in model.parameters() if is_spread(p)).grad.to_local().fill_(torch.inf)
        step_if_finite()
    case.is_right(model, steps=1)


def zero_(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


@tool("`torch.save` of each rank's state dict")
def saved_by_each(case: Case) -> None:
    model = case.model()
    file = case.folder / f"{dist.get_rank()}.pt"
    before = whole(model)
    torch.save(model.state_dict(), file)
    zero_(model)
    model.load_state_dict(torch.load(file))
    assert_same(whole(model), before, 0.0)


def loads_that_of_first(case: Case, saved: Any) -> None:
    if dist.get_rank() == 0:
        torch.save(saved.state_dict(), case.folder / "0.pt")
    dist.barrier()
    saved.load_state_dict(torch.load(case.folder / "0.pt"))


@tool("`torch.save` of rank 0's state dict")
def saved_by_first(case: Case) -> None:
    loads_that_of_first(case, case.model())


@tool("`torch.save` of rank 0's optimizer")
def optimizer_saved_by_first(case: Case) -> None:
    model = case.wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    train(model, optimizer)
    loads_that_of_first(case, optimizer)
    optimizer.step()


def both_states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def dcp_save(model: nn.Module, folder: Path, optimizer: Any) -> None:
    dcp.save(both_states(model, optimizer), checkpoint_id=folder)


def dcp_async(model: nn.Module, folder: Path, optimizer: Any) -> None:
    dcp.async_save(both_states(model, optimizer), checkpoint_id=folder).result()


def dcp_load(model: nn.Module, folder: Path, optimizer: Any) -> None:
    state = both_states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


TOOLS |= {
    "torch.distributed.checkpoint": functools.partial(
        resumes, wrap=under_ddp, save=dcp_save, load=dcp_load
    ),
    "`async_save`": functools.partial(resumes, wrap=under_ddp, save=dcp_async, load=dcp_load),
}


@tool("`full_state_dict=True`")
def full(case: Case) -> None:
    model = case.wrapped()
    alone = Model(case.kind)
    options = StateDictOptions(full_state_dict=True)
    state = copy.deepcopy(get_model_state_dict(model, options=options))
    alone.load_state_dict({key: value for key, value in state.items() if "_extra_state" not in key})
    assert_same(whole(model), whole(alone), 0.0)
    zero_(model)
    set_model_state_dict(model, state, options=options)
    assert_same(whole(model), whole(alone), 0.0)


class OwnOptimizer(torch.optim.Optimizer):
    """One of a user, which computes all updates before it applies any."""

    def __init__(
        self, parameters: Any, update: Callable[[nn.Parameter, dict[str, Tensor]], Tensor]
    ) -> None:
        super().__init__(parameters, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        updates = [self.update(p, self.state[p]) for p in parameters]
        for p, update in zip(parameters, updates, strict=True):
            p.add_(update, alpha=-RATE)


def like_sm3(p: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
    """State with a row for each index of each dimension, in place of one for each expert."""
    rest = {
        f"sums{dim}": [other for other in range(p.dim()) if other != dim] for dim in range(p.dim())
    }
    if not state:
        state |= {
            name: torch.zeros_like(p.amax(others, keepdim=True)) for name, others in rest.items()
        }
    sums = functools.reduce(torch.minimum, [state[name] for name in rest]) + p.grad.square()
    state |= {name: sums.amax(others, keepdim=True) for name, others in rest.items()}
    return p.grad / (sums.sqrt() + 1e-3)


def like_muon(p: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
    """Orthogonal updates of each matrix, [n, k] or each of [E, n, k]."""
    update = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
    update = update / (update.square().sum((-2, -1), keepdim=True).sqrt() + 1e-3)
    for _ in range(2):
        update = 1.5 * update - 0.5 * update @ update.mT @ update
    return update


def like_lamb(p: nn.Parameter, state: dict[str, Tensor], case: Case) -> Tensor:
    """Updates as large as the weights."""
    return p.grad * (number_of(case, p.norm()) / (number_of(case, p.grad.norm()) + 1e-3))


def like_prodigy(p: nn.Parameter, state: dict[str, Tensor], case: Case) -> Tensor:
    """A rate that grows by how far the weights have gone along the gradients."""
    start = state.setdefault("start", p.detach().clone())
    return p.grad * (1.0 + 1e3 * abs(number_of(case, (p.grad * (start - p)).sum())))


@tool("optimizers like LAMB and LARS")
def lamb(case: Case) -> None:
    update = functools.partial(like_lamb, case=case)
    trains(case, case.wrapped(), functools.partial(OwnOptimizer, update=update))


@tool("optimizers like Prodigy")
def prodigy(case: Case) -> None:
    update = functools.partial(like_prodigy, case=case)
    trains(case, case.wrapped(), functools.partial(OwnOptimizer, update=update))


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
    "optimizers like SM3": functools.partial(OwnOptimizer, update=like_sm3),
    "optimizers like Muon": functools.partial(OwnOptimizer, update=like_muon),
}


def optimizes(case: Case, optimizer: Callable[..., Any]) -> None:
    resumes(case, under_ddp, in_groups(optimizer) if case.prepared else optimizer)


TOOLS |= {
    name: functools.partial(optimizes, optimizer=optimizer)
    for name, optimizer in OPTIMIZERS.items()
}

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
ROWS = dict(
    re.findall(
        r"^\| (.+?) \| ((?:right|raises).+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
)
"""The table of the page: what a tool does as it is, and as the page says."""
QUICK = [
    "`DistributedDataParallel`",
    "`fully_shard` (FSDP2)",
    "`nn.utils.clip_grad_norm_`",
    "`AdamW`",
]


@pytest.fixture(scope="module")
def ep() -> Iterator[ExpertParallel]:
    options = {
        "experts": E,
        "top_k": K,
        "hidden": D,
        "max_tokens": 16,
        "routing": {"renormalize": True},
    }
    with ExpertParallel(
        make_config(dist.get_world_size(), timeout_s=60.0, **options), device="cpu"
    ) as made:
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
    # Two equal cells are one call.
    for prepared, said in enumerate(dict.fromkeys(ROWS[name].split(" | "))):
        case = Case(kind, bool(prepared), ep, folder / str(prepared))
        case.folder.mkdir(exist_ok=True)
        problem = None
        try:
            TOOLS[name](case)
        except AssertionError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        # The cell says what any of the ranks has raised, and then no weight has changed.
        found = [each for each in of_all(problem) if each is not None]
        words = re.match(r'raises "(.+?)"', said)
        if words:
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
    # Two replicas, each of which spreads its experts over half of the ranks.
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "ep"))
    sharded = how.startswith("experts")
    options = {
        "experts": E,
        "top_k": K,
        "hidden": D,
        "max_tokens": 16,
        "routing": {"renormalize": True},
    }
    with ExpertParallel(
        make_config(size // 2, **options), mesh["ep"] if sharded else mesh, device="cpu"
    ) as ep:
        model: nn.Module = Model(kind, ep)
        # What averages over all ranks may not leave out experts that only half of them share.
        if sharded and size > 2:
            with pytest.raises(
                ValueError, match=f"must be spread over the {size} ranks .* got {size // 2}"
            ):
                ignore_experts(model)
        for block in model.blocks if sharded else ():
            fsdp.fully_shard(block.moe.experts, mesh=mesh["replicate"])
        # Steps over the ranks and in one process.
        model = under_ddp(model) if how == "ddp" else fully_shard(model)
        train(model, adamw(model.parameters()), lambda: clip_grad_norm_(model, MAX_NORM))
        alone = Model(kind)
        assert_same(whole(model), train_alone(alone, adamw(alone.parameters()), MAX_NORM))
        ep.check()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_replicas_among_other_ranks_are_refused(size, how):
    """As many ranks average gradients as the experts are spread over, but other ones."""
    if size != 4:
        pytest.skip("needs 4 ranks")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    config = make_config(2, experts=E, top_k=K, hidden=D)
    with ExpertParallel(config, mesh["ep"], device="cpu") as ep:
        model = Model("grouped", ep)
        with pytest.raises(ValueError, match="must be spread over the 2 ranks .* got 2, and rank"):
            if how == "ddp":
                ignore_experts(model, mesh["pp"].get_group())
            else:
                fully_shard(model, mesh=mesh["pp"])


@pytest.mark.parametrize("placement", [{"num_redundant_experts": 2}, {"strategy": "round_robin"}])
def test_placements_that_no_dtensor_has_only_serve(size, placement):
    with ExpertParallel(
        make_config(size, experts=E, top_k=K, hidden=D, placement=placement), device="cpu"
    ) as ep:
        [block, _] = Model("grouped", ep).blocks
        with torch.no_grad():
            block(tokens(0, ep.rank))
        why = "num_redundant_experts" if "num_redundant_experts" in placement else "torch.chunk"
        with pytest.raises(
            RuntimeError, match=f"must have DTensors only in calls with gradients, got .*{why}"
        ):
            block(tokens(0, ep.rank))
        for prepare in (ignore_experts, fully_shard):
            with pytest.raises(ValueError, match=why):
                prepare(block)


def test_memory_without_values_is_drawn_as_the_page_says(ep):
    """torch's `nn.init` gives all ranks the same experts on CPUs."""
    page = PAGE.read_text(encoding="utf-8")
    [draw] = re.findall(r"`(weight\.to_local\(\)\.normal_\(.+?\))`\. Replicas", page)
    model = Model("grouped", ep).to("meta").to_empty(device="cpu")
    for block in model.blocks:
        weight = block.moe.experts.w_down
        with torch.no_grad():
            eval(draw, {"weight": weight, "torch": torch, "seed": 3, "ep": ep})
        assert is_spread(weight) and len(weight.full_tensor().flatten(1).unique(dim=0)) == E


class OwnLayer(nn.Module):
    """A router and experts of a user, around a `TrainingExchange`."""

    def __init__(self, ep: ExpertParallel) -> None:
        super().__init__()
        self.exchange = TrainingExchange(ep)
        router, up, down = weights_of(0, "own")
        held = ep.logical_experts()
        self.router = nn.Parameter(router)
        self.experts = OwnExperts(up[held], down[held])

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = nn.functional.linear(x, self.router).softmax(1).topk(K, 1)
        routed = self.exchange.dispatch(x, ids, weights)
        rows = self.experts(routed.rows, routed.expert_offsets)
        return self.exchange.combine(rows, routed)


def test_an_exchange_among_own_experts_that_are_not_spread(ep):
    """DDP gives rank 0's experts to all ranks, and averages their gradients."""
    x = tokens(0, ep.rank)
    for prepare in (ignore_experts, fully_shard):
        with pytest.raises(ValueError, match=r"`experts\.up` has a row for each .* be spread"):
            prepare(OwnLayer(ep))
    with pytest.raises(RuntimeError, match=r"`experts\.up` .* DDP has given all ranks those"):
        DistributedDataParallel(OwnLayer(ep))(x)
    layer = OwnLayer(ep)
    fsdp.fully_shard(layer.experts)
    with pytest.raises(RuntimeError, match=r"`experts\.up` has .* torch's `fully_shard` makes one"):
        fsdp.fully_shard(layer)(x)
    # Nobody cuts what torch is told to leave alone.
    layer = OwnLayer(ep)
    fsdp.fully_shard(layer, ignored_params=set(layer.experts.parameters()))(x).sum().backward()
    layer = OwnLayer(ep)
    spread(layer.experts, ep)
    DistributedDataParallel(ignore_experts(layer))(x).sum().backward()
    assert layer.experts.up.grad.to_local().isfinite().all()
    ep.check()


def test_own_experts_that_are_not_spread_are_refused(ep):
    with pytest.raises(ValueError, match=r"`experts` must be spread, since `up` requires grad"):
        Model("own", ep, spreads=False)
