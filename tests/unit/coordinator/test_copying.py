"""Rounds with copies beside rounds without: what is asked for when, and what is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.copying import AGAIN, EARLY, FIRST, LAST, SETTLE, STRETCH, Comparison, Copying
from coordinator.costs import COMPARED, Copies, Finding
from coordinator.member import Verification
from coordinator.pair import CROWD, Pair
from coordinator.policy import Goodput
from coordinator.trials import Trial
from tests.unit.coordinator.pairs import FAR, MOST, crowd, known_pair, without_trials

SIZE = 8
WHOLE = 3 * STRETCH + 2 * SETTLE
"""Rounds of each sequence from the beginning of a comparison to its end."""


def run(
    comparison: Comparison,
    rounds: int,
    copied: Callable[[Copying], int],
    seconds: Callable[[int, int], float],
) -> tuple[list[Copying], list[Finding]]:
    """So many rounds of each sequence: what was to be done in each, and what was found."""
    asked, found = [], []
    for i in range(rounds):
        asked.append(comparison.copying)
        for _ in range(SIZE):
            tokens = copied(comparison.copying)
            finding = comparison.judged(seconds(i, tokens), tokens, SIZE)
            if finding is not None:
                found.append(finding)
    return asked, found


def once(
    copied: Callable[[Copying], int], seconds: Callable[[int, int], float]
) -> tuple[list[Copying], Finding]:
    """One comparison from the beginning of a load to its end, and no second one."""
    asked, (finding,) = run(Comparison(), FIRST + WHOLE + 1, copied, seconds)
    return asked, finding


def usually(tokens: int) -> Callable[[Copying], int]:
    """Copies so many tokens in every round in which it may."""
    return lambda copying: 0 if copying is Copying.NONE else tokens


def seldom(tokens: int) -> Callable[[Copying], int]:
    """Copies so many tokens only where it is to copy more than it usually would."""
    return lambda copying: tokens if copying is Copying.MORE else 0


@given(row=st.floats(0, 2), tokens=st.integers(1, 8))
def test_what_copies_add_is_found_between_two_stretches_as_usual(row: float, tokens: int) -> None:
    asked, finding = once(usually(tokens), lambda _, copied: 0.01 * (1 + row * copied))
    assert finding.copied == tokens
    assert finding.longer == pytest.approx(row * tokens)
    # The round after which something changes is that of the first sequence.
    assert asked.count(Copying.NONE) in (SETTLE + STRETCH, SETTLE + STRETCH + 1)
    first = asked.index(Copying.NONE)
    assert abs(first - FIRST - STRETCH) <= 1
    assert set(asked[:first]) == {Copying.USUAL} == set(asked[first + SETTLE + STRETCH + 1 :])


@given(row=st.floats(0, 2), tokens=st.integers(1, 8))
def test_where_hardly_anything_is_copied_more_is(row: float, tokens: int) -> None:
    asked, finding = once(seldom(tokens), lambda _, copied: 0.01 * (1 + row * copied))
    assert finding.copied == tokens
    assert finding.longer == pytest.approx(row * tokens)
    assert Copying.NONE not in asked


def test_where_there_is_nothing_to_copy_nothing_is_learned() -> None:
    _, finding = once(usually(0), lambda i, _: 1.0 + i % 3)
    assert finding.copied == 0
    copies = Copies()
    copies.compared(finding)
    assert copies.seconds(1.0, [1.0, 1.5]) == [1.0, 1.5]


@given(drift=st.floats(-0.01, 0.05))
def test_a_machine_that_slows_down_says_nothing_of_copies(drift: float) -> None:
    _, finding = once(usually(2), lambda i, _: 1.0 + drift * i)
    assert finding.longer == pytest.approx(0, abs=0.04)


def test_one_stall_says_little() -> None:
    """All wait for it: a target that is started again, say."""
    stall = FIRST + STRETCH // 2
    _, finding = once(usually(2), lambda i, _: 100.0 if i == stall else 1.0)
    assert 0 < finding.longer < 0.5


def test_rounds_that_take_no_time_say_nothing() -> None:
    _, finding = once(usually(2), lambda *_: 0.0)
    assert finding.longer == pytest.approx(0)


def test_the_rounds_after_a_change_do_not_count() -> None:
    """They are of before, or of passes that have to come together again."""
    began: dict[Copying, int] = {}

    def seconds(i: int, _: int) -> float:
        nonlocal last
        if comparison.copying is not last:
            last, began[comparison.copying] = comparison.copying, i
        return 50.0 if 0 <= i - began.get(comparison.copying, -SETTLE) < SETTLE else 1.0

    comparison, last = Comparison(), Copying.USUAL
    _, (finding,) = run(comparison, FIRST + WHOLE + 1, usually(2), seconds)
    assert finding.longer == pytest.approx(0)
    assert set(began) == {Copying.NONE, Copying.USUAL}


def between_beginnings(asked: list[Copying], what: Copying) -> list[int]:
    """Rounds from the beginning of one such part to that of the next."""
    begins = [i for i, (before, now) in enumerate(pairwise(asked)) if before is not now is what]
    return [b - a for a, b in pairwise(begins)]


def test_early_ones_follow_each_other_soon_and_later_ones_seldom() -> None:
    asked, _ = run(Comparison(), 12 * (LAST + WHOLE), usually(1), lambda *_: 1.0)
    between = between_beginnings(asked, Copying.NONE)
    assert between[: EARLY - 1] == pytest.approx([AGAIN + WHOLE] * (EARLY - 1), abs=2)
    assert between == sorted(between)
    assert max(between) == pytest.approx(LAST + WHOLE, abs=2)
    assert 0 < asked[-2 * LAST :].count(Copying.NONE) < 0.03 * 2 * LAST


def test_while_no_text_repeats_itself_more_copies_are_seldom_tried_and_early_ones_are_kept() -> None:
    comparison = Comparison()
    asked, _ = run(comparison, 6 * LAST, usually(0), lambda *_: 1.0)
    between = between_beginnings(asked, Copying.MORE)
    assert between == sorted(between)
    assert asked[-2 * LAST :].count(Copying.MORE) < 0.03 * 2 * LAST
    asked, _ = run(comparison, EARLY * (AGAIN + WHOLE), usually(1), lambda *_: 1.0)
    assert asked.count(Copying.MORE) == 0
    assert between_beginnings(asked, Copying.NONE) == pytest.approx([AGAIN + WHOLE] * (EARLY - 1), abs=2)


@pytest.mark.parametrize("when", [FIRST + 2, FIRST + STRETCH + 2, FIRST + 2 * STRETCH + SETTLE + 3])
def test_nothing_is_found_where_something_else_changes_too(when: int) -> None:
    comparison = Comparison()
    asked, found = run(comparison, when, usually(1), lambda *_: 1.0)
    comparison.interrupted(SIZE)
    assert comparison.copying is Copying.USUAL
    asked, found = run(comparison, AGAIN + WHOLE - 1, usually(1), lambda *_: 1.0)
    assert not found
    assert set(asked[:AGAIN]) == {Copying.USUAL}
    assert run(comparison, 2, usually(1), lambda *_: 1.0)[1] == [Finding(1.0, 0.0)]


def test_an_interruption_between_two_of_them_changes_nothing() -> None:
    comparison = Comparison()
    run(comparison, FIRST - 1, usually(1), lambda *_: 1.0)
    for _ in range(100):
        comparison.interrupted(SIZE)
    assert len(run(comparison, WHOLE + 2, usually(1), lambda *_: 1.0)[1]) == 1


def test_what_is_found_counts_by_how_much_was_copied() -> None:
    copies = Copies()
    guess = [1.0, 1.3, 1.6]
    copies.compared(Finding(COMPARED**0.5, 0.9 * COMPARED**0.5))
    assert copies.seconds(1.0, guess) == pytest.approx([1.0, 1.6, 2.2])
    for _ in range(50):
        copies.compared(Finding(2.0, 1.8))
        copies.compared(Finding(0.01, 0.3))
    assert copies.seconds(1.0, guess) == pytest.approx([1.0, 1.9, 2.8], rel=0.02)
    for _ in range(50):
        copies.compared(Finding(2.0, -0.5))
    # Rows never take less time than none.
    assert copies.seconds(1.0, guess) == pytest.approx([1.0, 1.0, 1.0], rel=0.02)


def copied_a_round(pair: Pair, members: list[Goodput], rounds: int, row: float, acceptance: float) -> float:
    """Tokens that a round copies as usual, in so many rounds of passes that hold half of the members each."""
    rng, size, copied, usual = random.Random(0), len(members), 0, 0
    for _ in range(rounds):
        counts = []
        for one in members:
            most = one.choose(MOST, 0, 1000)
            without_trials(pair)
            counts.append(one.copy(9, MOST, most) if one.looks() else 0)
        timing = Verification(1 + row * sum(counts) / size, size, size // 2)
        for one, count in zip(members, counts, strict=True):
            one.verifying(count, prefills=False, match=9)
        if pair.copying is Copying.USUAL:
            usual, copied = usual + size, copied + sum(counts)
        for one, count in zip(members, counts, strict=True):
            accepted = next((i for i in range(count) if rng.random() >= acceptance), count)
            one.judged(count, accepted, timing, match=9 if count else 0)
    return copied / usual


@pytest.mark.parametrize(("row", "acceptance", "copies"), [(1.1, 0.93, False), (0.3, 0.7, True)])
def test_a_crowd_finds_out_whether_copies_are_worth_it(row: float, acceptance: float, copies: bool) -> None:
    """No pass tells it, for none is shared by all; it begins with what it is on most machines."""
    pair = known_pair([1 + 0.1 * k for k in range(MOST + 1)], [9.0] * (MOST + 1), 2 * CROWD)
    members = crowd(pair, 2 * CROWD, 0.1)
    rng = random.Random(1)
    for _ in range(300):
        accepted = next((i for i in range(MOST) if rng.random() >= acceptance), MOST)
        members[0].habits.of(9).observe(MOST, accepted)
    before = copied_a_round(pair, members, FIRST, row, acceptance)
    copied_a_round(pair, members, 8 * WHOLE, row, acceptance)
    after = copied_a_round(pair, members, 4 * WHOLE, row, acceptance)
    assert (after > 0.5) is copies
    assert (before > 0.5) is not copies


def comparing(sequences: int) -> tuple[Pair, list[Goodput]]:
    """A crowd in which nobody drafts, and for now nobody copies, if so many compare."""
    pair = known_pair([1 + 0.1 * k for k in range(MOST + 1)], [9.0] * (MOST + 1), sequences)
    members = crowd(pair, sequences, 0.1)
    for _ in range(FIRST + WHOLE):
        if pair.copying is Copying.NONE:
            break
        copied_a_round(pair, members, 1, 0.1, 0.98)
        for one in members:
            one.habits.of(9).observe(MOST, MOST)
    return pair, members


def test_nothing_is_copied_where_that_is_being_found_out() -> None:
    """Also not where nobody asks whether to look, for a copy goes on."""
    pair, members = comparing(CROWD)
    assert pair.copying is Copying.NONE
    members[0].choose(MOST, 0, 1000)
    without_trials(pair)
    assert members[0].copy(9, MOST, 0) == 0
    assert not members[0].looks()


def test_few_compare_nothing() -> None:
    pair, _ = comparing(CROWD - 1)
    assert pair.copying is Copying.USUAL
    assert not pair._comparisons


@pytest.mark.parametrize("what", ["a draft", "a trial", "another load", "few are left"])
def test_other_changes_end_a_comparison(what: str) -> None:
    pair, members = comparing(CROWD)
    (comparison,) = pair._comparisons.values()
    assert comparison.copying is Copying.NONE
    timing = Verification(1.0, CROWD, CROWD)
    if what == "a draft":
        members[0].verifying(3, prefills=False)
    elif what == "a trial":
        pair._trials[pair.load].trial = Trial(2, until=FAR, size=CROWD, patience=FAR)
    elif what == "another load":
        for one in members[3:]:
            one.leave()
        assert pair.load == 2
    else:
        for one in members[CROWD - 2 :]:
            one.leave()
        assert pair.load == 3
    members[1].judged(0, 0, timing)
    assert comparison.copying is Copying.USUAL
    assert pair.copying is Copying.USUAL
