"""Where tables go."""

from __future__ import annotations

from rich.console import Console

_PIPED_WIDTH = 160


def to_stdout() -> Console:
    """Nothing is taken for markup. What is piped is as wide as its tables want to be."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def to_stderr() -> Console:
    """For what is said while a command runs."""
    return Console(stderr=True, highlight=False, markup=False)
