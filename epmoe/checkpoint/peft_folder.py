"""Saves an adapter of spread experts as the folder of PEFT that one process would write."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from epmoe.checkpoint.folders import appearing
from epmoe.checkpoint.whole import whole_tensor
from epmoe.group.collective import all_ranks, naming
from epmoe.group.peers import Peers, run_uninterrupted
from epmoe.training.models import expert_parallels


def save_adapter(model: Any, folder: str | os.PathLike[str], **options: Any) -> None:
    """Save adapters whose factors are spread, by PEFT's `save_pretrained`. Collective.

    PEFT, and `MoELayer.load_adapter` in groups of any size, read what rank 0 writes. The folder
    appears as a whole or not at all.

    Args:
        model: of PEFT, with the factors of `epmoe.training.spread_adapters` or plain ones, not in
            DDP.
        folder: which all ranks see, and which does not exist yet.
        options: other arguments of `save_pretrained`.

    Raises:
        ValueError: `folder` exists, or the model is none of PEFT.
        EPTimeoutError: ranks ended or did not come within `exchange.warmup_timeout_s`. It names
            them.
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
        state = model.state_dict()
        gather = partial(_gather_parts, state, _parts(model, state), peers)
        run_uninterrupted([peers], gather)
        if peers.rank == 0:
            model.save_pretrained(hidden, state_dict=state, **options)


def _gather_parts(state: dict[str, Any], parts: dict[str, Any], peers: Peers) -> None:
    """Put complete tensors in place of parts. Collective."""
    with peers.waiting():
        for key, value in parts.items():
            state[key] = whole_tensor(value)


def _parts(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The tensors that PEFT writes and of which ranks have only parts: factors, and other
    parameters with `modules_to_save` and `bias`.
    """
    from peft import get_peft_model_state_dict

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
