"""Consoles for output."""

from __future__ import annotations

from rich.console import Console

_PIPED_WIDTH = 160


def to_stdout() -> Console:
    """A console for standard output, without markup. Piped output is wide enough for the tables."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def to_stderr() -> Console:
    """A console for progress messages."""
    return Console(stderr=True, highlight=False, markup=False)
