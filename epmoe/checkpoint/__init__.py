"""Checkpoints: state dicts of all logical experts, and a rank's experts out of a folder of safetensors."""

from epmoe.checkpoint.state_dicts import full_state_dict, load, load_full_state_dict, save, sharded_state_dict

__all__ = ["full_state_dict", "load", "load_full_state_dict", "save", "sharded_state_dict"]
