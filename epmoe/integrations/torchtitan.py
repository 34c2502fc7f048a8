"""torchtitan's MoE layers with epmoe's exchange: chosen by `--override.imports`, trained, compiled
and captured.

    --override.imports epmoe.integrations.torchtitan.dispatcher
    --override.imports epmoe.integrations.torchtitan.selective_ac

The second is for selective activation checkpointing.

The model is built for the "hybridep" backend, whose config torchtitan fills with the sizes that
windows need, and whose `non_blocking_capacity_factor` stands for a dispatch without CPU
synchronisation, which CUDA graphs ask for.
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

# Layers with the same key share windows.
_exchanges: WeakValueDictionary[tuple[object, ...], TrainingExchange] = WeakValueDictionary()


class EpmoeTokenDispatcher(BaseEPTokenDispatcher):
    """Dispatch and combine of torchtitan's routed experts. Scores apply in combine, in fp32.

    Raises ValueError if a size is missing, or the experts do not divide by the ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):
        """The fields of HybridEP's config, and `dtype`.

        With a `non_blocking_capacity_factor` of None, as many rows arrive as there are, and the
        host waits for their number. A number is a share of the most rows that can arrive; more
        raise an `EPOverflowError`. Every expert's rows begin at a multiple of `pad_multiple`,
        padded with zeros. `dtype` is the widest of the tokens.
        """

        dtype: str | None = None
        """by default bfloat16 on GPUs and float32 on CPUs"""

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
        """Open the windows of the mesh. Collective. Raises ValueError without expert
        parallelism.
        """
        if ep_mesh is None:
            raise ValueError(
                "epmoe's dispatcher needs expert parallelism: set "
                "parallelism.expert_parallel_degree"
            )
        super().wire_meshes(ep_mesh=ep_mesh)

    def init_buffer(self) -> None:
        """Open the windows, or take those of an earlier layer of the same sizes."""
        config = self.config
        mesh = self.ep_mesh
        assert mesh is not None and config.hidden_dim is not None
        if self.num_experts % mesh.size():
            raise ValueError(f"{self.num_experts} experts must divide by {mesh.size()} ranks")
        # Make the configuration. Layers with equal ones share windows.
        is_on_gpus = mesh.device_type == "cuda"
        dtype = config.dtype or ("bfloat16" if is_on_gpus else "float32")
        sections: dict[str, dict[str, Any]] = {
            "capacity": {
                "max_num_tokens_per_rank": config.num_max_tokens_per_rank,
                "alignment": config.pad_multiple,
            },
            "exchange": TRAINING_DEADLINES,
        }
        made = make_config(
            self.num_experts,
            self.top_k,
            config.hidden_dim,
            getattr(torch, dtype),
            mesh.size(),
            sections,
            from_environment=True,
        )
        ranks = dist.get_process_group_ranks(mesh.get_group())
        key = (*ranks, repr(made))
        exchange = _exchanges.get(key)
        if exchange is None:
            exchange = _open(made, ranks, is_on_gpus)
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
        """Send tokens [T, D] with their scores and ids [T, K] to the ranks of their experts.
        Collective.

        Returns rows [N, D] by local expert, int32 [e] their numbers, padding included, and the
        state for `combine`. `num_local_tokens_per_expert_E` is not needed.
        """
        routed = self.exchange.dispatch(
            x_TD, topk_expert_ids_TK, topk_scores_TK, num_rows=self._num_rows, tag=self.tag
        )
        return routed.rows, routed.expert_offsets.diff(), routed

    def combine(self, routed_output_RD: Tensor, metadata: object, x_TD: Tensor) -> Tensor:
        """The sums of the experts' outputs, weighted by scores, [T, D]. Collective."""
        assert isinstance(metadata, Routed)
        return self.exchange.combine(routed_output_RD, metadata)

    @property
    def _num_rows(self) -> int | Literal["exact"]:
        """How many rows dispatch returns."""
        factor = self.config.non_blocking_capacity_factor
        sizes = self.exchange.ep.memory_plan().sizes
        if factor is None:
            return "exact"
        # A share of all pairs that can arrive, and all gaps, in whole steps.
        most = sizes["R"] * sizes["M"] * min(sizes["K"], sizes["num_local_experts"])
        step = self.config.pad_multiple or 1
        gaps = sizes["num_local_experts"] * (step - 1)
        return -(-(int(most * factor) + gaps) // step) * step


def _open(config: EPConfig, ranks: list[int], is_on_gpus: bool) -> TrainingExchange:
    """The windows of these ranks. Collective."""
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    device = torch.device("cpu")
    if is_on_gpus:
        device = torch.device("cuda", torch.cuda.current_device())
    # torchtitan builds models on the meta device.
    with device:
        return TrainingExchange(ExpertParallel(config, group, device))


@override(
    target=HybridEPTokenDispatcher.Config, description="epmoe's one-sided dispatch and combine"
)
def dispatcher(
    cfg: HybridEPTokenDispatcher.Config, **options: object
) -> EpmoeTokenDispatcher.Config:
    """Take epmoe's exchange; `options` are fields of `EpmoeTokenDispatcher.Config`."""
    return derive(cfg, EpmoeTokenDispatcher.Config, **options)


class EpmoeSelectiveAC(SelectiveAC):
    """torchtitan's selective checkpointing, which also keeps what dispatch and combine returned."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """torchtitan's own fields."""

    def get_save_ops(self) -> set[object]:
        """torchtitan's, and both operators of the exchange: saved together, they leave no round
        half computed.
        """
        return super().get_save_ops() | {
            torch.ops.epmoe.train_dispatch.default,
            torch.ops.epmoe.train_combine.default,
        }


@override(target=SelectiveAC.Config, description="keeps the rounds of epmoe's exchange")
def selective_ac(cfg: SelectiveAC.Config) -> EpmoeSelectiveAC.Config:
    """Take `EpmoeSelectiveAC`."""
    return derive(cfg, EpmoeSelectiveAC.Config)
