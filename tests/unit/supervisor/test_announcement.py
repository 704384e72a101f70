"""Descriptions of a child's exit."""

from __future__ import annotations

import signal

import pytest

from paceline.supervisor.announcement import last_words


@pytest.mark.parametrize(
    ("exit_code", "how"),
    [
        (3, "exited with code 3"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),  # a real-time signal, which has no name
    ],
)
def test_every_exit_has_a_description(exit_code: int, how: str) -> None:
    assert last_words(exit_code, []) == how
