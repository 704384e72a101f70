"""Measurements by hand, without models."""

from __future__ import annotations

import pytest

from paceline.bench.machine import Machine, MeasuredModel
from paceline.measure.config import MeasureConfig
from paceline.measure.figures import DrafterCost, measured_rows
from paceline.measure.measuring import Observations, Positions, StepTimes
from paceline.measure.record import MeasureRecord


def constant(kind: str, rate: float, length: int) -> Positions:
    """A text whose positions are all alike; in coupled mode the rate is less by a tenth."""
    row, coupled = [rate] * length, [rate * 0.9] * length
    return Positions(kind, row, coupled, row, row, row, row, coupled, [1.0] * length)


@pytest.fixture
def record() -> MeasureRecord:
    """A draft of alpha 0.8 on code and 0.4 on prose, c = 0.1, at one temperature."""
    times = StepTimes(target=[0.01, 0.02, 0.01], drafter=[0.001, 0.002, 0.002])
    texts = [constant("code", 0.8, 400), constant("prose", 0.4, 400)]
    found = Observations({("org/draft", 0.0): texts}, {"org/draft": times})
    costs = {"org/draft": DrafterCost.of(times, c_hat=0.15, m=0.2)}
    model = MeasuredModel("m", "cpu", "a processor", "float32", 10, 40)
    return MeasureRecord(
        config=MeasureConfig(draft_models=("org/draft",), temperature=(0.0,)),
        machine=Machine("a processor", 2, None, "3.11", {}),
        target=model,
        drafts=(model,),
        target_step_seconds=0.01,
        costs=costs,
        rows=tuple(measured_rows(found, costs, ["code", "prose"], max_k=16)),
        seconds=1.0,
    )
