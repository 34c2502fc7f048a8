"""The parts of SGLang that a death sets off, with two scheduler processes: `python sglang_deaths.py
CASE STORE`.

SGLang's own are `run_scheduler_process` around the scheduler, `MLPSyncBatchInfo.all_gather`, by
which ranks of data parallel attention agree before each step, and in the server
`SubprocessWatchdog`, the handler of SIGQUIT and `kill_process_tree`. The scheduler, which needs a
GPU, does nothing but agree here.

CASE is
    dies      rank 1 is killed
    unseen    the same, while rank 0 is in no collective
    raises    rank 1 raises EPTimeoutError in a step
    hooked    rank 1 is killed, and hooks such as those of a plugin answer what ends the others
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

for absent in ("setproctitle", "uvloop"):  # which the layers of SGLang do not need
    sys.modules.setdefault(absent, MagicMock())
asyncio.set_event_loop_policy = lambda _: None  # to uvloop's

import sglang_host  # noqa: E402, F401 - imports SGLang without what it has for GPUs
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from sglang.srt.managers import scheduler as schedulers  # noqa: E402
from sglang.srt.managers.scheduler_components import dp_attn  # noqa: E402
from sglang.srt.managers.tokenizer_manager import SignalHandler  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402
from sglang.srt.utils.watchdog import SubprocessWatchdog  # noqa: E402

from epmoe import EPTimeoutError  # noqa: E402

WATCHDOG = "sglang.srt.utils.watchdog.SubprocessWatchdog.start"
AGREEMENT = "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo.all_gather"
STEP_S = 0.05
BEFORE_S = 2
AFTER_S = 4


class Scheduler:
    """In place of SGLang's, with what `run_scheduler_process` asks of it."""

    def __init__(self, case: str, ports: Any) -> None:
        self.case = case
        self.rank = ports.rank
        self.store = ports.store
        self.metrics_reporter = MagicMock()
        self.async_d2h_worker = None
        self.gracefully_exit = False
        dp_attn.get_parallel = lambda: SimpleNamespace(
            tp_group=SimpleNamespace(active_ranks_cpu=torch.ones(2))
        )

    def get_init_info(self) -> dict[str, Any]:
        return {"status": "ready"}

    def run_event_loop(self) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{self.store}", rank=self.rank, world_size=2
        )
        for step in range(10**9):
            if self.case == "raises" and self.rank == 1 and step == BEFORE_S / STEP_S:
                raise EPTimeoutError("dispatch", step, [0], [0], "timed out")
            if self.case != "unseen":
                dp_attn.MLPSyncBatchInfo(
                    2, 1, 1, 1, 1, True, True, True, False, False, 0
                ).all_gather(device="cpu", group=dist.group.WORLD)
            time.sleep(STEP_S)


def alone(original: Any, agreement: Any, *arguments: Any, **named: Any) -> None:
    """A hook: the agreement of a rank with itself, where the other one has died."""
    try:
        original(agreement, *arguments, **named)
    except RuntimeError:
        agreement.finalize_local()


def main(case: str, store: str) -> None:
    if case == "hooked":
        HookRegistry.register(WATCHDOG, lambda _: None, HookType.REPLACE)
        HookRegistry.register(AGREEMENT, alone, HookType.AROUND)
        HookRegistry.apply_hooks()
    # Two schedulers of SGLang, each in a process of its own.
    schedulers.Scheduler = lambda _, ports: Scheduler(case, ports)
    settings = get_context().override_server_args(device="cpu", tp_size=1).install()
    fork = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(2):
        reader, writer = fork.Pipe(False)
        arguments = settings, SimpleNamespace(rank=rank, store=store), 0, 0, 0, None, writer
        ranks.append(
            fork.Process(target=schedulers.run_scheduler_process, args=arguments, daemon=True)
        )
        ranks[-1].start()
        assert reader.recv()["status"] == "ready"
    # What SGLang's server does where one of them ends.
    watchdog = SubprocessWatchdog(ranks, ["scheduler_0", "scheduler_1"])
    watchdog.start()
    server = SimpleNamespace(_subprocess_watchdog=watchdog, dump_requests_before_crash=lambda: None)
    signal.signal(signal.SIGQUIT, SignalHandler(server).running_phase_sigquit_handler)
    # One of them raises, or is killed.
    print("pids", os.getpid(), *(rank.pid for rank in ranks), flush=True)
    time.sleep(BEFORE_S)
    if case != "raises":
        os.kill(ranks[1].pid, signal.SIGKILL)
    deadline = time.monotonic() + AFTER_S  # a signal may end a sleep
    while time.monotonic() < deadline:
        time.sleep(STEP_S)
    print(
        "the server is alive, the survivor", "is" if ranks[0].is_alive() else "is not", flush=True
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
