"""Puts epmoe's exchange into torchtitan's MoE layers. They can be trained, compiled and captured
into CUDA graphs.

    --override.imports epmoe.integrations.torchtitan.dispatcher
    --override.imports epmoe.integrations.torchtitan.selective_ac

The first option chooses the exchange. The second one is needed with selective activation
checkpointing.

The model must be built for torchtitan's "hybridep" backend. torchtitan fills the config of that
backend with the sizes that epmoe's windows need. Its field `non_blocking_capacity_factor` asks for
a dispatch without CPU synchronisation, as CUDA graphs need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, HybridEPTokenDispatcher

from epmoe.config.config import EPConfig
from epmoe.integrations.session import TRAINING_DEADLINES, make_config
from epmoe.service import ExpertParallel
from epmoe.training import Routed, TrainingExchange

# Layers with the same ranks and the same configuration share an exchange and its windows. The
# layers own the exchange: it is freed with the last of them.
_exchanges: WeakValueDictionary[tuple[object, ...], TrainingExchange] = WeakValueDictionary()


class EpmoeTokenDispatcher(BaseEPTokenDispatcher):
    """Dispatches the tokens of torchtitan's routed experts and combines their outputs. The scores
    are applied in combine, in fp32.

    Raises ValueError if a size is missing, or if the number of experts is no multiple of the number
    of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):
        """The fields of HybridEP's config, and `dtype`.

        `non_blocking_capacity_factor` decides how many rows dispatch returns. With None, dispatch
        returns the rows that arrived, and the host waits for their number. A number is a share of
        the most rows that can arrive: dispatch always returns that many rows, and a round with more
        rows raises an `EPOverflowError`. The rows of every expert begin at a multiple of
        `pad_multiple`, and the rows between two experts are zeros. `dtype` is the widest dtype in
        which tokens come.
        """

        dtype: str | None = None
        """the name of a dtype of torch; by default bfloat16 on GPUs and float32 on CPUs"""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        if config.hidden_dim is None or config.num_max_tokens_per_rank is None:
            raise ValueError(
                "epmoe needs `hidden_dim` and `num_max_tokens_per_rank`, which torchtitan fills in "
                "for the hybridep backend: choose it, and override it by "
                "epmoe.integrations.torchtitan.dispatcher"
            )

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        """Take the mesh of the ranks and open the windows over it, by `init_buffer`. Collective.

        torchtitan calls this once for each layer. Raises ValueError without expert parallelism.
        """
        if ep_mesh is None:
            raise ValueError(
                "epmoe's dispatcher needs expert parallelism: set "
                "parallelism.expert_parallel_degree"
            )
        super().wire_meshes(ep_mesh=ep_mesh)

    def init_buffer(self) -> None:
        """Find the exchange of earlier layers with the same sizes, or open a new one. Collective.

        torchtitan's own `wire_meshes` calls this. It sets `exchange` and the `tag` of this layer.
        """
        config = self.config
        mesh = self.ep_mesh
        assert mesh is not None and config.hidden_dim is not None
        if self.num_experts % mesh.size():
            raise ValueError(f"{self.num_experts} experts must divide by {mesh.size()} ranks")
        # Make the configuration. Layers whose configurations are equal share windows.
        is_on_gpus = mesh.device_type == "cuda"
        dtype = config.dtype or ("bfloat16" if is_on_gpus else "float32")
        sections: dict[str, dict[str, Any]] = {
            "capacity": {
                "max_num_tokens_per_rank": config.num_max_tokens_per_rank,
                "alignment": config.pad_multiple,
            },
            "exchange": TRAINING_DEADLINES,
        }
        ep_config = make_config(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=config.hidden_dim,
            dtype=getattr(torch, dtype),
            ep_size=mesh.size(),
            sections=sections,
            from_environment=True,
        )
        # Use the exchange of an earlier layer, or open one. Then take a tag for this layer.
        ranks = dist.get_process_group_ranks(mesh.get_group())
        key = (*ranks, repr(ep_config))
        exchange = _exchanges.get(key)
        if exchange is None:
            exchange = _open_exchange(ep_config, ranks, is_on_gpus)
            _exchanges[key] = exchange
        self.exchange = exchange
        self.tag = exchange.ep.new_tag()

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Routed]:
        """Send each token of x_TD to the ranks of its experts. Collective.

        x_TD holds T tokens of D values. The scores and ids [T, K] say which K experts a token has,
        and with which weights. Returns three things: the rows [N, D] that arrived, sorted by local
        expert; the number of rows of each of the e local experts, int32 [e], padding included; and
        the state for `combine`. torchtitan also passes `num_local_tokens_per_expert_E`, which epmoe
        does not need, because its kernels count the tokens themselves.
        """
        routed = self.exchange.dispatch(
            x_TD, topk_expert_ids_TK, topk_scores_TK, num_rows=self._num_rows, tag=self.tag
        )
        return routed.rows, routed.expert_offsets.diff(), routed

    def combine(self, routed_output_RD: Tensor, metadata: object, x_TD: Tensor) -> Tensor:
        """Send the experts' outputs [N, D] back, and add them up with their scores. Collective.

        Returns the weighted sums [T, D]. `metadata` is the state that `dispatch` has returned.
        torchtitan also passes the tokens `x_TD`, which epmoe does not need.
        """
        assert isinstance(metadata, Routed)
        return self.exchange.combine(routed_output_RD, metadata)

    @property
    def _num_rows(self) -> int | Literal["exact"]:
        """How many rows dispatch returns: a fixed number, or "exact" for the rows that arrive."""
        factor = self.config.non_blocking_capacity_factor
        sizes = self.exchange.ep.memory_plan().sizes
        if factor is None:
            return "exact"
        # At most, each of M tokens of each of R ranks comes with all of its K experts, or with all
        # experts of this rank where it has fewer.
        max_pairs = sizes["R"] * sizes["M"] * min(sizes["K"], sizes["num_local_experts"])
        # Add the largest gap in front of each expert, and round up to a multiple of the step.
        step = self.config.pad_multiple or 1
        gap_rows = sizes["num_local_experts"] * (step - 1)
        num_rows = int(max_pairs * factor) + gap_rows
        return -(-num_rows // step) * step


def _open_exchange(config: EPConfig, ranks: list[int], is_on_gpus: bool) -> TrainingExchange:
    """Open an exchange over these global ranks. Collective."""
    # The exchange needs a CPU backend, which torchtitan's group may lack.
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    device = torch.device("cpu")
    if is_on_gpus:
        device = torch.device("cuda", torch.cuda.current_device())
    # torchtitan builds models with "meta" as the default device; the exchange needs real memory.
    with device:
        return TrainingExchange(ExpertParallel(config, group, device))


@override(
    target=HybridEPTokenDispatcher.Config, description="epmoe's one-sided dispatch and combine"
)
def dispatcher(
    cfg: HybridEPTokenDispatcher.Config, **options: object
) -> EpmoeTokenDispatcher.Config:
    """Choose epmoe's exchange. `options` are fields of `EpmoeTokenDispatcher.Config`."""
    return derive(cfg, EpmoeTokenDispatcher.Config, **options)


class EpmoeSelectiveAC(SelectiveAC):
    """torchtitan's selective checkpointing. It also keeps the results of dispatch and combine, so
    that the backward pass does not run their rounds again.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """torchtitan's own fields."""

    def get_save_ops(self) -> set[object]:
        """The operators whose results are kept: torchtitan's, and dispatch and combine.

        Both are kept together, because recomputing only one of them would leave a round half done.
        """
        return super().get_save_ops() | {
            torch.ops.epmoe.train_dispatch.default,
            torch.ops.epmoe.train_combine.default,
        }


@override(target=SelectiveAC.Config, description="keeps the rounds of epmoe's exchange")
def selective_ac(cfg: SelectiveAC.Config) -> EpmoeSelectiveAC.Config:
    """Choose `EpmoeSelectiveAC` for selective activation checkpointing."""
    return derive(cfg, EpmoeSelectiveAC.Config)
