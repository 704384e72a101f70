"""The description of the machine."""

from __future__ import annotations

import json
import math

import pytest

from paceline.bench.machine import Machine
from paceline.client.results import to_plain


@pytest.mark.parametrize(
    ("quota", "told", "says"),
    [
        (math.inf, None, "4 cores"),
        (1.5, 1.5, "4 cores (CPU quota 1.5)"),
        (4.0, 4.0, "4 cores"),
        (16.0, 16.0, "4 cores"),
    ],
)
def test_a_containers_quota_is_shown_beside_the_cores(
    monkeypatch: pytest.MonkeyPatch, quota: float, told: float | None, says: str
) -> None:
    monkeypatch.setattr("paceline.bench.machine.usable_cores", lambda: (0, 1, 2, 3))
    monkeypatch.setattr("paceline.bench.machine.core_quota", lambda: quota)
    machine = Machine.here()
    assert (machine.cores, machine.core_quota) == (4, told)
    assert machine.cores_in_words == says
    assert json.loads(json.dumps(to_plain(machine), allow_nan=False))["core_quota"] == told
