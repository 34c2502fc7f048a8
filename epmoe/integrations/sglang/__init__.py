"""epmoe in SGLang: a plugin that carries tokens in place of DeepEP, in the backend `deepep_v2`.

SGLang finds `register` by the entry point `sglang.srt.plugins`. The plugin acts only where EPMOE_SGLANG chooses it: 1
for the exchange, "layer" for the exchange and `GroupedExperts` in place of SGLang's DeepGEMM runner.

    EPMOE_SGLANG=1 python -m sglang.launch_server --model-path MODEL --tp 2 --moe-a2a-backend deepep_v2
"""

from __future__ import annotations

import os

VARIABLE = "EPMOE_SGLANG"


def register() -> None:
    """Hook epmoe into this process of SGLang if EPMOE_SGLANG chooses it; SGLang calls it by itself.

    Raises ValueError for a value other than 0, 1, "layer" and the empty string.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "0", "1", "layer"):
        raise ValueError(f"environment variable {VARIABLE} must be 0, 1 or layer, got {chosen!r}")
    if chosen in ("1", "layer"):
        from epmoe.integrations.sglang.dispatcher import register_hooks

        register_hooks(own_experts=chosen == "layer")
