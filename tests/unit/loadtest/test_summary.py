"""Figures of a load, computed by hand or in an obvious slower way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ResourceExhaustedError, UnavailableError
from paceline.loadtest.summary import Latency, Summary, most_at_a_time, summary


def test_times_of_a_request_begin_when_it_was_due(make_outcome: Any) -> None:
    one = make_outcome(due=3.0)
    assert one.completion_tokens == 6
    assert one.ttft == pytest.approx(0.5)
    assert one.tpot == pytest.approx((1.0 - 0.5) / 5)
    assert one.gaps == pytest.approx((0.2, 0.3))
    assert one.e2e == pytest.approx(1.1)


def test_missing_tokens_have_no_times(make_outcome: Any) -> None:
    none = make_outcome(times=(), counts=())
    assert (none.ttft, none.tpot, none.gaps) == (None, None, ())
    at_once = make_outcome(times=(0.5,), counts=(4,))
    assert (at_once.ttft, at_once.tpot, at_once.gaps) == (0.5, None, ())


def test_a_complete_answer_within_all_goals_meets_them(make_outcome: Any) -> None:
    one = make_outcome()
    assert one.meets({"ttft": 0.5, "tpot": 0.1, "e2e": 1.1})
    for goals in ({"ttft": 0.49}, {"tpot": 0.09}, {"e2e": 1.0}, {"ttft": 0.5, "e2e": 1.0}):
        assert not one.meets(goals)
    assert make_outcome(times=(0.5,), counts=(1,)).meets({"tpot": 0.01})
    assert not make_outcome(answer=None, error=UnavailableError("gone")).meets({"ttft": 9.0})


def of_three(make_outcome: Any, goals: dict[str, float] | None = None) -> Summary:
    outcomes = [
        make_outcome(),
        make_outcome(1, 1.0),
        make_outcome(2, 1.5, answer=None, error=ResourceExhaustedError("full"), times=(1.8,), counts=(5,)),
    ]
    return summary(outcomes, 4.0, goals or {})


def test_rates_are_of_finished_requests(make_outcome: Any) -> None:
    found = of_three(make_outcome)
    assert (found.requests, found.finished, dict(found.failed)) == (3, 2, {"ResourceExhaustedError": 1})
    assert found.requests_per_second == 2 / 4
    assert (found.prompt_tokens, found.prompt_tokens_per_second) == (20, 5.0)
    assert (found.completion_tokens, found.completion_tokens_per_second) == (12, 3.0)
    assert dict(found.by_finish_reason) == {"length": 2}
    assert found.latest == pytest.approx(0.1)
    assert found.goodput is None
    assert found.unsent == 0
    assert summary([make_outcome()], 4.0, {}, unsent=3).unsent == 3


def test_goodput_counts_requests_meeting_the_goals(make_outcome: Any) -> None:
    assert of_three(make_outcome, {"e2e": 1.2}).goodput == 2 / 4
    assert of_three(make_outcome, {"e2e": 1.0}).goodput == 0


def test_mean_acceptance_length_is_weighted_by_rounds(make_outcome: Any) -> None:
    """Also where it is less than 1 + accepted / rounds, as an answer's end makes it."""
    outcomes = [make_outcome(), make_outcome(1, 1.0)]
    stats = outcomes[1].answer.speculative_decoding
    ended = replace(stats, mean_acceptance_length=4.0, num_spec_steps=6)
    outcomes[1] = replace(outcomes[1], answer=replace(outcomes[1].answer, speculative_decoding=ended))
    found = summary(outcomes, 4.0, {}).speculation
    assert found.num_spec_steps == 8
    assert found.mean_acceptance_length == (2 * 2.5 + 6 * 4.0) / 8


def test_draft_figures_are_summed_over_requests(make_outcome: Any) -> None:
    found = of_three(make_outcome).speculation
    assert (found.num_rounds, found.num_spec_steps, found.num_draft_tokens) == (6, 4, 8)
    assert found.draft_acceptance_rate == 6 / 8
    assert found.mean_acceptance_length == 1 + 6 / 4
    assert found.tokens_per_round == 12 / 6
    assert found.accepted_to_position == (1.0, 0.5)
    assert (found.num_lookahead_hits, found.num_prompt_lookups) == (2, 2)
    assert found.seconds_per_round.draft == pytest.approx(0.1)
    assert found.seconds_per_round.total == pytest.approx(0.4)


def test_counts_of_partly_counted_requests_stay_consistent(make_outcome: Any) -> None:
    """A restarted coordinator counts only the rounds since."""
    found = summary([make_outcome(), make_outcome(1, num_resumes=2)], 4.0, {})
    assert (found.num_resumes, found.completion_tokens) == (2, 12)
    assert found.speculation.num_rounds == 3
    assert found.speculation.tokens_per_round == 6 / 3


def test_resumed_counts_finished_requests_only(make_outcome: Any) -> None:
    """Each once, however often it was resumed."""
    gone = make_outcome(2, num_resumes=5, answer=None, error=UnavailableError("gone"))
    found = summary([make_outcome(), make_outcome(1, num_resumes=3), gone], 4.0, {})
    assert (found.resumed, found.num_resumes) == (1, 8)


def test_histograms_of_different_lengths_are_summed(make_outcome: Any, make_answer: Any) -> None:
    stats = replace(make_answer().speculative_decoding, acceptance_histogram=(2,), num_spec_steps=2)
    longer = make_outcome()
    found = summary([make_outcome(answer=make_answer(speculative_decoding=stats)), longer], 1.0, {})
    assert found.speculation.accepted_to_position == (2 / 4, 1 / 4)


def test_a_load_of_failures_has_no_times(make_outcome: Any) -> None:
    failed = make_outcome(answer=None, error=UnavailableError("gone"))
    found = summary([failed], 1.0, {})
    assert set(found.latencies.values()) == {None}
    assert found.speculation.tokens_per_round is None
    assert found.speculation.draft_acceptance_rate is None
    assert found.speculation.accepted_to_position == ()
    assert found.speculation.seconds_per_round is None
    assert found.completion_tokens_per_second == 0


def test_percentiles_are_interpolated() -> None:
    found = Latency.of([float(value) for value in range(101)])
    assert found == Latency(50.0, 50.0, 90.0, 95.0, 99.0, 100.0)
    assert Latency.of([1.0, 3.0]) == pytest.approx(Latency(2.0, 2.0, 2.8, 2.9, 2.98, 3.0))
    assert Latency.of([2.0]) == Latency(2.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    assert Latency.of([]) is None


spans = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda s: (s[0], s[0] + s[1])), max_size=12
)


@given(spans)
def test_the_peak_concurrency_equals_a_slow_count(found: list[tuple[int, int]]) -> None:
    slowly = max((sum(begin <= now < end for begin, end in found) for now in range(20)), default=0)
    assert most_at_a_time(found) == slowly
