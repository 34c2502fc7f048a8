"""epmoe in SGLang: a plugin that carries tokens in place of DeepEP, in the backend `deepep_v2`.

SGLang finds `register` by the entry point `sglang.srt.plugins`. The plugin acts only where
EPMOE_SGLANG chooses it: 1 for the exchange, "layer" for the exchange and `GroupedExperts` in place
of SGLang's DeepGEMM runner, and {"live": {…}} for such experts that move, with keys of `Balancer`
and of `placement`.

    EPMOE_SGLANG=1 python -m sglang.launch_server --model-path MODEL --tp 2 \\
        --moe-a2a-backend deepep_v2
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

VARIABLE = "EPMOE_SGLANG"


def register() -> None:
    """Hook epmoe into this process of SGLang if EPMOE_SGLANG chooses it; SGLang calls it by itself.

    Raises ValueError for a value of none of these forms, nor 0 nor the empty string.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen in ("", "0"):
        return
    live = None if chosen in ("1", "layer") else _live_of(chosen)

    # Imported here: they need SGLang.
    from epmoe.integrations.sglang.dispatcher import register_hooks

    register_hooks(live)
    if chosen != "1":
        from epmoe.integrations.sglang.runner import register_experts

        register_experts()


def _live_of(chosen: str) -> dict[str, Any]:
    """The mapping LIVE of {"live": LIVE}, in JSON."""
    parsed = None
    with suppress(ValueError):
        parsed = json.loads(chosen)
    if isinstance(parsed, dict) and parsed.keys() == {"live"}:
        live = parsed["live"]
        if isinstance(live, dict):
            return live
    forms = '0, 1, layer or {"live": {"every": 1000}}'
    raise ValueError(f"environment variable {VARIABLE} must be {forms}, got {chosen!r}")
