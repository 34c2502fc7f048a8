"""epmoe in SGLang: a plugin that carries tokens in place of DeepEP, in the backend `deepep_v2`.

SGLang finds `register` by the entry point `sglang.srt.plugins`. The plugin acts only where EPMOE_SGLANG=1 chooses it:

    EPMOE_SGLANG=1 python -m sglang.launch_server --model-path MODEL --tp 2 --moe-a2a-backend deepep_v2
"""

from __future__ import annotations

import os

VARIABLE = "EPMOE_SGLANG"


def register() -> None:
    """Hook epmoe into this process of SGLang if the environment has EPMOE_SGLANG=1; SGLang calls it by itself.

    Raises ValueError for a value other than 0, 1 and the empty string.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "0", "1"):
        raise ValueError(f"environment variable {VARIABLE} must be 0 or 1, got {chosen!r}")
    if chosen == "1":
        from epmoe.integrations.sglang.dispatcher import register_hooks

        register_hooks()
