"""Adapters of experts for the tests: their factors, folders as PEFT writes them, and the layer of
merged weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from helpers import randn
from torch import Tensor, nn

from epmoe.local.adapters import LoRA
from epmoe.local.reference import moe_reference

Factors = dict[str, Tensor]
"""`lora_A` [E·r, k] and `lora_B` [n, r·E] of `gate_up` and `down`, as PEFT has them"""


def draw(experts: int, hidden: int, width: int, rank: int, seed: int) -> Factors:
    """The factors of one adapter, in fp32."""
    sizes = {"gate_up": (2 * width, hidden), "down": (hidden, width)}
    factors = {}
    for i, (name, (n, k)) in enumerate(sizes.items()):
        factors[f"{name}.lora_A"] = randn(experts * rank, k, seed=100 * seed + i) / 4
        factors[f"{name}.lora_B"] = randn(n, rank * experts, seed=100 * seed + 10 + i) / 4
    return factors


def delta(factors: Factors, name: str, experts: int, scaling: float) -> Tensor:
    """[E, n, k]: what PEFT's `ParamWrapper.get_delta_weight` computes."""
    a = factors[f"{name}.lora_A"].double().unflatten(0, (experts, -1))
    b = factors[f"{name}.lora_B"].double().unflatten(1, (-1, experts))
    return torch.einsum("ore,eri->eoi", b, a) * scaling


def adapter_of(factors: Factors, experts: int, held: list[int], scaling: float) -> LoRA:
    """The factors of a rank's experts."""
    parts = []
    for name in ("gate_up", "down"):
        a = factors[f"{name}.lora_A"].unflatten(0, (experts, -1))
        b = factors[f"{name}.lora_B"].unflatten(1, (-1, experts)).permute(2, 0, 1)
        parts.append((a[held], b[held] * scaling))
    return LoRA(*parts)


def save(
    path: Path,
    factors: Factors,
    block: str,
    dtype: torch.dtype = torch.float32,
    others: Factors | None = None,
    **config: object,
) -> None:
    """A folder as PEFT's `save_pretrained` writes it. The wrapper of `gate_up_proj` is inside that
    of `down_proj`.
    """
    from safetensors.torch import save_file

    inner = {
        "gate_up": "experts.base_layer" if "down.lora_A" in factors else "experts",
        "down": "experts",
    }
    names = {
        key: f"base_model.model.{block}.{inner[key.partition('.')[0]]}.{key.rpartition('.')[2]}"
        for key in factors
    }
    path.mkdir(exist_ok=True)
    tensors = {f"{names[key]}.weight": factors[key].to(dtype) for key in factors} | (others or {})
    save_file(tensors, path / "adapter_model.safetensors")
    usual = {"peft_type": "LORA", "peft_version": "0.21.2", "lora_alpha": 8, "r": 4}
    (path / "adapter_config.json").write_text(json.dumps(usual | config))


def save_single(
    path: Path, factors: Factors, block: str, names: tuple[str, str, str], experts: int
) -> None:
    """The same adapter by modules of single experts: gate and up have the same a."""
    from safetensors.torch import save_file

    lora = adapter_of(factors, experts, list(range(experts)), 1.0)
    tensors = {}
    # Three modules of each expert.
    for x in range(experts):
        (a_up, b_up), (a_down, b_down) = ((a[x], b[x]) for a, b in lora)
        pairs = [(a_up, half) for half in b_up.chunk(2)] + [(a_down, b_down)]
        for name, pair in zip(names, pairs, strict=True):
            for end, factor in zip("AB", pair, strict=True):
                tensors[f"base_model.model.{block}.experts.{x}.{name}.lora_{end}.weight"] = (
                    factor.contiguous().clone()
                )
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "lora_alpha": 8, "r": 4})
    )


def merged_reference(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    base: tuple[Tensor, Tensor],
    adapters: dict[int, tuple[Factors, float]],
    adapter_ids_T: Tensor,
) -> Tensor:
    """y [T, D] in fp64: each token through the experts into which its adapter is merged."""
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    # Tokens of each adapter, with its factors in the weights.
    for number in adapter_ids_T.unique().tolist():
        experts = [weight.double() for weight in base]
        if number in adapters:
            factors, scaling = adapters[number]
            pairs = zip(experts, ("gate_up", "down"), strict=True)
            experts = [
                weight + delta(factors, name, len(weight), scaling)
                if f"{name}.lora_A" in factors
                else weight
                for weight, name in pairs
            ]
        mine_T = adapter_ids_T == number
        y_TD[mine_T] = moe_reference(
            x_TD[mine_T].double(), ids_TK[mine_T], weights_TK[mine_T], tuple(experts)
        )
    return y_TD


class LowRank(nn.Module):
    """A parametrization as PEFT registers it: it adds b · a to the weights [E, n, k] of all
    experts. The factors belong to another module.
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.factors = b, a

    def forward(self, weight: Tensor) -> Tensor:
        return torch.baddbmm(weight, *self.factors)


def parametrize(module: nn.Module, *names: str, rank: int = 2) -> list[Tensor]:
    """Freeze a module, and add low-rank products to these weights. Returns a and b of each."""
    module.requires_grad_(False)
    factors: list[Tensor] = []
    for name in names:
        weight = getattr(module, name)
        E, n, k = weight.shape
        pair = [
            (randn(E, *s, seed=sum(s)).to(weight) / 4).requires_grad_()
            for s in ((rank, k), (n, rank))
        ]
        nn.utils.parametrize.register_parametrization(module, name, LowRank(*pair))
        factors += pair
    return factors
