"""The releases of vLLM in which epmoe was tried. Their layer of experts, `RoutedExperts`, is its
seat.

epmoe depends on private names of vLLM, which move: another release is refused by its number where
epmoe is chosen.
"""

from __future__ import annotations

import logging
import os

import vllm
from packaging.version import Version

FIRST = "0.26"
LAST = "0.33"
VARIABLE = "EPMOE_VLLM"

logger = logging.getLogger("vllm.epmoe")


def problem() -> str | None:
    """The reason why this release has no seat for epmoe; None: it has one."""
    if Version(FIRST).release <= Version(vllm.__version__).release[:2] <= Version(LAST).release:
        return None
    return f"epmoe was tried with vLLM {FIRST} to {LAST}, and this is {vllm.__version__}"


def refuse(reason: str) -> None:
    """Warn that epmoe cannot be chosen. Raises RuntimeError if it is, by the environment."""
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        raise RuntimeError(
            f"{VARIABLE} chooses epmoe, but {reason}: unset it, or install vLLM {FIRST} to {LAST}"
        )
    logger.warning("epmoe cannot be chosen: %s", reason)
