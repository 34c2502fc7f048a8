"""The configuration of one expert-parallel group. It refuses unknown keys and wrong types, and does
not change once it is made. `epmoe schema` prints the docstrings of its keys.

Letters: T tokens of a rank in a round, M the most tokens of a rank, D elements of a token, K
experts of a token, E logical experts, P physical experts (with copies), e experts of a rank, R
ranks, N rows of a rank's experts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, ValidationError, model_validator

from epmoe.config.config_file import (
    ConfigError,
    environment_overrides,
    explain,
    find_config,
    read_config,
)
from epmoe.config.deadlines import INSIDE_NODE_S
from epmoe.config.from_hf import sections_of
from epmoe.config.placement import Placement
from epmoe.config.strict import Float32, Strict
from epmoe.native.formats import LINE_BYTES, WIRE_FORMATS, PayloadName

__all__ = ["ConfigError", "EPConfig"]

ROW_BLOCKS = (64, 128)
"""Two numbers of rows. In aligned rounds, the rows of each expert start at a multiple of one of the
two, as GEMMs over blocks of rows need it. The larger block is faster if experts have many rows.
"""

_INT32_MAX = 2**31 - 1
# The most elements of a row.
_MOST_ELEMENTS = 65536
# The most ranks of a node. A set of ranks must fit into a 64-bit mask.
_MOST_ON_NODE = 64
# The most slots of a group. The number of a slot has 16 bits.
_LIVE_SLOTS = 2**16
# The most errors that one message lists, so that it fits on a screen.
_MOST_ERRORS = 12


class _Rule(NamedTuple):
    """A rule for the value of one key that depends on the values of others. If it does not hold,
    the message is "`key` must be `must_be`, got `got`".
    """

    key: str
    """the section and the key, with a dot between them"""
    holds: bool
    must_be: str
    got: object


class ModelConfig(Strict):
    """The model's MoE layers."""

    num_experts: int = Field(ge=1, le=4096)
    """E: logical experts in a layer."""
    num_experts_per_tok: int = Field(ge=1, le=4096)
    """K: experts that a token is sent to, at most E."""
    hidden_size: int = Field(ge=1, le=_MOST_ELEMENTS)
    """D: elements in a token's row; D times the size of `dtype` must be a multiple of 16 bytes."""
    intermediate_size: int | None = Field(default=None, ge=1, le=65536)
    """F: width of an expert, that is, elements of its activation; only `epmoe bench --layer` needs
    it.
    """
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Element type of a token's row."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class RoutingConfig(Strict):
    """How scores become experts and weights (`ep.route`); unused where a model brings its own
    router.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Turns a row of logits [E] into scores."""
    renormalize: bool = False
    """Divide a token's K weights by their sum. Most models need True; a wrong value raises nothing,
    but outputs have a wrong scale. `EPConfig.from_hf` sets it, and docs/models.md lists which
    models need it.
    """
    renormalize_epsilon: Float32 = Field(default=0.0, ge=0, le=1)
    """Is added to the sum by which `renormalize` divides, as a model's own code does (1e-20 in
    DeepSeek's). A token whose K scores are far below it then has weights near 0. By default its
    weights have their full scale.
    """
    selection_bias: bool = False
    """The router has a bias [E] that steers the choice only, as that of DeepSeek-V3. Then
    `ep.route` and `MoELayer` raise ValueError without a `bias`.
    """
    logit_bias: bool = False
    """The router adds a bias [E] to the logits, as that of gpt-oss does. Then `MoELayer` raises
    ValueError without a `logit_bias`; for `ep.route`, the logits have it already.
    """
    num_expert_groups: int = Field(default=1, ge=1, le=4096)
    """Groups that the E experts are split into, in order and evenly; 1 means no groups."""
    top_groups: int = Field(default=1, ge=1, le=4096)
    """A token's K experts are chosen from its best groups; this is their number."""
    scores_per_group: int | None = Field(default=None, ge=1, le=4096)
    """A group is rated by the sum of this many of its best scores; by default two with a `bias`,
    and one without.
    """
    routed_scaling_factor: Float32 = Field(default=1.0, gt=0)
    """Multiplies the weights, after renormalisation."""
    jitter_noise: Float32 = Field(default=0.0, ge=0, lt=1)
    """A `MoELayer` in `train()` mode multiplies x by uniform noise from 1 − this to 1 + this, as
    Mixtral's code does; not under `torch.inference_mode()`.
    """

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `epmoe.route`, which does not know the other keys."""
        return self.model_dump(exclude={"jitter_noise", "selection_bias", "logit_bias"})


class ExpertsConfig(Strict):
    """What an expert computes: `down(gate · sigmoid(alpha · gate) · (up + up_offset))`, by default
    SwiGLU. Unused where a model brings experts of its own.
    """

    interleaved: bool = False
    """Gate and up rows alternate in `w_gate_up` and its bias; otherwise all gate rows
    come first.
    """
    limit: Float32 | None = Field(default=None, gt=0)
    """Before the activation, gate is at most this, and up lies within ± this; by default there is
    no limit.
    """
    alpha: Float32 = Field(default=1.0, gt=0)
    """In the activation gate · sigmoid(alpha · gate): 1 is SiLU, 1.702 is an
    approximation of GELU.
    """
    up_offset: Float32 = 0.0
    """Is added to up."""
    biases: bool = False
    """Experts have biases: [2F] of gate and up, and [D] of down."""
    weights_on_input: bool = False
    """Weights multiply the rows that experts get, not their outputs, as in Llama 4."""
    batch_invariant: bool = False
    """y of a token has the same bits whatever else is in the batch and whichever rank brings it, on
    the same number of ranks. docs/choosing.md, "Batch invariance", says what that costs and what it
    holds for.
    """

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `GroupedExperts`, which do not know the other keys."""
        return self.model_dump(exclude={"biases", "weights_on_input"})


