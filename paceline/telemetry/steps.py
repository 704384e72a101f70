"""Progress of a process's start, as log lines.

Steps have a separate logger name, by which a program that hides logs can still find and show them.
"""

from __future__ import annotations

import logging
import re
from typing import Final

_NAME: Final = "paceline.steps"
_LINE: Final = re.compile(rf"\[([^\]]+)\] .* INFO {re.escape(_NAME)}: (.*)")

LOADING_LIBRARIES: Final = "loading libraries, which takes from a few seconds to half a minute"
"""A worker's first step, because it imports torch."""

_log = logging.getLogger(_NAME)


def step(message: str, *values: object) -> None:
    """Log the beginning of a step, formatted as by `logging`."""
    _log.info(message, *values)


def step_in(line: str) -> str | None:
    """The step in a child's text log line, prefixed with its role; None for any other line."""
    match = _LINE.fullmatch(line)
    return None if match is None else f"{match[1]}: {match[2]}"
