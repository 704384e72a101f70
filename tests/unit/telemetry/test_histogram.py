"""Our histogram against prometheus_client's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Theirs
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from paceline.telemetry import histogram
from paceline.telemetry.exposition import Families
from paceline.telemetry.histogram import Histogram

BOUNDS = (0.1, 1.0, 2.5, 10.0)
VALUES = st.one_of(st.floats(0, 20), st.sampled_from(BOUNDS))


@given(st.lists(st.tuples(VALUES, st.integers(0, 3)), max_size=30))
def test_a_histogram_counts_like_prometheus(values: list[tuple[float, int]]) -> None:
    ours, theirs = Histogram(BOUNDS), Theirs("x", "x", buckets=BOUNDS, registry=None)
    for value, times in values:
        ours.observe_each(value, times)
        for _ in range(times):
            theirs.observe(value)
        ours.observe(value)
        theirs.observe(value)
    family = Families({}).histogram("x", "x", [((), ours)])
    expected = {
        (s.name, s.labels.get("le")): s.value
        for s in next(iter(theirs.collect())).samples
        if "created" not in s.name
    }
    told = {(s.name.removeprefix("paceline:"), s.labels.get("le")): s.value for s in family.samples}
    assert told.keys() == expected.keys()
    for key, value in expected.items():
        assert told[key] == pytest.approx(value)


BOUNDED = [name for name in vars(histogram) if name.isupper() and isinstance(getattr(histogram, name), tuple)]


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_increase(name: str) -> None:
    bounds = getattr(histogram, name)
    assert len(BOUNDED) >= 6
    assert list(bounds) == sorted(set(bounds))


def test_common_labels_come_first() -> None:
    class One(Collector):
        def collect(self) -> list[Metric]:
            make = Families({"model_name": "m"})
            return [make.counter("c", "text", [(["a"], 3)], ["kind"]), make.gauge("g", "text", [((), 2)])]

    registry = CollectorRegistry()
    registry.register(One())
    assert registry.get_sample_value("paceline:c_total", {"model_name": "m", "kind": "a"}) == 3
    assert registry.get_sample_value("paceline:g", {"model_name": "m"}) == 2
