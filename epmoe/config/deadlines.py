"""Deadlines of failures over several nodes, whose order matters.

The rank next to a fault must report first, since it knows who is missing. The others then report the same ranks:

    timeout_s                a transfer to other nodes: its rank finds the fault
    + ANSWER_S               the ranks of its rail have reported what they know
    + INSIDE_NODE_S          waits inside a node, whose other ranks have the report by then
    + RETURN_S               the way back to the sources, which waits for ranks in such waits
    + NETWORK_SLACK_S        the network's own deadline, whose error would have no names
"""

from __future__ import annotations

from dataclasses import dataclass

ANSWER_S = 0.4
INSIDE_NODE_S = 0.8
RETURN_S = 1.1
NETWORK_SLACK_S = 2.0
LAST_CALL_S = 5.0  # after timeout_s, every rank that lives has raised and calls `recover`
OPENING_ANSWER_S = 1.0  # like ANSWER_S, where a group did not open and processes may still start


@dataclass
class Deadlines:
    """How long a transfer may take, in seconds. The rails of an exchange share it with the exchange."""

    first_s: float  # in the first round, in which ranks may still load or compile
    later_s: float
    first: bool = True  # the host is in the first round

    def of(self, returning: bool, first: bool = False) -> float:
        """Seconds for a transfer of tokens, or of `returning` sums. `first`: the first round is still under way."""
        return (self.first_s if first or self.first else self.later_s) + RETURN_S * returning
