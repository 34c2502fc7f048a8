"""What the plugin for vLLM does without a model: the choice, the sizes, the watch."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from vllm_kernels import step

from epmoe.config.config_file import ConfigError
from epmoe.exchange.health import EPTimeoutError
from epmoe.integrations.vllm import sizes
from epmoe.integrations.vllm.choice import Choice


@pytest.mark.parametrize("value", [None, False, "", "0"])
def test_not_chosen(value: object) -> None:
    assert Choice.of(value) is None


@pytest.mark.parametrize(
    ("value", "layout", "exchange"),
    [(True, "rank", {}), ("1", "rank", {}), ("expert", "expert", {}), ({"timeout_s": 5}, "rank", {"timeout_s": 5})],
)
def test_chosen(value: object, layout: str, exchange: dict[str, object]) -> None:
    assert Choice.of(value) == Choice(layout, exchange)


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(ConfigError, match="`epmoe.layout` must be 'rank', 'expert' or 'layer', got 'batched'"):
        Choice.of({"layout": "batched"})


def test_a_step_takes_the_smallest_size_that_holds_it() -> None:
    shape = sizes.Shape(4, 2, 4096, torch.float32, 100, "linear", "auto", "rank")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = sizes.Sizes.make(shape, dist.group.WORLD, torch.device("cpu"), {"timeout_s": 9.0})
        assert made.tokens == [1, 2, 4, 7, 13, 25, 50, 100]
        for longest, expected in ((0, 1), (1, 1), (3, 4), (14, 25), (50, 50), (51, 100), (100, 100)):
            with step([longest, 0]):
                config = made.of_step().config
                assert config.capacity.max_num_tokens_per_rank == expected
        assert config.exchange.timeout_s == 9 and config.exchange.warmup_timeout_s == sizes.TIMEOUT_S
        assert made.of_step() is made.exchanges[-1], "outside of a step: the largest"
        assert made.window_bytes() < 2.2 * made.exchanges[-1].memory_plan().window_bytes
    finally:
        made.close()
        dist.destroy_process_group()


def test_a_failure_on_the_device_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise EPTimeoutError("dispatch", 3, [1], [1], "timed out")

    polls = iter([lambda: None, lambda: None, fail])
    killed = []
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    sizes.watch(SimpleNamespace(poll=lambda: next(polls)()), interval_s=0)
    assert killed == [(os.getpid(), signal.SIGTERM)]
