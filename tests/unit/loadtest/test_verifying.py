"""Verification of answers: the chosen ones, and reported differences."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import UnavailableError
from paceline.core.types import AcceptanceMode, SpeculationParams
from paceline.loadtest.verifying import Difference, VerifyReport, chosen, compared, without_draft


@pytest.mark.parametrize(("most", "numbers"), [(1, [5]), (2, [2, 7]), (3, [1, 5, 8]), (10, list(range(10)))])
def test_answers_are_chosen_evenly_and_once(make_outcome: Any, most: int, numbers: list[int]) -> None:
    outcomes = [make_outcome(number) for number in range(10)]
    assert [one.number for one in chosen(outcomes[::-1], most)] == numbers
    assert [one.number for one in chosen(outcomes, 99)] == list(range(10))


def test_failed_requests_are_not_compared(make_outcome: Any) -> None:
    failed = make_outcome(0, answer=None, error=UnavailableError("gone"))
    assert chosen([failed], 3) == []
    assert chosen([failed, make_outcome(1)], 3) == [make_outcome(1)]


@pytest.mark.parametrize("settings", [{"drafter": "draft"}, {"prompt_lookup": True}, {"tree_width": 3}])
def test_an_answer_is_compared_with_plain_decoding_in_its_mode(settings: dict[str, Any]) -> None:
    plain = without_draft(SpeculationParams(num_speculative_tokens=5, acceptance="rejection", **settings))
    assert plain == SpeculationParams(num_speculative_tokens=0, acceptance=AcceptanceMode.REJECTION)


def test_the_first_differing_token_is_reported(make_outcome: Any, make_answer: Any) -> None:
    answers = [(1, 2, 3), (1, 9, 3), (1, 2), (1, 2, 3, 4), (1, 2, 3)]
    first = [make_outcome(number, answer=make_answer(token_ids=(1, 2, 3))) for number in range(5)]
    again = [make_outcome(number, answer=make_answer(token_ids=ids)) for number, ids in enumerate(answers)]
    again[4] = make_outcome(4, answer=None, error=UnavailableError("gone"))
    found = compared(first, again)
    differences = (Difference(1, 1), Difference(2, 2), Difference(3, 3))
    assert found == VerifyReport(4, differences, ("UnavailableError: gone",), 0)
    assert not found.sound


def test_a_stopped_verification_compares_fewer(make_outcome: Any) -> None:
    first = [make_outcome(number) for number in range(3)]
    assert compared(first, first) == VerifyReport(3, (), (), 0)
    assert compared(first, first).sound
    assert compared(first, first[:2]) == VerifyReport(2, (), (), 1)
    assert not compared(first, []).sound
