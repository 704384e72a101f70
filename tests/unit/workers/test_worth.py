"""What is computed ahead stays where it makes rounds shorter, and only there."""

from __future__ import annotations

import random

import pytest

from target_worker.worth import STAYS, TRIED, Worth

PERIOD = TRIED + STAYS


def shares(with_it: float, without: float, rounds: int, worth: Worth, seed: int = 1) -> float:
    """Of the rounds that have it, on a machine where they take so long; times vary by a third."""
    rng, had = random.Random(seed), 0
    for _ in range(rounds):
        has_it = worth.has_it
        had += has_it
        worth.observe(has_it, (with_it if has_it else without) * rng.uniform(0.5, 1.5))
        worth.turn()
    return had / rounds


def test_a_trial_has_as_many_rounds_of_either_kind() -> None:
    assert shares(1, 1, TRIED, Worth()) == 0.5


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("with_it", "stays"), [(0.8, True), (1.3, False)])
def test_the_better_one_stays_but_for_trials(with_it: float, stays: bool, seed: int) -> None:
    share = shares(with_it, 1.0, 4 * PERIOD, Worth(), seed)
    tried = TRIED / (TRIED + STAYS) / 2
    assert share == pytest.approx(1 - tried if stays else tried)


def test_it_is_found_out_when_that_changes() -> None:
    worth = Worth()
    shares(0.8, 1.0, 4 * PERIOD, worth)
    assert shares(1.4, 1.0, 6 * PERIOD, worth) < 0.5
    assert shares(1.4, 1.0, PERIOD, worth) < 0.2


def test_a_pause_of_the_machine_decides_nothing() -> None:
    worth = Worth()
    for i in range(TRIED):
        has_it = worth.has_it
        worth.observe(has_it, 1000.0 if i == 12 else 0.9 if has_it else 1.0)
        worth.turn()
    assert worth.has_it


@pytest.mark.parametrize("kind", [True, False])
def test_a_trial_of_one_kind_alone_decides_nothing(kind: bool) -> None:
    """Once: the verdicts of one pass over 96 sequences were a trial, which ended the engine thread."""
    worth = Worth()
    while worth.has_it is not kind:
        worth.turn()
    for _ in range(TRIED):
        worth.observe(kind, 1.0)
    assert worth.has_it is kind
    shares(1.3 if kind else 0.8, 1.0, 2 * PERIOD, worth)
    assert worth.has_it is not kind, "the next one decides"


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("with_it", "stays"), [(0.8, True), (1.3, False)])
def test_sequences_that_share_a_pass_have_it_alike(
    size: int, groups: int, with_it: float, stays: bool
) -> None:
    """Once: of two in a pass always the same one had it, and both waited for it: nothing was compared."""
    worth = Worth()
    had = [[worth.has_it] * size for _ in range(groups)]
    seen: list[set[bool]] = [set() for _ in range(groups)]
    for pass_ in range(-(-TRIED // size)):
        group = pass_ % groups
        for i in range(size):
            worth.observe(had[group][i], with_it if any(had[group]) else 1.0)
            had[group][i] = worth.has_it
        worth.turn()
        assert len(set(had[group])) == 1 or worth._rounds >= TRIED
        seen[group].add(had[group][0])
    assert worth.has_it is stays
    assert seen == [{True, False}] * groups
