"""Deadlines of failures over several nodes, whose order matters.

The rank next to a fault must report first, since it knows who is missing. The others then report
the same ranks:

    timeout_s                a transfer to other nodes: its rank finds the fault
    + ANSWER_S               the ranks of its rail have reported what they know
    + INSIDE_NODE_S          waits inside a node, whose other ranks have the report by then
    + RETURN_S               the way back to the sources, which waits for ranks in such waits
    + NETWORK_SLACK_S        the network's own deadline, whose error would have no names
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ANSWER_S = 0.4
INSIDE_NODE_S = 0.8
RETURN_S = 1.1
NETWORK_SLACK_S = 2.0
# So long after timeout_s, every rank that lives has raised and calls `recover`.
LAST_CALL_S = 5.0
# Like ANSWER_S, where a group did not open and processes may still start.
OPENING_ANSWER_S = 1.0


@dataclass(frozen=True)
class Deadlines:
    """How long the waits of one exchange may take, in seconds: every wait of its host asks it.

    The operators of a node have both numbers, and count rounds themselves.
    """

    first_s: float
    """until the second round opens: ranks may still load or compile"""
    later_s: float
    opened: Callable[[], int]
    """returns the number of rounds so far"""

    def wait_s(self, *, returning: bool = False, first: bool = False) -> float:
        """Of a wait, or over several nodes for `returning` sums. `first`: the first round is still
        under way.
        """
        is_first = first or self.opened() <= 1
        timeout_s = self.first_s if is_first else self.later_s
        return timeout_s + RETURN_S * returning
