"""vLLM's sleep mode, in which the windows of epmoe sleep, too. `layer.py` names this backend to
vLLM.
"""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from epmoe.integrations.vllm.sizes import named_exchanges


class SleepWithWindows(CuMemBackend):
    """Sleeps by vLLM's own backend for its weights and its cache, and by `ExpertParallel.sleep` and
    `wake` for the windows.

    Every rank sleeps and wakes up. At level 2 the weights are loaded again afterwards. A call that
    has raised on any rank is repeated on all, and finds the other windows as it wants them.
    """

    def suspend(self, level: int = 1) -> None:
        """The windows go first: where they cannot, this rank keeps its weights."""
        for ep in named_exchanges().values():
            if not ep.asleep:
                ep.sleep()
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        """The windows come back right after the memory of the weights, which is collective: a load
        ends moves first.
        """
        super().resume(tags)
        if tags is None or "weights" in tags:
            for ep in named_exchanges().values():
                if ep.asleep:
                    ep.wake()
