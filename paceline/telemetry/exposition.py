"""Prometheus metric families from plain numbers, with the prefix `paceline:`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from paceline.telemetry.histogram import Histogram

PREFIX = "paceline:"


def encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """The serialiser of a registry for an `accept` header, and its content type.

    OpenMetrics if requested; else, also for an invalid header, Prometheus' text format. Names are never
    escaped: all are valid in every scheme, and the library's escaping for OpenMetrics would remove the colon
    from sample names.
    """
    try:
        _, content_type = choose_encoder(accept)
    except (TypeError, ValueError):
        content_type = CONTENT_TYPE_PLAIN_0_0_4
    if content_type.startswith("application/openmetrics-text"):
        return partial(openmetrics.generate_latest, escaping=ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest, CONTENT_TYPE_PLAIN_0_0_4


class Families:
    """Builds families whose samples share common labels."""

    def __init__(self, common: Mapping[str, str]) -> None:
        self._names = list(common)
        self._values = list(common.values())

    def gauge(
        self,
        name: str,
        text: str,
        values: Iterable[tuple[Sequence[str], float]],
        labels: Sequence[str] = (),
    ) -> GaugeMetricFamily:
        """One sample for each pair of label values and number."""
        family = GaugeMetricFamily(PREFIX + name, text, labels=[*self._names, *labels])
        for of_labels, value in values:
            family.add_metric([*self._values, *of_labels], value)
        return family

    def certificate_expiry(self, days_left: Mapping[str, float]) -> GaugeMetricFamily:
        """Remaining days of a process's certificates, by setting."""
        return self.gauge(
            "certificate_expiry_days",
            "Days until a certificate file expires; negative after expiry.",
            [([setting], days) for setting, days in sorted(days_left.items())],
            ["setting"],
        )

    def counter(
        self,
        name: str,
        text: str,
        values: Iterable[tuple[Sequence[str], float]],
        labels: Sequence[str] = (),
    ) -> CounterMetricFamily:
        """As `gauge`; the sample's name gets the suffix `_total`."""
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self._names, *labels])
        for of_labels, value in values:
            family.add_metric([*self._values, *of_labels], value)
        return family

    def histogram(
        self,
        name: str,
        text: str,
        values: Iterable[tuple[Sequence[str], Histogram]],
        labels: Sequence[str] = (),
    ) -> HistogramMetricFamily:
        """One histogram for each set of label values."""
        family = HistogramMetricFamily(PREFIX + name, text, labels=[*self._names, *labels])
        for of_labels, histogram in values:
            cumulative = list(itertools.accumulate(histogram.counts))
            bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, cumulative, strict=True))
            family.add_metric([*self._values, *of_labels], buckets, histogram.sum)
        return family
