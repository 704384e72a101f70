"""Seconds of a round by K and load, from few measurements."""

from __future__ import annotations

import pytest

from coordinator.speculation.cost_model import (
    COST_MEMORY,
    LEAST_SHARE,
    OUTLIER,
    PRIOR_OVERHEAD,
    CostModel,
    Mean,
    RoundCosts,
    bracket,
)

MOST = 8


def measured(costs: RoundCosts, seconds: dict[int, float], times: int = 200) -> RoundCosts:
    for _ in range(times):
        for k, taken in seconds.items():
            costs.add(k, taken, 1)
    return costs


def test_load_brackets_double() -> None:
    assert [bracket(n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17)] == [0, 0, 1, 2, 2, 3, 3, 4, 4, 5]


def test_a_mean_forgets_old_measurements() -> None:
    mean = Mean()
    for _ in range(1000):
        mean.add(1.0, COST_MEMORY)
    for _ in range(round(3 * COST_MEMORY)):
        mean.add(2.0, COST_MEMORY)
    assert mean.value == pytest.approx(2.0, abs=0.06)


def test_an_outlier_is_clipped() -> None:
    mean = Mean()
    for _ in range(10):
        mean.add(1.0, COST_MEMORY)
    mean.add(1000.0, COST_MEMORY)
    assert mean.value == pytest.approx((10 + OUTLIER) / 11)


def test_without_measurements_there_are_no_costs() -> None:
    assert RoundCosts().seconds(MOST) is None
    assert CostModel(MOST).round_seconds(3) is None


def test_with_plain_rounds_only_the_prior_overhead_applies() -> None:
    seconds = measured(RoundCosts(), {0: 0.01}).seconds(MOST)
    assert seconds == pytest.approx([0.01 * (1 + PRIOR_OVERHEAD * k) for k in range(MOST + 1)])


def test_two_measured_ks_give_a_line_for_the_others() -> None:
    seconds = measured(RoundCosts(), {0: 0.01, 2: 0.014, 6: 0.022}).seconds(MOST)
    assert seconds[0] == pytest.approx(0.01)
    assert seconds[4] == pytest.approx(0.018, rel=0.02)
    assert seconds[8] == pytest.approx(0.026, rel=0.05)


def test_more_draft_tokens_never_take_less_time() -> None:
    seconds = measured(RoundCosts(), {0: 0.01, 2: 0.03, 3: 0.01, 6: 0.02}).seconds(MOST)
    assert seconds[1:] == sorted(seconds[1:])
    assert min(seconds) > 0


def test_an_unmeasured_plain_round_is_not_free() -> None:
    seconds = measured(RoundCosts(), {2: 0.01, 6: 0.05}).seconds(MOST)
    assert seconds[0] >= LEAST_SHARE * 0.03


def test_an_unmeasured_load_takes_the_nearest_loads_shape() -> None:
    model = CostModel(MOST)
    for _ in range(200):
        for k in (0, 2, 4):
            model.add(k, 0.002 * k, 0.01 + 0.001 * k, 4)
        model.add(0, 0.0, 0.05, 16)
    near, far = model.round_seconds(bracket(4)), model.round_seconds(bracket(16))
    assert far is not None
    assert far == pytest.approx([0.05 * s / near[0] for s in near])
    assert model.round_seconds(bracket(64)) == pytest.approx(far)


def test_verification_excludes_the_wait_for_the_proposal() -> None:
    model = CostModel(MOST)
    for _ in range(200):
        for k in (0, 2, 4):
            model.add(k, 0.1 * k, 0.01 + 0.001 * k, 1)
    seconds = model.verify_seconds(0)
    assert seconds[4] == pytest.approx(0.014, rel=0.02)
