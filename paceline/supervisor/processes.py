"""Processes with pipes to their standard streams."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_held: Final[weakref.WeakSet[io.RawIOBase]] = weakref.WeakSet()
"""Our ends of what tells children by closing that we are gone."""


def _let_go() -> None:
    """Close them in a process forked from ours, as by `multiprocessing`: it may outlive us, and with them so
    would all children. Only descriptors: another thread may have held the lock of a buffer over one."""
    for end in list(_held):
        with contextlib.suppress(OSError):
            end.close()


os.register_at_fork(after_in_child=_let_go)


def start_process(
    command: Sequence[str], environment: Mapping[str, str] | None, folder: str | None
) -> subprocess.Popen[str]:
    """Start a command in a process group of its own; environment and working folder None are ours. A folder
    that is gone is ours too. Raises OSError."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=folder if folder is not None and Path(folder).is_dir() else None,
        text=True,
        errors="replace",
        process_group=0,
    )
    assert isinstance(process.stdin, io.TextIOWrapper)
    _held.add(process.stdin.buffer.raw)
    return process
