"""Tags: the numbers by which all ranks name a layer.

By the tag a round checks that all ranks are in the same layer.
"""

from __future__ import annotations

import weakref

from epmoe.native.layouts import constant


class LayerTags:
    """The tags that layers of one `ExpertParallel` have taken: see `ExpertParallel.new_tag`."""

    def __init__(self) -> None:
        # The layer that has each tag. None in place of a layer: the tag is never free again.
        self._owners: dict[int, weakref.ref[object] | None] = {}
        # The last tag that was chosen here. It begins at 0, the tag of rounds that name no layer.
        self._last = 0

    def new(self, tag: int | None, owner: object) -> int:
        """Take `tag`, or the next free tag for None, for the layer `owner`. Returns the tag.

        A later layer may ask for the same tag once the owner is gone. With None as the owner, the
        tag is taken for good. Raises ValueError if another layer has the tag, or if no tag is left.
        """
        if tag is None:
            tag = self.next
            self._last = tag
        elif self._is_taken(tag):
            raise ValueError(
                f"tag {tag} must belong to one layer, but another one of this ExpertParallel has "
                f"it: the tag is `layer_id` modulo {constant('kMaxTag') + 1}, or by default the "
                f"next number that is free"
            )
        self._owners[tag] = None if owner is None else weakref.ref(owner)
        return tag

    @property
    def next(self) -> int:
        """The tag that a layer without a number of its own would get now."""
        tag = self._last + 1
        while tag in self._owners:
            tag += 1
        most = constant("kMaxTag")
        if tag > most:
            raise ValueError(f"an ExpertParallel has tags for {most} layers, and all were taken")
        return tag

    def _is_taken(self, tag: int) -> bool:
        """Whether a layer has this tag, and is still there or has taken it for good."""
        if tag not in self._owners:
            return False
        owner = self._owners[tag]
        return owner is None or owner() is not None
