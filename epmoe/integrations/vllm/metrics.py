"""The counts of this rank for Prometheus, at a port of its own: vLLM's own port belongs to another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

from prometheus_client import Metric, start_http_server
from prometheus_client.registry import REGISTRY, Collector

from epmoe.integrations.prometheus import HealthCollector
from epmoe.service import ExpertParallel


class _Collector(Collector):
    def __init__(self, exchanges: Callable[[], Mapping[str, ExpertParallel]]) -> None:
        self._exchanges = exchanges

    def collect(self) -> Iterator[Metric]:
        """The metrics of all exchanges that are open, which layers with other shapes may still make."""
        return HealthCollector(self._exchanges()).collect()


@cache
def serve_metrics(exchanges: Callable[[], Mapping[str, ExpertParallel]], port: int) -> None:
    """Serve the metrics of `exchanges`, by their names, at this port. Further calls with the same port do nothing."""
    REGISTRY.register(_Collector(exchanges))
    start_http_server(port)
