"""The configuration of one expert-parallel group: strict, frozen, and its own documentation (`epmoe schema`).

Letters as everywhere: T tokens, M tokens a rank may bring, D hidden size, E logical and P physical experts,
e experts of one rank, K experts per token, R ranks, N expert-major rows.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from epmoe.config_file import ConfigError, environment_overrides, read_config

__all__ = ["ConfigError", "EPConfig"]

_INT32_MAX = 2**31 - 1


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(_Strict):
    """The model's MoE layers."""

    num_experts: int = Field(ge=1, le=4096)
    """E: logical experts in a layer."""
    num_experts_per_tok: int = Field(ge=1, le=4096)
    """K: experts that a token is sent to, at most E."""
    hidden_size: int = Field(ge=1, le=65536)
    """D: elements in a token's row; D times the size of `dtype` must be a multiple of 16 bytes."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Element type of a token's row."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class RoutingConfig(_Strict):
    """How scores become experts and weights (`ep.route`); unused where a model brings its own router."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Turns a row of logits [E] into scores."""
    renormalize: bool = False
    """Divide a token's K weights by their sum."""
    num_expert_groups: int = Field(default=1, ge=1, le=4096)
    """Groups that the E experts are split into, in order and evenly; 1 means no groups."""
    top_groups: int = Field(default=1, ge=1, le=4096)
    """Best groups of a token, among whose experts its K are chosen."""
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    """Multiplies the weights, after renormalisation."""


class TopologyConfig(_Strict):
    """The ranks that share the experts."""

    ep_size: int = Field(ge=1, le=64)
    """R: ranks in the expert-parallel group, which must have this very size."""
    ranks_per_node: int | None = Field(default=None, ge=1)
    """Ranks on one machine; unset means all R. More than one machine is not built yet."""


class PlacementConfig(_Strict):
    """Which rank owns which expert."""

    strategy: Literal["linear", "round_robin", "explicit"] = "linear"
    """linear: consecutive blocks of experts; round_robin: expert p on rank p mod R; explicit: as in `assignment`."""
    assignment: list[int] | None = None
    """With `strategy: explicit`, the owning rank of each of the P physical experts."""
    num_redundant_experts: int = Field(default=0, ge=0, le=4096)
    """Copies beside the E experts: physical expert E+i is a copy of logical expert i mod E; P = E + copies."""


class CapacityConfig(_Strict):
    """Sizes of the buffers, all fixed at the start (`epmoe plan` prints the bytes)."""

    max_num_tokens_per_rank: int = Field(default=1024, ge=1, le=2**20)
    """M: most tokens a rank may bring to one round."""
    max_expert_rows: int | None = Field(default=None, ge=1, le=_INT32_MAX)
    """Most expert-major rows N a rank can hold; unset means the worst case, R·M·K + e·(alignment−1)."""
    alignment: int = Field(default=1, ge=1, le=4096)
    """Rows: each expert's segment starts at a multiple of it (block-scaled GEMMs want 128)."""
    on_overflow: Literal["raise", "drop"] = "raise"
    """More than `max_expert_rows`: raise EPOverflowError at the next look, or only count what was dropped."""


class ExchangeConfig(_Strict):
    """How rows travel."""

    transport: Literal["auto", "shared_memory", "nvlink"] = "auto"
    """auto: shared_memory on CPU, nvlink on CUDA."""
    payload: Literal["auto", "fp8"] = "auto"
    """Rows on the way to the experts; auto: as `model.dtype`; fp8: with one fp32 scale per 128 elements."""
    combine_payload: Literal["auto", "fp8"] = "auto"
    """Rows on the way back, likewise."""
    timeout_s: float = Field(default=30.0, gt=0, le=86400)
    """Seconds that a rank waits for the others before EPTimeoutError."""
    warmup_timeout_s: float = Field(default=300.0, gt=0, le=86400)
    """Seconds for the first call, in which ranks may still load or compile."""
    num_sms: int | None = Field(default=None, ge=1)
    """Multiprocessors that a communication kernel may use (CUDA); unset means the library's choice."""


