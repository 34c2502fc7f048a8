"""Checkpoints: state dicts of all logical experts, a rank's experts out of a folder of safetensors,
and such a folder of a trained model; LoRA adapters of experts.
"""

from epmoe.checkpoint.adapters import load_adapter
from epmoe.checkpoint.peft_folder import save_adapter
from epmoe.checkpoint.pretrained import save_pretrained
from epmoe.checkpoint.state_dicts import (
    full_state_dict,
    load,
    load_full_state_dict,
    save,
    sharded_state_dict,
)

__all__ = [
    "full_state_dict",
    "load",
    "load_adapter",
    "load_full_state_dict",
    "save",
    "save_adapter",
    "save_pretrained",
    "sharded_state_dict",
]
