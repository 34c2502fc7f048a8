"""Counts functions of this package that a call runs: numbers that no machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import epmoe


def functions_of(call: Callable[[], object]) -> int:
    """How many functions of this package a call runs."""
    package = str(Path(epmoe.__file__).parent)
    seen = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal seen
        seen += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen
