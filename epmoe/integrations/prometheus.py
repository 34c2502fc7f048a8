"""Exports the health of `ExpertParallel` objects as metrics for Prometheus. A scrape reads the
counters and does not stop the GPU's stream.

    from prometheus_client import REGISTRY, start_http_server
    from epmoe.integrations.prometheus import HealthCollector

    REGISTRY.register(HealthCollector(ep))
    start_http_server(9400 + ep.rank)

Each rank is a process, so each rank exports its own counts. This module needs the extra
`prometheus`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from epmoe.exchange.health import COUNTERS
from epmoe.group.errors import EPStateError
from epmoe.service import ExpertParallel

_Exchanges = ExpertParallel | Mapping[str, ExpertParallel]
# What Prometheus shows for each counter of `Health`.
_TEXTS = {
    "sanitised_rows": "Rows of logits in which route found NaN or Inf",
    "padded_rows": "Padded rows that route was given",
    "out_of_range_ids": "Expert ids out of range that dispatch was given",
    "duplicate_ids": "Expert ids that a token names again",
    "nonfinite_weights": "Weights of NaN or Inf that dispatch was given",
    "dropped_pairs": "Pairs that found no room in capacity.max_expert_rows",
    "clamped_num_tokens": "Calls whose num_tokens was out of range",
    "timeouts": "Waits that failed; the first failure is the last",
}


class HealthCollector(Collector):
    """Exports `ExpertParallel.health` at each scrape: register it once, in a `prometheus_client`
    registry.

    Every metric has the labels `exchange` and `rank`, this rank in its group:

    - `epmoe_rounds_total`, and `epmoe_NAME_total` for each counter NAME of `Health`
    - `epmoe_rows_sent_total` with `to`, the rank that they were sent to
    - `epmoe_tokens_per_expert_total` with `expert`, the physical expert of this rank
    - `epmoe_wait_seconds_total` with `source`, the rank that was waited for
    - `epmoe_aborted_rounds_total` with `source`, the rank that aborted the rounds
    - with `placement.live`, `epmoe_moved_experts_total`, `epmoe_moved_bytes_total`,
      `epmoe_stalled_moves_total`, `epmoe_stalled_plans_total` and `epmoe_refused_plans_total`, and
      `epmoe_layer_rows_total` with `layer`, the tag of a layer: rows of this rank's experts

    Args:
        exchanges: one `ExpertParallel`, which the label `exchange` calls "default"; or several by
            their names; or a function that returns either of these at each scrape. A closed
            `ExpertParallel` exports nothing.
    """

    def __init__(self, exchanges: _Exchanges | Callable[[], _Exchanges]) -> None:
        self._exchanges = exchanges

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Make the metrics of one scrape. The registry calls this, on any thread."""
        # Metrics with one value for each exchange and rank.
        rounds = _counter("rounds", "Rounds of this rank")
        counters = {name: _counter(name, _TEXTS[name]) for name in COUNTERS}
        # Metrics with one value for each other rank, expert or layer.
        sent = _counter("rows_sent", "Rows sent to each rank", "to")
        tokens = _counter("tokens_per_expert", "Rows of each local expert", "expert")
        waited = _counter(
            "wait_seconds", "Seconds that this rank has waited for each rank", "source"
        )
        aborted = _counter("aborted_rounds", "Rounds that each rank has aborted", "source")
        layers = _counter("layer_rows", "Rows of this rank's experts in each layer", "layer")
        # Metrics of experts that move.
        moved = _counter("moved_experts", "Experts that have moved to this rank")
        moved_bytes = _counter("moved_bytes", "Bytes of weights that have moved to this rank")
        stalled = _counter(
            "stalled_moves", "Times that a move of this rank got no further within the deadline"
        )
        waiting = _counter(
            "stalled_plans", "Times that a rank has sent no loads for a plan within the deadline"
        )
        refused = _counter("refused_plans", "Plans of moves that ranks have refused")

        for name, ep in self._found().items():
            try:
                health = ep.health(wait=False)
                labels = [name, str(ep.rank)]
            except EPStateError:  # it is closed
                continue
            # Add the totals of this rank.
            rounds.add_metric(labels, health.rounds)
            for counter, family in counters.items():
                family.add_metric(labels, getattr(health, counter))
            # Add what only experts that move have. Tags of layers begin with 1.
            rows_by_layer = dict[int, int]()
            if ep.live.can_move:
                rows_by_layer = dict(enumerate(health.rows_by_layer, 1))
                moved.add_metric(labels, ep.live.moved)
                moved_bytes.add_metric(labels, ep.live.moved_bytes)
                stalled.add_metric(labels, ep.live.stalls)
                waiting.add_metric(labels, ep.live.stalled_plans)
                refused.add_metric(labels, health.refused_plans)
            # Add a value for each rank, expert and layer.
            ranks = range(ep.size)
            experts = ep.placement.local_experts(ep.rank)
            _add_each(sent, labels, ranks, health.rows_sent)
            _add_each(tokens, labels, experts, health.tokens_per_expert)
            _add_each(waited, labels, ranks, health.waited_s)
            _add_each(aborted, labels, ranks, health.aborted_rounds)
            _add_each(layers, labels, rows_by_layer, rows_by_layer.values())
        yield from (rounds, *counters.values(), sent, tokens, waited, aborted, layers)
        yield from (moved, moved_bytes, stalled, waiting, refused)

    def _found(self) -> Mapping[str, ExpertParallel]:
        """The exchanges of this scrape, by their names."""
        found = self._exchanges() if callable(self._exchanges) else self._exchanges
        if isinstance(found, ExpertParallel):
            return {"default": found}
        return found


def _add_each(
    family: CounterMetricFamily,
    labels: list[str],
    names: Iterable[int],
    values: Iterable[float],
) -> None:
    """Add the values to a metric. `labels` are the labels that all values share; the name of a
    value is its last label.
    """
    for name, value in zip(names, values, strict=True):
        family.add_metric([*labels, str(name)], value)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"epmoe_{name}", text, labels=["exchange", "rank", *labels])
