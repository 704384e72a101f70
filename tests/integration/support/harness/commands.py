"""Commands of `paceline` run in this process, which imports everything once; programs in their own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
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


def python(program: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with these arguments, and these variables besides, to its end."""
    command = [sys.executable, "-P", "-c", program, *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def running(program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A program with pipes for its standard input, output and errors, gone when the block ends."""
    command, pipe = [sys.executable, "-P", "-c", program, *words], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


LOADING = """
import signal, sys, threading
from types import SimpleNamespace
from paceline.core.config import CoordinatorConfig, TargetConfig

def load(*words):
    print("loading", flush=True)
    threading.Event().wait()

role, handler, how = sys.argv[1:]
signal.signal(signal.SIGINT, getattr(signal, handler))
common = {"exit_with_parent": how == "with its parent"}
if role == "coordinator":
    from coordinator.text import vocabulary
    from coordinator import main
    vocabulary.load_tokenizer = load
    main.run(CoordinatorConfig(targets=("127.0.0.1:1",), tokenizer="m", **common))
else:
    from paceline import worker_process
    worker_process.run(SimpleNamespace(name=role, load=load), TargetConfig(model="m", **common))
"""
"""Loads for ever. Arguments: role, handler of SIGINT, and `with its parent` if it is to end with that."""
