"""Clock, errors and fingerprint."""

from __future__ import annotations

import inspect

import pytest

from paceline.core import clock, errors
from paceline.core.fingerprint import vocabulary_fingerprint


def test_a_manual_clock_moves_when_advanced() -> None:
    now = clock.ManualClock(5.0)
    assert now() == 5.0
    now.advance(1.5)
    assert now() == 6.5


def test_every_error_is_in_the_class_tree_and_its_drawing() -> None:
    for name, cls in inspect.getmembers(errors, inspect.isclass):
        assert issubclass(cls, errors.PacelineError)
        assert name in (errors.__doc__ or "")


def test_an_invalid_argument_is_a_value_error_with_field() -> None:
    error = errors.InvalidArgumentError("top_p", "must be in (0, 1]")
    assert isinstance(error, ValueError)
    assert (error.field, error.description) == ("top_p", "must be in (0, 1]")
    assert str(error) == error.message == "top_p: must be in (0, 1]"


def test_an_error_is_written_in_one_line() -> None:
    """A first line alone may be a heading."""
    assert errors.in_one_line(OSError("one of:\n (1) this\n\n(2) that ")) == "one of: (1) this (2) that"
    assert errors.in_one_line(TimeoutError()) == "TimeoutError"


def test_the_fingerprint_does_not_depend_on_order() -> None:
    assert vocabulary_fingerprint({"a": 0, "b": 1}) == vocabulary_fingerprint({"b": 1, "a": 0})


@pytest.mark.parametrize(
    "other", [{}, {"a": 0}, {"a": 1, "b": 0}, {"a": 0, "b": 2}, {"a": 0, "b": 1, "c": 2}, {"a=0;1:b": 1}]
)
def test_another_vocabulary_has_another_fingerprint(other: dict[str, int]) -> None:
    assert vocabulary_fingerprint(other) != vocabulary_fingerprint({"a": 0, "b": 1})


def test_a_token_of_invalid_text_has_a_fingerprint() -> None:
    assert len(vocabulary_fingerprint({"\ud800": 0})) == 64
