"""vLLM's sleep mode, in which the windows of epmoe sleep, too. `layer.py` names this backend to vLLM."""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from epmoe.integrations.vllm.sizes import named_exchanges


class SleepWithWindows(CuMemBackend):
    """vLLM's own backend for its weights and its cache, and `ExpertParallel.sleep` and `wake` for the windows.

    Every rank sleeps and wakes up. At level 2 the weights are loaded again afterwards.
    """

    _asleep = False

    def suspend(self, level: int = 1) -> None:
        super().suspend(level)
        if not self._asleep:
            for ep in named_exchanges().values():
                ep.sleep()
        self._asleep = True

    def resume(self, tags: list[str] | None = None) -> None:
        """The windows come back right after the memory of the weights, which is collective: a load ends moves first."""
        super().resume(tags)
        if self._asleep and (tags is None or "weights" in tags):
            for ep in named_exchanges().values():
                ep.wake()
            self._asleep = False
