"""Compiling what nobody compiled before, by one process of a machine while the others wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from filelock import FileLock

_called: Final[set[Any]] = set()
"""What has been called: to ask numba for that takes longer than all the rest here."""


def call(compiled: Any, *args: Any) -> Any:
    """Call a function of numba's that is cached on disk; returns what it returns.

    Whoever calls it first compiles it, for half a minute of a core. Target, draft and their replicas start
    together: the first of them compiles, and the others read what it left. The lock falls with the process
    that holds it.

    One lock for all functions of a folder: one of them calls another, and who compiles it compiles both.
    """
    if compiled in _called:
        return compiled(*args)
    with _turn(compiled):
        result = compiled(*args)
    _called.add(compiled)
    return result


def _turn(compiled: Any) -> contextlib.AbstractContextManager[None]:
    if compiled.signatures or compiled.stats.cache_path is None:
        return contextlib.nullcontext()
    return _where_possible(FileLock(Path(compiled.stats.cache_path, "compiling.lock")))


@contextlib.contextmanager
def _where_possible(lock: FileLock) -> Iterator[None]:
    # Where a file cannot be locked or made, all is as without it: several compile the same.
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):
            held.enter_context(lock)
        yield