class TopologyConfig(Strict):
    """The ranks that share the experts."""

    ep_size: int = Field(ge=1, le=1024)
    """R: ranks in the expert-parallel group; must equal the group's size. Ranks of one node follow
    one another.
    """
    ranks_per_node: int | None = Field(default=None, ge=1)
    """Ranks on one machine, a divisor of R; by default all R. Between machines rows travel over the
    network.
    """
    max_ranks: int | None = Field(default=None, ge=1, le=64)
    """With `placement.live`, seats: memory is planned for that many ranks, and CUDA graphs stay
    valid while ranks come and go, see docs/graphs.md. By default R. It keeps no rank out, as
    `max_ranks` of `recover` does: a group of more ranks gets as many seats.
    """

    @property
    def seats(self) -> int:
        """The number of places for ranks in the group. Some may be empty."""
        return self.max_ranks or self.ep_size

    @property
    def ranks_here(self) -> int:
        """The number of ranks on one node. It is R if there is only one node."""
        return min(self.ranks_per_node or self.ep_size, self.ep_size)

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.ep_size // self.ranks_here


class PlacementConfig(Strict):
    """Which rank owns which expert."""

    strategy: Literal["linear", "round_robin", "explicit"] = "linear"
    """linear: blocks of experts in order; round_robin: expert p on rank p mod R; explicit:
    `assignment`.
    """
    assignment: list[int] | None = None
    """With `strategy: explicit`, the owning rank of each of the P physical experts."""
    num_redundant_experts: int = Field(default=0, ge=0, le=4096)
    """Copies of experts: physical expert E+i copies logical expert i mod E; P = E + copies."""
    copied_experts: list[int] | None = None
    """With `strategy: explicit`, the logical expert of each of these copies, where it is not i mod
    E.
    """
    live: bool = False
    """Experts move while the group serves: see docs/moving.md. Each rank has `slots_per_rank`
    slots, which hold the experts of `slots` at first. Every layer has a table of its own, so that
    each round needs a `tag`.
    """
    slots_per_rank: int | None = Field(default=None, ge=1, le=4096)
    """S, with `live`: experts that a rank can hold, at most E; R·S is at least E."""
    most_copies: int = Field(default=4, ge=2, le=64)
    """With `live`, most copies of an expert."""
    layers: int = Field(default=1, ge=1, le=4096)
    """With `live`, layers whose experts move: tags from 1 to this number."""
    staging_mb: int = Field(default=64, ge=1, le=4096)
    """With `live`, MiB of each window through which weights move."""
    slots: str | None = None
    """With `live`, path of a JSON file with the expert that each slot holds at first, as
    `ExpertParallel.save_slots` writes it; by default expert p mod E in slot p. Ranks that resume
    leave it behind: they keep their slots.
    """


