"""The `device` fixture: a test runs on the CPU and on CUDA. CUDA cases have the mark `gpu` and a
skip reason.

At the end, a line for each reason says how many tests it skipped.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tried
from helpers import NO_CUDA

torch.set_num_threads(1)
# With Python's own 700 a tenth of the time of the tests goes into looking for garbage.
gc.set_threshold(20_000)
# A shell that starts the tests in the background has SIGINT ignored, and Python then leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws without a generator of its own depends on no other test."""
    torch.manual_seed(0)


@pytest.fixture
def host(tmp_path: Path, device: torch.device) -> Iterator[Any]:
    """A `Host` without a process yet."""
    from host import Host

    with Host(tmp_path, device) as host:
        yield host


@pytest.fixture
def serving() -> Iterator[None]:
    """Calls without gradients, as servers make them: layers have gradients in grad mode."""
    with torch.no_grad():
        yield


@pytest.fixture
def forget_graphs() -> Iterator[None]:
    """What torch.compile has compiled and counted so far, for tests of compiled code, which run
    without grad.
    """
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    with torch.no_grad():
        yield


@pytest.fixture
def default_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The integration in transformers as it is imported. Afterwards its windows are closed."""
    from epmoe.integrations import transformers as integration

    monkeypatch.setattr(integration.settings, "_settings", integration.settings.Settings())
    yield
    integration.close()


def pytest_collection_finish() -> None:
    # What has been imported stays: no search for garbage walks through it again.
    gc.freeze()


def pytest_sessionfinish(exitstatus: int) -> None:
    if exitstatus == 0 and "EPMOE_TRIED" in os.environ and os.environ.get("RANK", "0") == "0":
        tried.record(os.environ["EPMOE_TRIED"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Most are cases of CUDA.
    reasons = Counter(report.longrepr[2] for report in terminalreporter.getreports("skipped"))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
