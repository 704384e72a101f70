"""When another K is tried."""

from __future__ import annotations

import pytest

from coordinator.speculation.exploration import (
    DISTANCES,
    EARLY_TRIALS,
    FIRST,
    FIRST_DRAFT,
    LONGEST,
    SHORTEST,
    TRIAL,
    Exploration,
)

EVEN = [1.0] * 9
REGIMES = [range(1), range(1, 9)]


def count_until_due(exploration: Exploration, sequences: int) -> int:
    for rounds in range(1, 10**6):
        exploration.count(sequences)
        if exploration.is_due:
            return rounds
    raise AssertionError("no trial ever comes due")


def run_trial(exploration: Exploration, best: int, sequences: int, *, changed: bool = False) -> int | None:
    k = exploration.begin(best, EVEN, REGIMES, sequences)
    if k is not None:
        while not exploration.is_over:
            exploration.count(sequences)
        exploration.end(sequences, changed=changed)
    return k


@pytest.mark.parametrize("sequences", [1, 16])
def test_the_first_trial_comes_soon_and_lasts(sequences: int) -> None:
    exploration = Exploration()
    assert count_until_due(exploration, sequences) == FIRST * sequences + 1
    assert exploration.begin(0, EVEN, REGIMES, sequences) == FIRST_DRAFT
    for _ in range(TRIAL * sequences):
        assert not exploration.is_over
        exploration.count(sequences)
    assert exploration.is_over


def test_intervals_double_up_to_the_longest() -> None:
    exploration, intervals = Exploration(), []
    for _ in range(14):
        intervals.append(count_until_due(exploration, 1))
        run_trial(exploration, 4, 1)
    assert intervals[1:EARLY_TRIALS] == [SHORTEST] * (EARLY_TRIALS - 1)
    assert intervals[EARLY_TRIALS] == 2 * SHORTEST
    assert intervals[-1] == LONGEST
    assert TRIAL / LONGEST < 0.01


def test_a_changed_choice_makes_trials_frequent_again() -> None:
    exploration = Exploration()
    for _ in range(10):
        count_until_due(exploration, 1)
        run_trial(exploration, 4, 1)
    count_until_due(exploration, 1)
    run_trial(exploration, 4, 1, changed=True)
    assert count_until_due(exploration, 1) == SHORTEST


def test_trials_alternate_between_plain_and_a_neighbour() -> None:
    exploration, tried = Exploration(), []
    for _ in range(6):
        count_until_due(exploration, 1)
        tried.append(run_trial(exploration, 4, 1))
    assert tried == [0, 4 + DISTANCES[1], 0, 4 + DISTANCES[0], 0, 4 + DISTANCES[1]]


def test_the_greatest_k_tries_the_neighbour_below() -> None:
    exploration = Exploration(trials=1)
    assert exploration.begin(8, EVEN, REGIMES, 1) == 8 - DISTANCES[1]


def test_a_hopeless_k_is_not_tried_after_two_trials() -> None:
    exploration = Exploration(trials=2)
    count_until_due(exploration, 1)
    assert exploration.begin(0, [1.0, *[0.5] * 8], REGIMES, 1) is None
    assert not exploration.is_due
    count_until_due(exploration, 1)
    assert exploration.begin(0, [1.0, *[0.9] * 8], REGIMES, 1) == 1


def test_with_trees_trials_take_turns_among_the_regimes() -> None:
    regimes, goodput = [range(1), range(1, 9), range(9, 13)], [1.0] * 13
    goodput[11], goodput[5] = 1.1, 1.05
    for best, tried in ((4, {0, 5, 6, 11}), (10, {0, 5, 11, 12}), (0, {5, 11})):
        exploration = Exploration(trials=5)
        assert {exploration.begin(best, goodput, regimes, 1) for _ in range(6)} == tried


def test_a_load_that_only_draws_trees_begins_with_a_small_one() -> None:
    assert Exploration().begin(0, [1.0] * 13, [range(1), range(9, 13)], 1) == 10
