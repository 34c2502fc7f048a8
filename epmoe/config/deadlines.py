"""How long the waits of a group over several nodes last. Their order matters.

When a rank fails, all others wait for it, directly or indirectly. The rank that waits for it
directly must give up first, since it knows which rank is missing. It tells the others, which then
report the same rank. So the deadlines of the other waits come later, each after the one before:

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
    """How long the waits of one exchange may take, in seconds. Every wait on the host asks
    `wait_s`.

    The operators in C++ and CUDA wait, too. They have both numbers and count the rounds themselves.
    """

    first_s: float
    """the deadline of the first round, during which ranks may still load or compile"""
    later_s: float
    """the deadline of all later rounds"""
    opened: Callable[[], int]
    """returns how many rounds have been opened so far"""

    def wait_s(self, *, returning: bool = False, first: bool = False) -> float:
        """How long a wait that begins now may take.

        `returning`: the wait is for sums that come back from other nodes, which takes longer.
        `first`: the wait belongs to the first round, although a later round may have been opened.
        """
        is_first = first or self.opened() <= 1
        timeout_s = self.first_s if is_first else self.later_s
        if returning:
            return timeout_s + RETURN_S
        return timeout_s
