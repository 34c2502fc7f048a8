"""Reads buffers of a device on the host at any time. The copy waits for no kernel, and no kernel
waits for the copy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from torch import Tensor

LONG_S = 0.2
"""Longer than a copy takes on a GPU that works, and shorter than any deadline."""


class Peek(ABC):
    """Copies contiguous buffers of one device to the host.

    Any thread may read. A signal handler may read, too, even if it interrupts another read.
    """

    def read(self) -> list[Tensor]:
        """Return copies of the buffers on the host. They belong to the caller."""
        read = self.read_within(math.inf)
        assert read is not None
        return read

    @abstractmethod
    def read_within(self, timeout_s: float) -> list[Tensor] | None:
        """Read as `read` does, but return None if the copies take longer than `timeout_s`."""
