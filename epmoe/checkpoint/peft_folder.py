"""Saves LoRA adapters whose experts are spread over ranks. The folder is the one that PEFT would
write if one process had the whole model.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from epmoe.checkpoint.folders import appearing
from epmoe.checkpoint.whole import whole_tensor
from epmoe.group.collective import all_ranks, naming
from epmoe.group.peers import Peers, run_uninterrupted
from epmoe.live.sleeping import refuse_without_memory
from epmoe.training.models import expert_parallels


def save_adapter(model: Any, folder: str | os.PathLike[str], **options: Any) -> None:
    """Save the adapters of a model whose experts are spread over ranks. Collective.

    Rank 0 gathers the factors and calls PEFT's `save_pretrained`. PEFT can load the folder, and so
    can `MoELayer.load_adapter` in a group of any size. The folder appears as a whole or not at all.

    Args:
        model: a model of PEFT, not wrapped in DDP. Its factors may be plain tensors or those that
            `epmoe.training.spread_adapters` has spread.
        folder: a path that all ranks see and that does not exist yet.
        options: other arguments of PEFT's `save_pretrained`.

    Raises:
        ValueError: `folder` exists, or the model is not a model of PEFT.
        EPTimeoutError: some ranks have ended, or did not call within `exchange.warmup_timeout_s`.
            The error names these ranks.
    """
    eps = expert_parallels(model)
    with (
        naming("save_adapter", eps),
        all_ranks(eps) as peers,
        appearing(folder, peers) as (target, hidden),
    ):
        if not hasattr(model, "peft_config"):
            raise ValueError(f"`model` must be one of PEFT, got {type(model).__name__}")
        if peers.rank == 0 and target.exists():
            raise ValueError(f"{target}: must not exist yet")
        refuse_without_memory(model)
        # Replace each part by the complete tensor. Every rank takes part in this.
        state = model.state_dict()
        gather = partial(_gather_parts, state, _parts(model, state), peers)
        run_uninterrupted([peers], gather)
        # PEFT picks the adapters out of the state dict.
        if peers.rank == 0:
            model.save_pretrained(hidden, state_dict=state, **options)


def _gather_parts(state: dict[str, Any], parts: dict[str, Any], peers: Peers) -> None:
    """Replace each tensor of `parts` in `state` by the complete tensor. Collective."""
    with peers.waiting():
        for key, value in parts.items():
            state[key] = whole_tensor(value)


def _parts(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Find the tensors of `state` that PEFT will write and of which each rank has only a part.

    These are the factors of the adapters, and other parameters if the adapter's configuration sets
    `modules_to_save` or `bias`. Returns the tensors by their keys in `state`.
    """
    from peft import get_peft_model_state_dict

    # PEFT returns tensors of `state` under names of its own, so they are recognised by identity.
    written = set[int]()
    for name in model.peft_config:
        adapter = get_peft_model_state_dict(
            model, state_dict=state, adapter_name=name, save_embedding_layers=False
        )
        written.update(map(id, adapter.values()))
    parts = {}
    for key, value in state.items():
        if id(value) in written and hasattr(value, "full_tensor"):
            parts[key] = value
    return parts
