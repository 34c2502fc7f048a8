"""The groups that a rank has left. CUDA graphs of them may still be replayed."""

from __future__ import annotations

from typing import NoReturn

from epmoe.group.errors import EPStateError

# Sizes of a plan on which CUDA graphs rest, in words of users.
_COUNTS = {
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
        # Sizes of the plan of each.
        self._sizes = list[dict[str, int]]()

    def add(self, sizes: dict[str, int]) -> int:
        """The number of a group whose plan has these sizes, which the rank is about to leave."""
        self._sizes.append(sizes)
        return len(self._sizes) - 1

    def refuse_replay(self, number: int, now: dict[str, int]) -> NoReturn:
        """Raise EPStateError for a replay of a graph of this group, in one of the sizes `now`."""
        was = self._sizes[number]
        others = []
        for name, what in _COUNTS.items():
            if was[name] != now[name]:
                others.append(f"{what} {was[name]}, not {now[name]}")
        difference = ", ".join(others) or "other windows"
        raise EPStateError(
            "a replay did nothing: its CUDA graph was captured in an earlier group, with "
            f"{difference}; capture it again, or ask "
            "`ep.capture_is_valid(generation)` before a replay"
        )
