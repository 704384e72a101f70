"""Whether processes have ended, whatever their parent."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator


@contextlib.contextmanager
def watch_end(pid: int) -> Iterator[int]:
    """A file descriptor that becomes readable when the process has ended. Raises ProcessLookupError."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def has_ended(descriptor: int, timeout: float) -> bool:
    """Whether it has, or does so in time."""
    return bool(select.select([descriptor], [], [], timeout)[0])


def ended(pid: int, timeout: float) -> bool:
    """The same, of a process that may be gone by now."""
    with contextlib.suppress(ProcessLookupError), watch_end(pid) as descriptor:
        return has_ended(descriptor, timeout)
    return True
