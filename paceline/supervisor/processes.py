"""Child processes with pipes to their standard streams."""

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
"""This process's ends of the children's standard input. Their closing tells children that it has ended."""


def _close_in_fork() -> None:
    """Close the pipe ends in a forked process, such as one of `multiprocessing`: it may outlive this process
    and would keep all children alive. Closes raw descriptors, since buffers may be locked by other
    threads."""
    for end in list(_held):
        with contextlib.suppress(OSError):
            end.close()


os.register_at_fork(after_in_child=_close_in_fork)


def start_process(
    command: Sequence[str], environment: Mapping[str, str] | None, folder: str | None
) -> subprocess.Popen[str]:
    """Start a command in its own process group. `environment` None inherits this process's; a `folder` that
    is None or missing means the current working folder. Raises OSError."""
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
