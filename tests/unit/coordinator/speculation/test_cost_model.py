"""Seconds of a round by K and load, from few measurements."""

from __future__ import annotations

import pytest

from coordinator.speculation.arms import DraftArm, DraftArms
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
CHAINS = DraftArms(MOST)


def measured(costs: RoundCosts, seconds: dict[int, float], times: int = 200) -> RoundCosts:
    for _ in range(times):
        for k, taken in seconds.items():
            costs.add(DraftArm(k), taken, 1)
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
    assert CostModel(CHAINS).round_seconds(3) is None


def test_with_plain_rounds_only_the_prior_overhead_applies() -> None:
    seconds = measured(RoundCosts(), {0: 0.01}).seconds(CHAINS)
    assert seconds == pytest.approx([0.01 * (1 + PRIOR_OVERHEAD * k) for k in range(MOST + 1)])


def test_two_measured_ks_give_a_line_for_the_others() -> None:
    seconds = measured(RoundCosts(), {0: 0.01, 2: 0.014, 6: 0.022}).seconds(CHAINS)
    assert seconds[0] == pytest.approx(0.01)
    assert seconds[4] == pytest.approx(0.018, rel=0.02)
    assert seconds[8] == pytest.approx(0.026, rel=0.05)


def test_more_draft_tokens_never_take_less_time() -> None:
    seconds = measured(RoundCosts(), {0: 0.01, 2: 0.03, 3: 0.01, 6: 0.02}).seconds(CHAINS)
    assert seconds[1:] == sorted(seconds[1:])
    assert min(seconds) > 0


def test_an_unmeasured_plain_round_is_not_free() -> None:
    seconds = measured(RoundCosts(), {2: 0.01, 6: 0.05}).seconds(CHAINS)
    assert seconds[0] >= LEAST_SHARE * 0.03


def test_an_unmeasured_load_takes_the_nearest_loads_shape() -> None:
    model = CostModel(CHAINS)
    for _ in range(200):
        for k in (0, 2, 4):
            model.add(DraftArm(k), 0.002 * k, 0.01 + 0.001 * k, 4)
        model.add(DraftArm(0), 0.0, 0.05, 16)
    near, far = model.round_seconds(bracket(4)), model.round_seconds(bracket(16))
    assert far is not None
    assert far == pytest.approx([0.05 * s / near[0] for s in near])
    assert model.round_seconds(bracket(64)) == pytest.approx(far)


def test_verification_excludes_the_wait_for_the_proposal() -> None:
    model = CostModel(CHAINS)
    for _ in range(200):
        for k in (0, 2, 4):
            model.add(DraftArm(k), 0.1 * k, 0.01 + 0.001 * k, 1)
    seconds = model.verify_seconds(0)
    assert seconds[4] == pytest.approx(0.014, rel=0.02)


TREES = DraftArms(MOST, 32)


def row_costing(each: float, trees: tuple[DraftArm, ...] = ()) -> CostModel:
    """Measured chains and trees of a target whose rows cost `each` and a draft whose passes cost 1 ms."""
    model = CostModel(TREES)
    for _ in range(100):
        for arm in (DraftArm(0), DraftArm(2), DraftArm(4), *trees):
            model.add(arm, 0.001 * arm.depth, 0.01 + each * arm.rows, 1)
    return model


@pytest.mark.parametrize("each", [0.0, 0.001])
@pytest.mark.parametrize("trees", [(), (DraftArm(4, 16),)])
def test_a_verifications_rows_cost_the_same_in_any_shape(each: float, trees: tuple[DraftArm, ...]) -> None:
    """So chains say what trees cost: not exactly, since the largest chain has four tokens here."""
    seconds = row_costing(each, trees).round_seconds(0)
    for number in TREES.trees:
        depth, nodes = TREES.each[number]
        assert seconds[number] == pytest.approx(
            0.01 + 0.001 * depth + each * nodes, rel=0.1 if trees else 0.2
        )


def test_drafting_a_tree_may_cost_more_than_its_passes() -> None:
    model = row_costing(0.0)
    for _ in range(100):
        model.add(DraftArm(4, 16), 0.016, 0.01, 1)
    seconds = model.round_seconds(0)
    assert seconds[4] == pytest.approx(0.014, rel=0.02)
    assert seconds[TREES.nearest(DraftArm(4, 16))] == pytest.approx(0.026, rel=0.02)
    assert seconds[TREES.nearest(DraftArm(4, 32))] == pytest.approx(0.014 + 28 * 0.001, rel=0.05)


def test_chains_can_be_estimated_from_trees() -> None:
    model = CostModel(TREES)
    for _ in range(100):
        model.add(DraftArm(0), 0.0, 0.01, 1)
        for arm in (DraftArm(2, 8), DraftArm(8, 8)):
            model.add(arm, 0.001 * arm.depth, 0.01, 1)
    assert model.round_seconds(0)[4] == pytest.approx(0.014, rel=0.05)
