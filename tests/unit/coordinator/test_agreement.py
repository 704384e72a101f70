"""What sequences decide together, against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.acceptance import expected_tokens
from coordinator.agreement import ADVANTAGE, STEADY, WAVERING, Agreement, Ballot, interpolated
from coordinator.costs import RoundSeconds

MOST = 4


def table(*whole: float, beside: float | None = None) -> RoundSeconds:
    return RoundSeconds(list(whole), list(whole), whole[0] if beside is None else beside, list(whole))


def ballot(acceptance: float, num_draft: int, most: int = MOST, *, fixed: bool = False) -> Ballot:
    return Ballot(expected_tokens([acceptance] * most), num_draft, fixed)


def agreed(seconds: RoundSeconds, *ballots: Ballot) -> Agreement:
    agreement = Agreement(MOST)
    for one in ballots:
        agreement.replace(None, one)
    agreement.revise(seconds)
    return agreement


rates = st.floats(0.05, 0.95)
steps = st.lists(st.floats(0.0, 2.0), min_size=MOST, max_size=MOST)


@given(st.lists(rates, min_size=1, max_size=5), steps)
def test_the_common_k_is_the_best_for_all_together(acceptances: list[float], steps: list[float]) -> None:
    whole = list(itertools.accumulate([1.0, *steps]))
    agreement = agreed(table(*whole), *(ballot(a, 0) for a in acceptances))
    together = [
        sum(expected_tokens([a] * MOST)[k] for a in acceptances) / len(acceptances) / whole[k]
        for k in range(MOST + 1)
    ]
    assert agreement.rates == pytest.approx(together)
    assert together[agreement.num_draft] == pytest.approx(max(together[1:]))
    assert agreement.drafts == (agreement.rate > (1 + ADVANTAGE + WAVERING) * agreement.plain_rate)
    assert agreement.plain_rate == pytest.approx(1.0)


def test_drafting_begins_with_an_advantage_and_ends_with_less_of_one() -> None:
    """It makes less than its usual rounds promise, whether it is done or not."""

    def seconds(rate: float) -> RoundSeconds:
        return table(1.0, *(expected_tokens([0.5] * MOST)[k] / rate for k in range(1, MOST + 1)))

    agreement = agreed(seconds(1 + ADVANTAGE + 0.9 * WAVERING), ballot(0.5, 2))
    assert not agreement.drafts
    agreement.revise(seconds(1 + ADVANTAGE + 1.1 * WAVERING))
    assert agreement.drafts
    agreement.revise(seconds(1 + ADVANTAGE - 0.9 * WAVERING))
    assert agreement.drafts
    agreement.revise(seconds(1 + ADVANTAGE - 1.1 * WAVERING))
    assert not agreement.drafts


def test_the_common_k_changes_for_a_gain_only() -> None:
    expected = expected_tokens([0.5] * MOST)

    def seconds(gain: float) -> RoundSeconds:
        """Of 3 over 2; others are far worse."""
        return table(9.0, 9.0, expected[2], expected[3] / (1 + gain), 9.0)

    agreement = agreed(seconds(-0.1), ballot(0.5, 2))
    assert agreement.num_draft == 2
    agreement.revise(seconds(0.9 * STEADY))
    assert agreement.num_draft == 2
    agreement.revise(seconds(1.1 * STEADY))
    assert agreement.num_draft == 3


def test_a_few_that_gain_a_lot_make_all_draft_that_gain() -> None:
    """Half are sure of their drafts and half are hopeless: no K for all of them is worth it."""
    seconds = table(1.0, 2.1, 2.5, 2.9, 3.3, beside=1.05)
    sure, hopeless = ballot(0.99, 4), ballot(0.01, 0)
    alike = agreed(seconds, ballot(0.99, 0), hopeless)
    assert not alike.drafts
    mixed = agreed(seconds, sure, hopeless)
    assert mixed.drafts
    mean = (sure.expected[4] + 1) / 2
    assert mixed.rate == pytest.approx(mean / 2.5), "two draft tokens each, of which the other has none"


def test_half_of_them_drafting_is_not_taken_for_cheap() -> None:
    """Where plain rounds beside drafts take as long as drafting, what few gain is lost by the others."""
    cheap = table(1.0, 1.8, 2.0, 2.2, 2.4, beside=1.05)
    dear = table(1.0, 3.9, 4.1, 4.3, 4.5, beside=3.7)
    ballots = ballot(0.9, 4), ballot(0.01, 0), ballot(0.01, 0)
    assert agreed(cheap, *ballots).drafts
    assert not agreed(dear, *ballots).drafts


def test_who_drafts_in_any_case_is_there_in_both() -> None:
    seconds = table(1.0, 1.6, 1.8, 2.0, 2.2, beside=1.4)
    alone = agreed(seconds, ballot(0.6, 3))
    beside = agreed(seconds, ballot(0.6, 3), ballot(0.6, 4, fixed=True))
    assert alone.plain_rate == pytest.approx(1.0)
    made = 1 + expected_tokens([0.6] * 4)[4]
    assert beside.plain_rate == pytest.approx(made / 2 / 1.8), "four draft tokens for two"


def test_a_sequence_with_a_smaller_limit_counts_with_what_it_can_do() -> None:
    agreement = agreed(table(1.0, 1.1, 1.2, 1.3, 1.4), ballot(0.9, 1, most=1), ballot(0.9, 4))
    small, large = expected_tokens([0.9])[1], expected_tokens([0.9] * 4)[4]
    assert agreement.rates[4] == pytest.approx((small + large) / 2 / 1.4)


@given(st.lists(st.tuples(rates, st.integers(0, MOST), st.booleans()), min_size=1, max_size=6), st.data())
def test_what_left_is_forgotten(votes: list[tuple[float, int, bool]], data: st.DataObject) -> None:
    seconds = table(1.0, 1.3, 1.6, 1.9, 2.2, beside=1.2)
    ballots = [ballot(a, k, fixed=fixed) for a, k, fixed in votes]
    agreement = agreed(seconds, *ballots)
    stays = [data.draw(st.booleans()) for _ in ballots]
    staying = [one for one, stay in zip(ballots, stays, strict=True) if stay]
    for one, stay in zip(ballots, stays, strict=True):
        if not stay:
            agreement.replace(one, None)
    for one in staying:
        agreement.replace(one, one)
    if not staying:
        assert agreement == Agreement(
            MOST,
            drafts=agreement.drafts,
            num_draft=agreement.num_draft,
            plain_rate=agreement.plain_rate,
            rate=agreement.rate,
            rates=agreement.rates,
        )
        agreement.revise(seconds)
        return
    agreement.num_draft, agreement.drafts = 0, False
    agreement.revise(seconds)
    fresh = agreed(seconds, *staying)
    assert agreement.size == fresh.size
    assert agreement.rate == pytest.approx(fresh.rate)
    assert agreement.plain_rate == pytest.approx(fresh.plain_rate)


def test_between_two_entries_and_beyond_the_last() -> None:
    assert interpolated([3.0], 7) == 3.0
    assert interpolated([1.0, 2.0, 4.0], 1.5) == 3.0
    assert interpolated([1.0, 2.0, 4.0], 3) == 6.0
