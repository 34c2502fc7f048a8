"""Checkpoints of models whose experts are spread over ranks: what one group saves, a group of any
other size loads.

In all of them a tensor of experts is [E, …]. A rank has its own rows of it: of a DTensor where the
experts can train, else of `Rows`. torch's functions for state dicts find both, in models that are
compiled or wrapped, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epmoe.checkpoint import folders
from epmoe.checkpoint.whole import whole_tensor
from epmoe.group.collective import all_ranks, naming, peers_of, together
from epmoe.group.errors import EPStateError
from epmoe.group.peers import Peers, run_uninterrupted
from epmoe.local.experts import GroupedExperts
from epmoe.local.spread import is_spread
from epmoe.local.weight_formats import take_rows
from epmoe.service import ExpertParallel
from epmoe.training.models import eps_of, expert_parallels

_MOST_NAMED = 16  # experts in a message
_PART_OF_THE_WORLD = "where only a part of all ranks calls, these give their `group`"
_OPTIMIZER = "optimizer."  # in front of the keys of an optimizer's state


class _Named:
    """Names the experts of a state dict: a hook, after `state_dict`, of modules that have an
    `ExpertParallel`.
    """

    def __init__(self) -> None:
        self.rows: dict[int, tuple[ExpertParallel, int]] = {}
        """By the id of `Rows`, with the tag of the layer."""
        self.lists: dict[int, Tensor] = {}
        """By the id of a list of all experts, the rank's own."""
        self.experts: set[nn.Module] = set()
        """Whose ExpertParallel is known: that of the nearest module around them."""

    def __call__(self, owner: Any, state: dict[str, Any], prefix: str, _: object) -> None:
        ep = eps_of(owner)[0]
        tag = getattr(owner, "tag", 0)
        held = ep.logical_experts(tag)
        E = ep.placement.num_experts
        if hasattr(owner, "router_weight"):
            key = f"{prefix}_extra_state"
            experts = torch.arange(E, dtype=torch.int32)
            self.lists[id(experts)] = state[key]
            state[key] = experts
        for path, module in owner.named_modules():
            if module in self.experts or not (
                isinstance(module, GroupedExperts) or path == "experts"
            ):
                continue
            self.experts.update(module.modules())
            for name, _ in module.named_parameters():
                key = f"{prefix}{path}.{name}"
                value = state[key]
                if is_spread(value) or ep.size == 1 and held == list(range(E)):
                    continue
                if value.shape[:1] != (len(held),):
                    raise ValueError(
                        f"`{key}` must have a row for each of the {len(held)} experts of this "
                        f"rank, got {list(value.shape)}: after `resume`, give the layer its new "
                        f"experts first"
                    )
                # Imported here: it takes most of a second.
                from epmoe.checkpoint.rows import Rows

                rows = Rows(value, held, E)
                state[key] = rows
                self.rows[id(rows)] = (ep, tag)


def full_state_dict(module: nn.Module, *, cpu_offload: bool = False) -> dict[str, Any]:
    """The state dict with all E logical experts, which is that of a group of one rank.

    Collective over the group of each layer. The arguments are those of torch's
    `StateDictOptions(full_state_dict=True, cpu_offload=…)`.

    Args:
        module: a layer or a model.
        cpu_offload: only rank 0 of the group gets tensors, on the CPU, and the other ranks get {},
            those of its replicas, too. Otherwise every rank gets them, on the device of its layer.

    Returns:
        Tensors of experts are [E, …]. What this rank has whole shares the memory of the module, as
        in torch's `state_dict()`: with one rank that is everything.

    Raises:
        ValueError: a parameter of a layer's experts has not a row for each of them; or nothing says
            of which rank some `GroupedExperts` are.
        EPStateError: the `ExpertParallel` of a layer is closed. Or experts move on a rank, which
            the others name: call `ExpertParallel.apply` on all ranks before.
        EPTimeoutError: ranks ended or did not come within `exchange.warmup_timeout_s`. It names
            them.
    """
    eps = expert_parallels(module)
    with naming("full_state_dict", eps), together(eps) as steps:
        if any(ep.size > 1 and ep.group is None for ep in eps):
            raise EPStateError("this ExpertParallel is closed: its ranks have no group any more")
        state, named = _state_of(module)
        is_first = all(_is_first(ep) for ep in eps)
        peers = steps[0] if steps else Peers.of(None)
        on_cpu = cpu_offload and is_first
        run_uninterrupted(steps, partial(_gather_all, state, named, peers, cpu_offload, on_cpu))
    return state if is_first or not cpu_offload else {}


