"""Compiles uncached functions in one process of a machine while the others wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from filelock import FileLock

_called: Final[set[Any]] = set()
"""Functions already called: asking numba takes longer than the rest of this function."""


def call(compiled: Any, *args: Any) -> Any:
    """Call a numba function that is cached on disk; returns its result.

    The first caller compiles the function, which takes half a minute of a core. Target, draft and their
    replicas start together: the first one compiles, and the others read the cache. The lock is released with
    the process that holds it.

    One lock covers all functions of a folder, because compiling one of them compiles the functions that it
    calls.
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
    # If a file cannot be locked or created, several processes compile the same function.
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):
            held.enter_context(lock)
        yield
