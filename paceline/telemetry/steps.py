"""What a process does before it is ready, step by step, for whoever waits for it.

A step is a log line like any other, of a logger of its own: a program that shows no logs finds them by it.
"""

from __future__ import annotations

import logging
import re
from typing import Final

_NAME: Final = "paceline.steps"
_LINE: Final = re.compile(rf"\[([^\]]+)\] .* INFO {re.escape(_NAME)}: (.*)")

LOADING_LIBRARIES: Final = "loading libraries, which takes from a few seconds to half a minute"
"""A worker's first step, for it imports torch."""

_log = logging.getLogger(_NAME)


def step(message: str, *values: object) -> None:
    """Log what begins now, as `logging` formats it."""
    _log.info(message, *values)


def step_in(line: str) -> str | None:
    """The step in a child's log line of text, after its role; None for any other line."""
    match = _LINE.fullmatch(line)
    return None if match is None else f"{match[1]}: {match[2]}"
