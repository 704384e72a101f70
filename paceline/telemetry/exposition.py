"""Plain numbers as Prometheus' metric families, under the prefix `paceline:`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from paceline.telemetry.histogram import Histogram

PREFIX = "paceline:"


class Families:
    """Makes families whose samples share some labels."""

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
        """One sample for each (values of `labels`, number)."""
        family = GaugeMetricFamily(PREFIX + name, text, labels=[*self._names, *labels])
        for of_labels, value in values:
            family.add_metric([*self._values, *of_labels], value)
        return family

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
