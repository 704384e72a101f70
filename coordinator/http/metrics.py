"""`/metrics`: what the coordinator counts, in Prometheus' text format, with vLLM's suffixes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.coordinator import Coordinator


class RequestCollector(Collector):
    """Reads the dispatcher when it is asked, so that serving pays nothing for it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterator[Metric]:
        """The requests of this coordinator, by state."""
        dispatcher, labels = self._coordinator.dispatcher, ["model_name"]
        values = (
            (GaugeMetricFamily, "num_requests_running", "Requests that generate.", dispatcher.running),
            (GaugeMetricFamily, "num_requests_waiting", "Requests that wait.", dispatcher.waiting),
            (CounterMetricFamily, "request_success", "Requests that ended whole.", dispatcher.finished),
            (CounterMetricFamily, "request_failure", "Requests that failed.", dispatcher.failed),
        )
        name = self._coordinator.model_name if self._coordinator.serving else ""
        for family, suffix, text, value in values:
            metric = family(f"paceline:{suffix}", text, labels=labels)
            metric.add_metric([name], value)
            yield metric


def make_registry(coordinator: Coordinator) -> CollectorRegistry:
    """A registry of its own, to which others may add their collectors."""
    registry = CollectorRegistry()
    registry.register(RequestCollector(coordinator))
    return registry