class CapacityConfig(Strict):
    """Sizes of the buffers, all fixed at the start (`epmoe plan` prints the bytes)."""

    max_num_tokens_per_rank: int = Field(default=1024, ge=1, le=2**20)
    """M: most tokens a rank may bring to one round."""
    max_expert_rows: int | None = Field(default=None, ge=1, le=_INT32_MAX)
    """Most expert-major rows N that a rank can hold, rounded up to the alignment; by default the
    worst case, R·M·K + e·(alignment−1).
    """
    alignment: int | None = Field(default=None, ge=1, le=4096)
    """Each expert's segment starts at a multiple of this number of rows. By default it starts at
    any row, except in the rounds of experts whose GEMM wants blocks of rows: there at multiples of
    64, or of 128 where an expert gets 128 or more.
    """
    gap_rows: Literal["undefined", "zero"] = "undefined"
    """What lies in the rows between segments; zero takes longer, and GEMMs that sum over rows need
    it.
    """
    max_rows_per_node: int | None = Field(default=None, ge=1)
    """S: most rows that a rank may send to one node in one round, with more than one node; by
    default M.
    """
    extra_bytes: int = Field(default=0, ge=0, le=4096)
    """Most bytes of `extra` that a token may bring to a round, beside its row: `dispatch(…,
    extra=…)`.
    """
    on_overflow: Literal["raise", "drop"] = "raise"
    """More rows than `max_expert_rows`: raise EPOverflowError in `combine` or `check`, or only
    count dropped pairs.
    """


class ExchangeConfig(Strict):
    """How rows travel between ranks."""

    transport: Literal["auto", "shared_memory", "nvlink"] = "auto"
    """auto: shared_memory on CPU, nvlink on CUDA."""
    payload: PayloadName = "auto"
    """Format of rows sent to the experts; auto: `model.dtype`; fp8: e4m3 with one fp32 scale per
    128 elements. `hidden_size` is then a multiple of 16, over several nodes of 128.
    """
    combine_payload: PayloadName = "auto"
    """Format of rows sent back by combine; the same choices."""
    rail: str = "auto"
    """What carries slabs between nodes. auto: gloo on CPUs, nccl on GPUs, both by all-to-all of
    torch.distributed.
    """
    timeout_s: float = Field(default=30.0, gt=0, le=86400)
    """Seconds that a rank waits for the other ranks before EPTimeoutError."""
    idle: Literal["timeout", "wait"] = "timeout"
    """What a rank without tokens does in dispatch while no rank has tokens for the round. timeout:
    it raises EPTimeoutError after `timeout_s`. wait: it sleeps on the host, without a deadline,
    until a rank brings tokens or has died, see docs/experts_service.md. It takes one node, dispatch
    in one call, no CUDA graphs and no training.
    """
    warmup_timeout_s: float = Field(
        default_factory=lambda values: max(300.0, values.get("timeout_s", 0.0)), gt=0, le=86400
    )
    """Replaces `timeout_s` in the first round, during which ranks may still load or compile. By
    default 300 or, if that is more, `timeout_s`.
    """
    on_abort: Literal["raise", "zeros"] = "raise"
    """Another rank has aborted a round: raise EPAbortedError, or only count it and sum without its
    experts.
    """
    num_sms: int | None = Field(default=None, ge=1)
    """Most multiprocessors (SMs) that a communication kernel may use (CUDA); by default the
    library's choice.
    """

    @property
    def quantizes(self) -> bool:
        """Whether rows travel in a format with scales, to the experts or back from them."""
        return any(WIRE_FORMATS[name].scale for name in (self.payload, self.combine_payload))


