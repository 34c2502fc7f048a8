"""The metrics for Prometheus, as a scrape reads them from a real registry."""

from __future__ import annotations

import pytest
import torch
from helpers import alone
from test_rounds import IDS, WEIGHTS, X, make_ep

import epmoe

prometheus_client = pytest.importorskip("prometheus_client")

from epmoe.exchange.health import COUNTERS  # noqa: E402
from epmoe.integrations.prometheus import HealthCollector  # noqa: E402


def registry(exchanges: object) -> prometheus_client.CollectorRegistry:
    made = prometheus_client.CollectorRegistry()
    made.register(HealthCollector(exchanges))
    return made


def play(ep: epmoe.ExpertParallel) -> None:
    ids = IDS.clone()
    ids[0] = torch.tensor([3, 99])
    d = ep.dispatch(X, ids, WEIGHTS)
    ep.combine(d.rows, d)


def test_every_count_is_exported():
    with make_ep() as ep:
        scraped = registry(ep)
        # Counts grow with each round.
        for rounds in (1, 2):
            play(ep)
            lines = prometheus_client.generate_latest(scraped).decode().splitlines()
            label = 'exchange="default",rank="0"'
            assert f"epmoe_rounds_total{{{label}}} {rounds}.0" in lines
            assert f"epmoe_out_of_range_ids_total{{{label}}} {rounds}.0" in lines
            assert f'epmoe_rows_sent_total{{{label},to="0"}} {4 * rounds}.0' in lines
            assert (
                f'epmoe_tokens_per_expert_total{{exchange="default",expert="3",rank="0"}} '
                f"{rounds}.0"
            ) in lines
            assert (
                f'epmoe_tokens_per_expert_total{{exchange="default",expert="0",rank="0"}} '
                f"{6 * rounds}.0"
            ) in lines
            assert f'epmoe_wait_seconds_total{{{label},source="0"}} 0.0' in lines
        # Each counter is there, also one that has counted nothing.
        for name in COUNTERS:
            assert f"# TYPE epmoe_{name}_total counter" in lines
            assert (
                scraped.get_sample_value(
                    f"epmoe_{name}_total", {"exchange": "default", "rank": "0"}
                )
                is not None
            )


@pytest.mark.parametrize("at_each_scrape", [False, True])
def test_several_exchanges_of_which_one_is_closed(at_each_scrape):
    with make_ep() as model, make_ep() as draft:
        both = {"model": model, "draft": draft}
        scraped = registry((lambda: both) if at_each_scrape else both)
        play(model)

        def rounds(name: str) -> float | None:
            return scraped.get_sample_value("epmoe_rounds_total", {"exchange": name, "rank": "0"})

        assert (rounds("model"), rounds("draft")) == (1.0, 0.0)
        draft.close()
        assert (rounds("model"), rounds("draft")) == (1.0, None)


def test_experts_that_move_are_exported_by_layer():
    live = {"live": True, "slots_per_rank": 8, "layers": 2, "staging_mb": 1}
    with epmoe.ExpertParallel(alone(placement=live)) as ep:
        d = ep.dispatch(X, IDS, WEIGHTS, tag=2)
        ep.combine(d.rows, d)
        scraped = registry(ep)
        labels = {"exchange": "default", "rank": "0"}
        rows = {
            tag: scraped.get_sample_value("epmoe_layer_rows_total", labels | {"layer": tag})
            for tag in "12"
        }
        assert rows == {"1": 0, "2": int(d.expert_offsets[-1])}
        for name in (
            "moved_experts",
            "moved_bytes",
            "stalled_moves",
            "stalled_plans",
            "refused_plans",
        ):
            assert scraped.get_sample_value(f"epmoe_{name}_total", labels) == 0
