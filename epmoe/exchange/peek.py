"""Reads buffers of a device on the host at any time: the copy waits for no kernel, and no kernel
for the copy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from torch import Tensor

LONG_S = 0.2
"""Longer than a copy takes on a GPU that works, and shorter than any deadline."""


class Peek(ABC):
    """Copies buffers to the host. The buffers are contiguous and on one device. Any thread may
    read, and a signal handler during a read.
    """

    def read(self) -> list[Tensor]:
        """What the buffers hold now, in tensors of the caller's."""
        read = self.read_within(math.inf)
        assert read is not None
        return read

    @abstractmethod
    def read_within(self, timeout_s: float) -> list[Tensor] | None:
        """Read as `read` does; None if no copy has come in time."""
