"""The arms of a controller and their numbers."""

from __future__ import annotations

import pytest

from coordinator.speculation.arms import PLAIN, DraftArm, DraftArms


def test_up_to_the_largest_k_an_arms_number_is_k() -> None:
    arms = DraftArms(8, 16)
    assert arms.each[0] == PLAIN
    assert [arms.each[k] for k in arms.chains] == [DraftArm(k) for k in range(1, 9)]
    assert [arms.each[i] for i in arms.trees] == [DraftArm(d, n) for n in (8, 16) for d in (4, 8)]


@pytest.mark.parametrize(
    ("max_draft", "max_nodes", "trees"),
    [
        (8, 0, []),
        (0, 16, []),
        (1, 4, [(1, 4)]),
        (8, 1, [(1, 1)]),
        (8, 6, [(4, 6), (6, 6)]),
        (3, 9, [(2, 8), (3, 8), (2, 9), (3, 9)]),
        (8, 64, [(d, n) for n in (8, 16, 32, 64) for d in (4, 8)]),
    ],
)
def test_trees_stay_within_both_bounds(max_draft: int, max_nodes: int, trees: list[tuple[int, int]]) -> None:
    arms = DraftArms(max_draft, max_nodes)
    assert [arms.each[i] for i in arms.trees] == trees


def test_the_nearest_arm_is_the_next_larger_one_of_its_kind() -> None:
    arms = DraftArms(8, 16)
    assert all(arms.nearest(arm) == i for i, arm in enumerate(arms.each))
    assert arms.each[arms.nearest(DraftArm(3, 9))] == DraftArm(4, 16)
    assert arms.each[arms.nearest(DraftArm(3, 1))] == DraftArm(4, 8)
    assert arms.each[arms.nearest(DraftArm(12, 64))] == DraftArm(8, 16)
    assert arms.each[arms.nearest(DraftArm(12))] == DraftArm(8)
    assert DraftArms(8).nearest(DraftArm(4, 16)) == 4