def _gather_all(
    state: dict[str, Any], named: _Named, peers: Peers, cpu_offload: bool, on_cpu: bool
) -> None:
    """Put whole tensors in place of those of which ranks have parts. Collective; with
    `cpu_offload` other ranks than the first get nothing of use.
    """
    for key, value in state.items():
        of_all = value
        if id(value) in named.rows:
            of_all = gather(value.local, *named.rows[id(value)], cpu_offload=cpu_offload)
        elif hasattr(value, "full_tensor"):
            with peers.waiting():
                of_all = whole_tensor(value)
        if on_cpu and isinstance(of_all, Tensor):
            of_all = of_all.cpu()
        state[key] = of_all


def _is_first(ep: ExpertParallel) -> bool:
    """Whether this rank is the first one of its group and of all replicas of it."""
    coordinate = None if ep.mesh is None else ep.mesh.get_coordinate()
    return ep.rank == 0 and not any(coordinate or ())


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's part of a state dict that `full_state_dict` returned, in a group of any
    size.

    No rank waits for another.

    Args:
        module: a layer or a model.
        state_dict: that of `full_state_dict`, or another one with the same keys and shapes; one
            made by hand needs no `_extra_state`. Every rank needs the whole dict:
            `torch.load(file, mmap=True)` reads only what the rank takes.

    Raises:
        ValueError: `state_dict` does not hold all experts; and as `full_state_dict`.
        RuntimeError: torch's, for missing or unexpected keys and for shapes.
    """
    expected, named = _state_of(module)
    local = dict(state_dict)
    # A dict made by hand lists no experts: its tensors [E, …] are of all of them.
    for key, value in expected.items():
        if id(value) in named.lists:
            local.setdefault(key, value)
    for key in expected.keys() & local.keys():
        value = expected[key]
        stored = local[key]
        if id(value) in named.lists:
            if stored.tolist() != value.tolist():
                raise ValueError(
                    f"`{key}` must list all {len(value)} experts, got {_listed(stored.tolist())}"
                )
            local[key] = named.lists[id(value)]
        elif (id(value) in named.rows or is_spread(value)) and len(stored) != len(value):
            raise ValueError(f"`{key}` must hold all {len(value)} experts, got {len(stored)}")
        if id(value) in named.rows:
            local[key] = take_rows(stored, value.held)
        elif hasattr(value, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            stored = stored.to(value.device)
            local[key] = distribute_tensor(
                stored, value.device_mesh, value.placements, src_data_rank=None
            )
    _set_state(module, local)


def sharded_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """The state dict with tensors [E, …] of all logical experts, of which this rank has its own
    rows.

    It is what torch.distributed.checkpoint takes (`save`, `async_save`, `load`), also within a
    larger dict. Of an expert that several ranks hold, torch writes one copy. Tensors share the
    memory of the module: what is read into them is loaded.

    State of the `optimizer`, which optimises parameters of the module, has keys such as
    `optimizer.state.experts.w_down.exp_avg`. `load` gives it to the optimizer. Raises the
    ValueErrors of `full_state_dict`, and ValueError where the optimizer has state of experts that
    is no DTensor.
    """
    return _state_of(module, optimizer)[0]


def save(
    module: nn.Module,
    folder: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a layer or a model by torch.distributed.checkpoint. Every rank calls it and writes its
    share.

    Where the folder has a checkpoint, it has this one or the new one at any moment, whichever rank
    dies: files are written beside those that are there, and one rename of a file is the last step.

    Args:
        module: a layer or a model.
        folder: which all ranks see; a path.
        optimizer: optimises parameters of the module. Its state is saved, too.
        group: the ranks that call, with a CPU backend; by default all ranks.

    Raises:
        ValueError: see `sharded_state_dict`; or `folder` is no path.
        RuntimeError: a rank cannot write; on all ranks. The folder stays as it was.
        EPError: EPStateError or EPTimeoutError of `full_state_dict`. Ranks may be as far apart when
            they have written.
    """
    eps = expert_parallels(module)
    remedy = _PART_OF_THE_WORLD if group is None else ""
    with naming("save", eps, remedy=remedy), all_ranks(eps, group) as peers:
        folders.save(partial(sharded_state_dict, module, optimizer), folder, peers)


def load(
    module: nn.Module,
    folder: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load what ranks of any number have saved with `save`. Every rank calls it and reads its own
    experts only.

    Arguments are those of `save`. A module on the meta device gets memory by `to_empty` first. With
    an optimizer its state is loaded, too. Errors are those of `sharded_state_dict`, and the
    EPErrors of `save`: ranks may be as far apart when they have read. ValueError, on all ranks,
    means also that `folder` has no checkpoint, or one without the optimizer, or with other keys or
    shapes.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_optimizer_state_dict,
    )

    eps = expert_parallels(module)
    remedy = _PART_OF_THE_WORLD if group is None else ""
    with naming("load", eps, remedy=remedy), all_ranks(eps, group) as peers, peers.together():
        # All ranks can, or nothing is touched.
        state, named = _state_of(module, optimizer)
        peers.all_gather(None)
        # Of tensors of the module, what is read is loaded.
        folders.load(state, folder, peers)
        # The rest, and the state of the optimizer.
        of_optimizer = {
            key.removeprefix(_OPTIMIZER): state.pop(key)
            for key in list(state)
            if key.startswith(_OPTIMIZER)
        }
        _set_state(
            module,
            {
                key: named.lists.get(id(value), getattr(value, "local", value))
                for key, value in state.items()
            },
        )
        if optimizer is not None:
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            set_optimizer_state_dict(module, optimizer, of_optimizer, options=options)