class EPConfig(Strict):
    """Configuration of an `ExpertParallel`: `EPConfig.load(path)`, `EPConfig.from_hf(model,
    ep_size=R)` or sections.
    """

    model: ModelConfig
    topology: TopologyConfig
    routing: RoutingConfig = RoutingConfig()
    experts: ExpertsConfig = ExpertsConfig()
    placement: PlacementConfig = PlacementConfig()
    capacity: CapacityConfig = CapacityConfig()
    exchange: ExchangeConfig = ExchangeConfig()

    def __init__(self, /, **sections: Any) -> None:
        """Check the sections; raises ConfigError, which lists every wrong key and what
        it must be.
        """
        try:
            super().__init__(**sections)
        except ValidationError as error:
            lines = []
            for item in error.errors()[:_MOST_ERRORS]:
                # For an unknown key the message suggests one of the same section; for an unknown
                # section, another section.
                is_in_section = len(item["loc"]) > 1
                known = _KEYS.get(str(item["loc"][0]), ()) if is_in_section else tuple(_KEYS)
                lines.append(explain(item, known))
            more = error.error_count() - _MOST_ERRORS
            if more > 0:
                lines.append(f"and {more:,} more")
            raise ConfigError("\n".join(lines)) from None

    @property
    def num_physical_experts(self) -> int:
        """P, the number of logical experts and their copies. With `placement.live` it is the number
        of all slots.
        """
        if self.placement.live:
            return self.topology.ep_size * (self.placement.slots_per_rank or 0)
        return self.model.num_experts + self.placement.num_redundant_experts

    @property
    def seated(self) -> Self:
        """The same configuration for a group with a rank in every seat. Memory is planned by it,
        since empty seats need memory, too.
        """
        if self.topology.seats == self.topology.ep_size:
            return self
        # All seats are on one node, since experts move there only.
        all_seats = TopologyConfig(ep_size=self.topology.seats)
        return self.model_copy(update={"topology": all_seats})

    @property
    def alignment(self) -> int:
        """The alignment in rows: in rounds with `dispatch(…, aligned=True)`, the segment of each
        expert starts at a multiple of it.
        """
        if self.capacity.alignment is not None:
            return self.capacity.alignment
        # GEMMs that want blocks take bf16 only.
        if self.model.dtype != "bfloat16":
            return 1
        small, large = ROW_BLOCKS
        fills_large = self.capacity.max_num_tokens_per_rank >= self.tokens_that_fill(large)
        return large if fills_large else small

    def tokens_that_fill(self, rows: int) -> int:
        """How many tokens each rank must bring so that an expert gets `rows` rows on average."""
        pairs = rows * self.num_physical_experts
        pairs_of_a_token_per_rank = self.topology.ep_size * self.model.num_experts_per_tok
        # This is a division that rounds up.
        return -(-pairs // pairs_of_a_token_per_rank)

    @property
    def small_alignment(self) -> int:
        """The alignment that a rank takes in place of `alignment` if its tokens are too few to fill
        blocks of that many rows. Only kernels on the GPUs of one node do so.
        """
        if self.capacity.alignment is not None:
            return self.alignment
        return min(self.alignment, *ROW_BLOCKS)

    @property
    def rows_per_node(self) -> int:
        """S, the number of rows that a rank may send to one node in one round."""
        return self.capacity.max_rows_per_node or self.capacity.max_num_tokens_per_rank

    def of_node(self) -> Self:
        """Make the configuration of the exchange within one node, which a group over several nodes
        has besides the exchange between the nodes.

        A rank brings to it the rows that it has got from the ranks of all nodes. Its waits are a
        little longer than the waits for the network, so that the rank that waits for the network
        reports first which rank is missing. It only counts overflows and aborts, since the ranks
        from which the rows come raise them. `Placement.of_node` gives its placement.
        """
        topology = self.topology
        exchange = self.exchange
        # Make room for the rows from all nodes. The ranks from which they come raise an overflow.
        capacity = self.capacity.model_copy(
            update={
                "max_num_tokens_per_rank": topology.num_nodes * self.rows_per_node,
                "on_overflow": "drop",
            }
        )
        # Let its waits end after those for the network.
        inside_node = exchange.model_copy(
            update={
                "timeout_s": exchange.timeout_s + INSIDE_NODE_S,
                "warmup_timeout_s": exchange.warmup_timeout_s + INSIDE_NODE_S,
                "on_abort": "zeros",
            }
        )
        return self.model_copy(
            update={
                "topology": TopologyConfig(ep_size=topology.ranks_here),
                "capacity": capacity,
                "exchange": inside_node,
            }
        )

    def place_experts(self) -> Placement:
        """The placement that the `placement` section describes."""
        section = self.placement
        return Placement.build(
            self.model.num_experts,
            self.topology.ep_size,
            section.strategy,
            section.assignment,
            self.num_physical_experts - self.model.num_experts,
            section.copied_experts,
        )

    def with_placement(self, placement: Placement) -> Self:
        """Make the configuration for the ranks, owners and copies of `placement`. A group that
        resumes on other ranks needs it.

        Raises ConfigError if the placement does not fit the other sections, for instance if it has
        more ranks than `topology.ranks_per_node` allows. With `placement.live` it also raises
        ConfigError if the placement is not the one with which a group of this size begins.
        """
        if self.placement.live:
            config = self.of_size(placement.ep_size)
            if config.place_experts() != placement:
                raise ConfigError(
                    "with `placement.live` experts begin as `config.place_experts()` has them, "
                    "then move"
                )
            return config
        # List all owners and copies, since no strategy may compute them from the new ranks.
        explicit = {
            "strategy": "explicit",
            "assignment": list(placement.owners),
            "num_redundant_experts": placement.num_physical_experts - placement.num_experts,
            "copied_experts": placement.copied_experts and list(placement.copied_experts),
        }
        sections = self.model_dump() | {"placement": explicit}
        sections["topology"]["ep_size"] = placement.ep_size
        return type(self)(**sections)

    def of_size(self, ep_size: int) -> Self:
        """Make the configuration for a group of another size, if experts move (`placement.live`).
        Ranks keep their number of slots.

        If the experts would not fit, each rank gets more slots. If the group has too few seats for
        its ranks, it gets more. Raises ConfigError if the size does not fit the other sections.
        """
        sections = self.model_dump()
        placement = sections["placement"]
        # Such a group is on one node. If its number of seats is set, it must be enough.
        seats = self.topology.max_ranks
        if seats is not None:
            seats = max(seats, ep_size)
        sections["topology"] = {"ep_size": ep_size, "max_ranks": seats}
        # The ranks say what their slots hold, so a file with the first contents is of no use now.
        least = -(-self.model.num_experts // ep_size)
        placement["slots"] = None
        placement["slots_per_rank"] = max(placement["slots_per_rank"] or 0, least)
        return type(self)(**sections)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a YAML, TOML or JSON file; environment variables `EPMOE_<SECTION>__<KEY>` override
        its keys.

        `path` may also be the name of a configuration that comes with epmoe, as in
        `EPConfig.load("cpu_demo")`; a file of this name comes first. Raises ConfigError, which
        lists the names for an unknown one.
        """
        path = find_config(path)
        return cls.overridden(read_config(path), f"{path}: ")

    @classmethod
    def from_hf(cls, source: Any, *, ep_size: int, **sections: Any) -> Self:
        """Make the config for the MoE layers of a Hugging Face model: `model`, and all of `routing`
        and `experts`.

            config = EPConfig.from_hf(
                "/checkpoints/Qwen3-30B-A3B", ep_size=8, exchange={"transport": "nvlink"}
            )

        It needs no transformers to read a path, and downloads nothing. Environment variables
        override keys, as those of a file. Where it sets `routing.selection_bias`, `ep.route` and
        `MoELayer` take the checkpoint's bias of the choice, such as `e_score_correction_bias`.
        Where it sets `routing.logit_bias`, as for gpt-oss, `MoELayer` takes the bias of the logits.

        Args:
            source: a model of transformers, its configuration, a dict of its keys, or the path of a
                config.json or of the folder that has it. Of a model with several parts, the one
                with experts counts: `text_config`, `thinker_config`, `llm_config` or
                `language_config`.
            ep_size: R.
            sections: further sections, and keys that replace those of the model, as in
                `model={"dtype": "float32"}`.

        Returns:
            The config.

        Raises:
            TypeError: `source` is none of these.
            ConfigError: the model type is not known, or `epmoe.route` cannot be its router, or
                `GroupedExperts` its experts; the message says what to set by hand, and which types
                are known. Or a key is missing, its value does not fit, it says something else than
                the type does, or two names of a key have different values.
        """
        found, where = sections_of(source, sections)
        topology = found.get("topology", {})
        if isinstance(topology, dict):
            found["topology"] = topology | {"ep_size": ep_size}
        return cls.overridden(found, where)

    @classmethod
    def overridden(cls, sections: dict[str, Any], where: str = "") -> Self:
        """Make the config of these sections. Environment variables `EPMOE_<SECTION>__<KEY>`
        override their keys.

        Raises ConfigError, whose message begins with `where`.
        """
        overrides = environment_overrides(os.environ, _KEYS)
        for override in overrides.values():
            keys = sections.setdefault(override.section, {})
            # If this is no section, the checks of the config refuse it below.
            if isinstance(keys, dict):
                keys[override.key] = override.value
        try:
            return cls(**sections)
        except ConfigError as error:
            note = f" (the environment sets {', '.join(overrides)})" if overrides else ""
            raise ConfigError(f"{where}{error}{note}") from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check the rules that involve more than one key."""
        for rule in self._rules():
            if not rule.holds:
                raise ValueError(f"`{rule.key}` must be {rule.must_be}, got {rule.got}")
        return self

    def _rules(self) -> Iterator[_Rule]:
        """Yield all rules that involve more than one key, held or not."""
        yield from self._model_rules()
        yield from self._live_rules()
        yield from self._placement_rules()
        # Which copy of an expert gets a token depends on the token's place in the batch. So the
        # rows that are computed together would depend on the batch, too.
        has_copies = self.placement.live or self.placement.num_redundant_experts > 0
        invariant = self.experts.batch_invariant
        yield _Rule(
            key="experts.batch_invariant",
            holds=not (invariant and has_copies),
            must_be="false where experts have copies",
            got=invariant,
        )
        yield from self._capacity_rules()

    def _live_rules(self) -> Iterator[_Rule]:
        """Rules of experts that move."""
        section = self.placement
        ranks = self.topology.ep_size
        seats = self.topology.max_ranks
        experts = self.model.num_experts
        # Without `live`, these keys would have no effect, so they must be unset.
        if not section.live:
            yield _Rule(
                key="topology.max_ranks",
                holds=seats is None,
                must_be="unset without `placement.live`",
                got=seats,
            )
            for key in ("slots_per_rank", "most_copies", "layers", "staging_mb", "slots"):
                value = getattr(section, key)
                default = PlacementConfig.model_fields[key].default
                yield _Rule(
                    key=f"placement.{key}",
                    holds=value == default,
                    must_be="unset without `live`",
                    got=value,
                )
            return
        # With `live`, experts begin in a plain placement on one node, and then move.
        yield _Rule(
            key="placement.strategy",
            holds=section.strategy == "linear",
            must_be="linear with `live`",
            got=section.strategy,
        )
        redundant = section.num_redundant_experts
        yield _Rule(
            key="placement.num_redundant_experts",
            holds=redundant == 0,
            must_be="0 with `live`",
            got=redundant,
        )
        yield _Rule(
            key="topology.ranks_per_node",
            holds=self.topology.num_nodes == 1,
            must_be="all ranks with `placement.live`",
            got="fewer",
        )
        # All slots together must hold all experts, and their numbers must fit into 16 bits.
        slots = section.slots_per_rank
        least = -(-experts // ranks)
        most_seats = min(_LIVE_SLOTS // least, _MOST_ON_NODE)
        yield _Rule(
            key="topology.max_ranks",
            holds=seats is None or ranks <= seats <= most_seats,
            must_be=(
                f"from `topology.ep_size` = {ranks} to {most_seats}, since all seats have "
                f"{_LIVE_SLOTS:,} slots at most"
            ),
            got=seats,
        )
        most = min(experts, _LIVE_SLOTS // self.topology.seats)
        yield _Rule(
            key="placement.slots_per_rank",
            holds=slots is not None and least <= slots <= most,
            must_be=f"from {least} to {most} with `live`",
            got=slots,
        )

    def _model_rules(self) -> Iterator[_Rule]:
        """Rules of the model and its routing."""
        model = self.model
        routing = self.routing
        experts = model.num_experts
        top_k = model.num_experts_per_tok
        yield _Rule(
            key="model.num_experts_per_tok",
            holds=top_k <= experts,
            must_be=f"at most `model.num_experts` = {experts}",
            got=top_k,
        )
        # Kernels copy rows in words of 16 bytes.
        step = 16 // model.torch_dtype.itemsize
        yield _Rule(
            key="model.hidden_size",
            holds=model.hidden_size % step == 0,
            must_be=(
                f"a multiple of {step}, so that a {model.dtype} row is a multiple of 16 bytes"
            ),
            got=model.hidden_size,
        )
        # The groups that a token chooses must have at least K experts.
        groups = routing.num_expert_groups
        chosen = routing.top_groups
        size = experts // groups
        yield _Rule(
            key="routing.num_expert_groups",
            holds=experts % groups == 0,
            must_be=f"a divisor of `model.num_experts` = {experts}",
            got=groups,
        )
        least = -(-top_k // max(size, 1))
        yield _Rule(
            key="routing.top_groups",
            holds=least <= chosen <= groups,
            must_be=f"from {least} to {groups}, so that the chosen groups hold {top_k} experts",
            got=chosen,
        )
        rated = routing.scores_per_group
        yield _Rule(
            key="routing.scores_per_group",
            holds=(rated or 1) <= size,
            must_be=f"at most the {size} experts of a group",
            got=rated,
        )

    def _placement_rules(self) -> Iterator[_Rule]:
        """Rules of ranks, nodes and owners."""
        size = self.topology.ep_size
        node = self.topology.ranks_here
        yield _Rule(
            key="topology.ranks_per_node",
            holds=size % node == 0,
            must_be=f"a divisor of `topology.ep_size` = {size}",
            got=node,
        )
        key = "ep_size" if self.topology.ranks_per_node is None else "ranks_per_node"
        yield _Rule(
            key=f"topology.{key}",
            holds=node <= _MOST_ON_NODE,
            must_be=f"at most {_MOST_ON_NODE} on one node",
            got=node,
        )
        # `Placement` checks the other keys of the section. Its messages name the key alone, so the
        # section is added.
        try:
            owners = self.place_experts().owners
        except ValueError as error:
            raise ValueError(str(error).replace("`", "`placement.", 1)) from None
        owning_nodes = {rank // node for rank in owners}
        yield _Rule(
            key="topology.ranks_per_node",
            holds=len(owning_nodes) == size // node,
            must_be="such that every node owns an expert",
            got=node,
        )

    def _capacity_rules(self) -> Iterator[_Rule]:
        """Rules of the sizes of buffers."""
        model = self.model
        exchange = self.exchange
        tokens = self.capacity.max_num_tokens_per_rank
        # Rows must fit the formats in which they travel.
        payload = WIRE_FORMATS[exchange.payload]
        combine = WIRE_FORMATS[exchange.combine_payload]
        one_node = self.topology.num_nodes == 1
        for key, wire, is_padded in (
            ("payload", payload, one_node),
            ("combine_payload", combine, False),
        ):
            # Rows to experts on the same node are padded with zeros to whole blocks, so that only
            # the size of a line counts. Other rows travel as they are.
            step = LINE_BYTES if is_padded else wire.block
            yield _Rule(
                key=f"exchange.{key}",
                holds=not wire.block or model.hidden_size % step == 0,
                must_be=(
                    f"auto where `model.hidden_size` = {model.hidden_size} is no multiple of {step}"
                ),
                got=wire.name,
            )
        # The extra of a token lies behind its row, and counts in elements of the row. The check
        # takes fp16 for all models, since the extra takes the most elements if these have two
        # bytes.
        extra = self.capacity.extra_bytes
        width = WIRE_FORMATS[exchange.payload].width(model.hidden_size, extra, torch.float16)
        yield _Rule(
            key="capacity.extra_bytes",
            holds=not extra or width <= _MOST_ELEMENTS,
            must_be=f"such that it makes a row of {_MOST_ELEMENTS} elements at most",
            got=extra,
        )
        # The first round may not have less time than the others.
        first = exchange.warmup_timeout_s
        later = exchange.timeout_s
        yield _Rule(
            key="exchange.warmup_timeout_s",
            holds=first >= later,
            must_be=f"at least `exchange.timeout_s` = {later}",
            got=first,
        )
        # Idle ranks wait in the host memory that the ranks of one node share.
        nodes = self.topology.num_nodes
        yield _Rule(
            key="exchange.idle",
            holds=exchange.idle == "timeout" or nodes == 1,
            must_be="timeout over several nodes, whose waits for the network have a deadline",
            got=exchange.idle,
        )
        # Rows are numbered in int32, with the gaps between segments and behind the last one.
        alignment = self.alignment
        rows = self.capacity.max_expert_rows
        largest = _INT32_MAX // alignment * alignment
        yield _Rule(
            key="capacity.max_expert_rows",
            holds=rows is None or rows <= largest,
            must_be=(f"at most {largest}, the largest int32 multiple of the alignment {alignment}"),
            got=rows,
        )
        per_node = self.rows_per_node
        yield _Rule(
            key="capacity.max_rows_per_node",
            holds=per_node <= tokens,
            must_be=f"at most M = {tokens} rows",
            got=per_node,
        )
        gaps = (self.seated.num_physical_experts + 1) * alignment
        most = (_INT32_MAX - gaps) // (self.topology.seats * model.num_experts_per_tok)
        yield _Rule(
            key="capacity.max_num_tokens_per_rank",
            holds=tokens <= most,
            must_be=f"at most {most}, as R·M·K rows are numbered in int32",
            got=tokens,
        )


_KEYS = {
    section: tuple(field.annotation.model_fields)  # type: ignore[union-attr]
    for section, field in EPConfig.model_fields.items()
}
