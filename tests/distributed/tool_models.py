"""A small model over ranks, the same in one process, and steps of training: what tools around it
must not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import randn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from epmoe import ExpertParallel, GroupedExperts, MoELayer
from epmoe.training import spread

D = 16
WIDTH = 8
E = 12
K = 2
T = 6
BLOCKS = 2
Kind = Literal["grouped", "own"]


class OwnExperts(nn.Module):
    """ReLU², without a gate, as in Nemotron-H."""

    def __init__(self, up_eFD: Tensor, down_eDF: Tensor) -> None:
        super().__init__()
        self.up = nn.Parameter(up_eFD)
        self.down = nn.Parameter(down_eDF)

    def forward(self, rows_ND: Tensor, offsets: Tensor, scales: None = None) -> Tensor:
        ends = offsets.tolist()
        parts = []
        for i, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
            hidden_nF = F.relu(rows_ND[first:last] @ self.up[i].T).square()
            parts.append(hidden_nF @ self.down[i].T)
        return torch.cat([*parts, rows_ND[ends[-1] :] * 0])


EXPERTS: dict[Kind, type[nn.Module]] = {"grouped": GroupedExperts, "own": OwnExperts}


def with_checkpoint_within(experts: type[nn.Module], reentrant: bool) -> type[nn.Module]:
    """Experts that compute all they do again in the backward pass."""

    class Experts(experts):  # type: ignore[misc, valid-type]
        def forward(self, rows: Tensor, *others: Any, **options: Any) -> Tensor:
            # A reentrant checkpoint has gradients for tensors that it gets by position alone.
            compute = functools.partial(self.compute, len(others), list(options))
            arguments = (rows, *others, *options.values())
            y: Tensor = checkpoint(compute, *arguments, use_reentrant=reentrant)
            return y

        def compute(self, others: int, names: list[str], rows: Tensor, *rest: Any) -> Tensor:
            options = dict(zip(names, rest[others:], strict=True))
            y: Tensor = super().forward(rows, *rest[:others], **options)
            return y

    return Experts


def that_call_themselves(experts: type[nn.Module]) -> type[nn.Module]:
    """Experts whose `forward` calls the module, which then computes."""

    class Experts(experts):  # type: ignore[misc, valid-type]
        is_called = False

        def forward(self, *arguments: Any, **options: Any) -> Tensor:
            if self.is_called:
                return super().forward(*arguments, **options)
            self.is_called = True
            try:
                y: Tensor = self(*arguments, **options)
            finally:
                self.is_called = False
            return y

    return Experts


def weights_of(block: int, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    width = WIDTH * (2 if kind == "grouped" else 1)
    shapes = (E, D), (E, width, D), (E, D, WIDTH)
    scale = 3 if kind == "grouped" else 6
    return tuple(randn(*shape, seed=10 * block + i) / scale for i, shape in enumerate(shapes))


class DenseExperts(nn.Module):
    """Outputs [T, E, D] of all experts, in plain torch."""

    def __init__(self, kind: Kind, up_EFD: Tensor, down_EDF: Tensor) -> None:
        super().__init__()
        self.names = ("w_gate_up", "w_down") if kind == "grouped" else ("up", "down")
        for name, value in zip(self.names, (up_EFD, down_EDF), strict=True):
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x_TD: Tensor) -> Tensor:
        up_EFD, down_EDF = (getattr(self, name) for name in self.names)
        hidden_TEF = torch.einsum("td,efd->tef", x_TD, up_EFD)
        if self.names[0] == "w_gate_up":
            gate_TEF, hidden_TEF = hidden_TEF.chunk(2, 2)
            hidden_TEF = F.silu(gate_TEF) * hidden_TEF
        else:
            hidden_TEF = F.relu(hidden_TEF).square()
        return torch.einsum("tef,edf->ted", hidden_TEF, down_EDF)


class DenseMoE(nn.Module):
    """The layer in one process."""

    def __init__(self, kind: Kind, router_ED: Tensor, up_EFD: Tensor, down_EDF: Tensor) -> None:
        super().__init__()
        self.router_weight = nn.Parameter(router_ED)
        self.experts = DenseExperts(kind, up_EFD, down_EDF)

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = F.linear(x_TD, self.router_weight).softmax(1).topk(K, 1)
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        outputs_TED = self.experts(x_TD)
        chosen_TKD = outputs_TED.gather(1, ids_TK[:, :, None].expand(-1, -1, D))
        return (chosen_TKD * weights_TK[:, :, None]).sum(1)


class Block(nn.Module):
    def __init__(self, moe: nn.Module, number: int) -> None:
        super().__init__()
        self.dense = nn.Linear(D, D, bias=False)
        self.moe = moe
        with torch.no_grad():
            self.dense.weight.copy_(randn(D, D, seed=100 + number) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(F.layer_norm(x + self.dense(x), (D,)))


def block_of(
    kind: Kind,
    number: int,
    ep: ExpertParallel | None = None,
    spreads: bool = True,
    experts_class: type[nn.Module] | None = None,
) -> Block:
    """Over the ranks of `ep`, or without one in this process alone. The experts are those of the
    kind, or of a class made of it.
    """
    router, up, down = weights_of(number, kind)
    if ep is None:
        return Block(DenseMoE(kind, router, up, down), number)
    held = ep.placement.logical_experts(ep.rank)
    experts = (experts_class or EXPERTS[kind])(up[held], down[held])
    if spreads and kind == "own":
        spread(experts, ep)
    return Block(
        MoELayer(ep, router, experts, num_rows=256 if kind == "grouped" else "exact"), number
    )


class Model(nn.Module):
    """Blocks, as `block_of` makes them."""

    def __init__(
        self,
        kind: Kind,
        ep: ExpertParallel | None = None,
        spreads: bool = True,
        experts: type[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            block_of(kind, number, ep, spreads, experts) for number in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tokens(step: int, rank: int) -> Tensor:
    return randn(T, D, seed=1000 + 50 * step + rank)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """A mean over this rank's tokens."""
    x = tokens(step, dist.get_rank())
    loss: Tensor = (model(x) - x).square().mean()
    return loss


def train(
    model: nn.Module,
    optimizer: Any,
    clip: Callable[[], object] | None = None,
    steps: Iterable[int] = range(2),
) -> None:
    """Steps over this rank's tokens."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if clip is not None:
            clip()
        optimizer.step()


def train_alone(
    model: Model, optimizer: Any, max_norm: float | None = None, steps: Iterable[int] = range(2)
) -> dict[str, Tensor]:
    """The parameters after the same steps over the tokens of all ranks, in this process."""
    for step in steps:
        x = torch.cat([tokens(step, rank) for rank in range(dist.get_world_size())])
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return whole(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole, under the names that they have without wrappers."""
    wrappers = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")
    named = {}
    for name, value in model.named_parameters():
        for wrapper in wrappers:
            name = name.replace(wrapper, "")
        named[name] = (
            (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        )
    return named


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        error = (got[name] - value).abs().max().item() / max(1.0, value.abs().max().item())
        assert error <= tolerance, f"{name} is off by {error}"
