"""Commands of `paceline` run in this process: a process each would import everything again."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from unittest import mock

import pytest

from paceline.cli import main


@dataclass(frozen=True)
class Done:
    """What a command left behind, under the names of `subprocess`."""

    returncode: int
    stdout: str
    stderr: str


def command(*words: str, stdin: str = "") -> Done:
    """One command, as a shell gives it."""
    # As `subprocess` reads text: every end of a line is a newline.
    out, errors = io.StringIO(newline=None), io.StringIO(newline=None)
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        mock.patch("sys.stdin", io.StringIO(stdin)),
        pytest.raises(SystemExit) as end,
    ):
        main(words)
    return Done(int(end.value.code or 0), out.getvalue(), errors.getvalue())
