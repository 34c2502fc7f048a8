"""Checkpoints of models whose experts are spread over ranks.

The functions here save and load state dicts of all logical experts, save a trained model as a
folder of safetensors, and load and save LoRA adapters of experts. `SafetensorsFolder` reads one
rank's experts out of such a folder.
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