class EPConfig(_Strict):
    """Configuration of an `ExpertParallel`: `EPConfig.load(path)`, or sections as keywords, each a mapping."""

    model: ModelConfig
    topology: TopologyConfig
    routing: RoutingConfig = RoutingConfig()
    placement: PlacementConfig = PlacementConfig()
    capacity: CapacityConfig = CapacityConfig()
    exchange: ExchangeConfig = ExchangeConfig()

    def __init__(self, /, **sections: Any) -> None:
        """Raises ConfigError, which lists every wrong key and what it must be."""
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """From a YAML, TOML or JSON file, then `EPMOE_<SECTION>__<KEY>` variables of the environment over it."""
        data = read_config(path)
        overrides = environment_overrides(os.environ, _KEYS)
        for section, key, value in overrides.values():
            if isinstance(keys := data.setdefault(section, {}), dict):
                keys[key] = value
        try:
            return cls(**data)
        except ConfigError as error:
            note = f" (the environment sets {', '.join(overrides)})" if overrides else ""
            raise ConfigError(f"{path}: {error}{note}") from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        model, routing, capacity, exchange = self.model, self.routing, self.capacity, self.exchange
        experts, top_k, groups = model.num_experts, model.num_experts_per_tok, routing.num_expert_groups
        _require(
            top_k <= experts, "model.num_experts_per_tok", f"at most `model.num_experts` = {experts}", top_k
        )
        size = model.torch_dtype.itemsize
        step = 16 // size
        _require(
            model.hidden_size % step == 0,
            "model.hidden_size",
            f"a multiple of {step}, so that a {model.dtype} row is a multiple of 16 bytes",
            model.hidden_size,
        )
        _require(
            experts % groups == 0,
            "routing.num_expert_groups",
            f"a divisor of `model.num_experts` = {experts}",
            groups,
        )
        least = -(-top_k // (experts // groups))
        _require(
            least <= routing.top_groups <= groups,
            "routing.top_groups",
            f"from {least} to {groups}, so that the chosen groups hold {top_k} experts",
            routing.top_groups,
        )
        self._check_topology()
        for key in ("payload", "combine_payload"):
            _require(
                getattr(exchange, key) == "auto" or model.hidden_size % 128 == 0,
                f"exchange.{key}",
                f"auto, as fp8 wants a `model.hidden_size` divisible by 128, not {model.hidden_size}",
                "fp8",
            )
        _require(
            exchange.warmup_timeout_s >= exchange.timeout_s,
            "exchange.warmup_timeout_s",
            f"at least `exchange.timeout_s` = {exchange.timeout_s}",
            exchange.warmup_timeout_s,
        )
        physical = experts + self.placement.num_redundant_experts
        most = (_INT32_MAX - physical * capacity.alignment) // (self.topology.ep_size * top_k)
        _require(
            capacity.max_num_tokens_per_rank <= most,
            "capacity.max_num_tokens_per_rank",
            f"at most {most}, so that R·M·K rows can be numbered in int32",
            capacity.max_num_tokens_per_rank,
        )
        return self

    def _check_topology(self) -> None:
        size, node, placement = self.topology.ep_size, self.topology.ranks_per_node, self.placement
        _require(
            node is None or size <= node,
            "topology.ep_size",
            f"at most `topology.ranks_per_node` = {node}: more than one machine is not built yet",
            size,
        )
        owners, physical = placement.assignment, self.model.num_experts + placement.num_redundant_experts
        if owners is None:
            _require(
                placement.strategy != "explicit",
                "placement.assignment",
                f"{physical} owning ranks with `placement.strategy: explicit`",
                None,
            )
            return
        _require(
            placement.strategy == "explicit",
            "placement.strategy",
            "explicit where `placement.assignment` is given",
            placement.strategy,
        )
        _require(
            len(owners) == physical,
            "placement.assignment",
            f"{physical} ranks, one for each expert and copy",
            f"{len(owners)}",
        )
        for index, rank in enumerate(owners):
            _require(0 <= rank < size, f"placement.assignment[{index}]", f"a rank from 0 to {size - 1}", rank)


_KEYS = {
    section: tuple(field.annotation.model_fields)  # type: ignore[union-attr]
    for section, field in EPConfig.model_fields.items()
}


def _require(condition: bool, key: str, what: str, got: object) -> None:
    if not condition:
        raise ValueError(f"`{key}` must be {what}, got {got}")


def _explain(item: Any) -> str:
    """One pydantic error in our words: the dotted key, what it must be, what it got."""
    *parents, last = item["loc"] or (None,)
    key = "`" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in item["loc"]).lstrip(".") + "`"
    match item["type"]:
        case "value_error":
            return str(item["ctx"]["error"])
        case "missing":
            return f"{key} must be set"
        case "extra_forbidden":
            known = _KEYS.get(parents[0], ()) if parents else tuple(_KEYS)
            close = difflib.get_close_matches(str(last), known, n=1)
            return f"{key} is not a known key; " + (
                f"did you mean `{close[0]}`?" if close else f"use {', '.join(known)}"
            )
        case "model_type":
            return f"{key} must be a mapping of keys, got {item['input']!r}"
    return f"{key} {item['msg'].replace('Input should be', 'must be')}, got {item['input']!r}"