def check_held(state: Tensor, ep: ExpertParallel, want: Sequence[int]) -> None:
    """Raises ValueError unless `state` lists the experts that a rank holds in a layer, whose
    weights come with it.
    """
    got = state.tolist()
    if got != want:
        raise ValueError(
            f"the state dict has the weights of the logical experts {_listed(got)}, but rank "
            f"{ep.rank} of {ep.size} holds {_listed(want)}: other ranks load what "
            f"`full_state_dict` or `epmoe.checkpoint.save` has saved"
        )


def _state_of(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[dict[str, Any], _Named]:
    """The state dict of a module, of all experts, and under other keys that of its optimizer."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    named = _Named()
    hooks = [each.register_state_dict_post_hook(named) for each in module.modules() if eps_of(each)]
    try:
        state = dict(get_model_state_dict(module))
    finally:
        for hook in hooks:
            hook.remove()
    for name, experts in module.named_modules():
        plain = isinstance(experts, GroupedExperts) and not is_spread(experts.w_down)
        if (
            plain
            and experts not in named.experts
            and dist.is_initialized()
            and dist.get_world_size() > 1
        ):
            raise ValueError(
                f"`{name}` must belong to an ExpertParallel: GroupedExperts are the experts of one "
                "rank, and nothing says of which. Call `epmoe.training.spread`, or let a module "
                "around them have the ExpertParallel"
            )
    if optimizer is not None:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        experts = {
            key for key, value in state.items() if is_spread(value) or id(value) in named.rows
        }
        of_optimizer: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=flat)
        for key, value in of_optimizer.items():
            name, _, _field = key.removeprefix("state.").rpartition(".")
            state[_OPTIMIZER + key] = _checked(key, value) if name in experts else value
    return state, named


def _set_state(module: nn.Module, state: dict[str, Any]) -> None:
    """torch's `set_model_state_dict`, also of modules that a model has under several names.

    A state dict has no names of wrappers such as `torch.compile` and DDP. torch puts them back into
    the first name of a module alone, and misses the others.
    """
    from torch.distributed.checkpoint.state_dict import _get_fqns, set_model_state_dict

    first_paths = {path for path, _ in module.named_modules()}
    for path, owner in module.named_modules(remove_duplicate=False):
        if path in first_paths:
            continue
        [plain] = _get_fqns(module, path)
        [wrapped] = _get_fqns(module, path, skip_ddp_prefix=False, skip_compiler_prefix=False)
        if plain == wrapped:
            continue
        for name in (*owner._parameters, *owner._buffers, "_extra_state"):
            key = f"{plain}.{name}"
            if key in state:
                state[f"{wrapped}.{name}"] = state.pop(key)
    set_model_state_dict(module, state)


def _checked(key: str, value: Any) -> Any:
    """State of an optimizer for experts, which is that of all of them, or a number. Raises
    ValueError otherwise.
    """
    if hasattr(value, "device_mesh"):
        if any(placement.is_partial() for placement in value.placements):
            from torch.distributed.tensor import Replicate

            return value.redistribute(
                placements=[Replicate() if p.is_partial() else p for p in value.placements]
            )
    elif isinstance(value, Tensor) and value.numel() > 1:
        raise ValueError(
            f"`{key}` of the optimizer must be a DTensor, as its parameter, got "
            f"{list(value.shape)}: a checkpoint would keep that of one rank"
        )
    return value


def gather(local: Tensor, ep: ExpertParallel, tag: int, *, cpu_offload: bool) -> Tensor:
    """All experts [E, …] from those of each rank [e, …]. With `cpu_offload`, ranks other than 0 get
    nothing of use.
    """
    peers = peers_of(ep)
    E = ep.placement.num_experts
    # One row is enough to send from.
    kept = E if ep.rank == 0 or not cpu_offload else 1
    full = torch.empty(kept, *local.shape[1:], dtype=local.dtype)
    for x in range(E):
        owner, index = ep.holder(x, tag)
        row = full[x % kept]
        if owner == ep.rank:
            row.copy_(local[index])
        (peers.to_first if cpu_offload else peers.broadcast)(row, owner)
    return full if cpu_offload else full.to(local.device)


def _listed(experts: Sequence[int]) -> str:
    more = len(experts) - _MOST_NAMED
    return f"{list(experts[:_MOST_NAMED])}" + (f" and {more} more" if more > 0 else "")
