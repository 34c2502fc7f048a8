"""The groups that a rank has left.

A CUDA graph that was captured in such a group may still be replayed. Its kernels then do nothing
and report the number of their group, from which the host makes an error that says what has changed.
"""

from __future__ import annotations

from typing import NoReturn

from epmoe.group.errors import EPStateError

# The sizes of a memory plan on which CUDA graphs rest, and what users call them.
_NAMES_OF_SIZES = {
    "R": "ranks or seats (R)",
    "rank": "the number of this rank or its seat",
    "M": "most tokens of a rank (M)",
    "K": "experts per token (K)",
    "D": "hidden size (D)",
    "num_local_experts": "experts of this rank",
    "most_local_experts": "most experts of a rank",
    "max_rows": "expert-major rows (N)",
    "copies": "most copies",
    "alignment": "alignment",
    "payload_format": "payload",
    "combine_format": "combine payload",
}


class LeftGroups:
    """The groups that one `ExpertParallel` has left, by number."""

    def __init__(self) -> None:
        # The sizes of each group's memory plan.
        self._sizes = list[dict[str, int]]()

    def add(self, sizes: dict[str, int]) -> int:
        """Note a group that the rank is about to leave, by the sizes of its memory plan. Returns
        the number of the group.
        """
        self._sizes.append(sizes)
        return len(self._sizes) - 1

    def refuse_replay(self, number: int, now: dict[str, int]) -> NoReturn:
        """Raise EPStateError for a replay of a graph that was captured in the group of this number.

        `now` are the sizes of the present group's plan. The error lists those that differ.
        """
        was = self._sizes[number]
        others = []
        for name, what in _NAMES_OF_SIZES.items():
            if was[name] != now[name]:
                others.append(f"{what} {was[name]}, not {now[name]}")
        difference = ", ".join(others) or "other windows"
        raise EPStateError(
            "a replay did nothing: its CUDA graph was captured in an earlier group, with "
            f"{difference}; capture it again, or ask "
            "`ep.capture_is_valid(generation)` before a replay"
        )
