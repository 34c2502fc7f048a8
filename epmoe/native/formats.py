"""The formats in which rows travel between ranks."""

from __future__ import annotations

SCALE_BLOCK = 128  # elements of a row that share one fp8 scale
