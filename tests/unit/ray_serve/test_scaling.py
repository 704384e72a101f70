"""How many replicas a load and a cache want."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.ray.scaling import CACHE_USE, LOAD, replicas_for_load


def context(loads: list[float], uses: list[float], target: float = 4.0) -> Any:
    """Serve's, of a deployment of two replicas that may have one to five."""
    named = {LOAD: loads, CACHE_USE: uses}
    return SimpleNamespace(
        aggregated_metrics={name: dict(enumerate(values)) for name, values in named.items() if values},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: target),
        target_num_replicas=2,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=5,
    )


@pytest.mark.parametrize(
    ("loads", "uses", "wanted"),
    [
        ([], [], 2),
        ([0, 0], [0, 0], 1),
        ([4, 4], [0.5, 0.5], 2),
        ([5, 4], [0.1, 0.1], 3),
        ([1, 1], [0.9, 0.9], 3),
        ([12, 0], [], 3),
        ([100, 100], [1.0, 1.0], 5),
    ],
)
def test_the_greater_want_counts(loads: list[float], uses: list[float], wanted: int) -> None:
    assert replicas_for_load(context(loads, uses)) == (wanted, {})


def test_no_metrics_change_nothing() -> None:
    nothing = context([], [])
    nothing.aggregated_metrics = None
    assert replicas_for_load(nothing) == (2, {})
