"""Invalidation of numba's on-disk cache of machine code.

numba compares only a function's own source file, not the files of the functions it calls. After an upgrade
that changes only those, it would run stale code. This module compares all of these files.

numba's cache index is a pickle, and the code it names is executed: anyone who can write to the folder can run
code in this process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from llvmlite.binding import get_host_cpu_features
from numba import njit
from numba.core import config

log = logging.getLogger(__name__)

_IMPORTED: Final = re.compile(r"^from (([a-z]\w*)[\w.]*) import", re.MULTILINE)
_COMPILED: Final = re.compile(rf"^from (?:numba|llvmlite|{re.escape(__name__)})\b", re.MULTILINE)
_DIGITS: Final = 16
_not_kept: Final[list[str]] = []
"""numba's errors for functions without a writable cache folder."""
_told: Final[set[str]] = set()
"""Events that this process has already logged."""


def kept_on_disk(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with these options and an on-disk cache keyed by the text of the sources.

    Cached code of other source versions is removed. The sources are those of `sources_of`. Without a writable
    folder, or if a function's files cannot be read or written, every process compiles the function again.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        name = function.__qualname__
        function.__qualname__ = f"{name}_{_digest_of(function.__module__)}"
        try:
            dispatcher = njit(cache=True, **options)(function)
        except RuntimeError as error:
            _not_kept.append(str(error))
            return njit(**options)(function)
        _spare_callers(dispatcher)
        _remove_others(Path(dispatcher.stats.cache_path), function, name)
        return dispatcher

    return compiled


def warn_of_what_is_not_kept() -> None:
    """Log if there is no writable cache folder. Separate, because decoration may precede log setup."""
    if _not_kept:
        log.warning(
            "compiled code is not cached on disk, so every start compiles it again; set NUMBA_CACHE_DIR to a "
            "folder that only this user can write to, because code in it is executed (%s)",
            _not_kept[0],
        )


def _spare_callers(dispatcher: Any) -> None:
    """Keep cache errors, such as a full disk or a truncated file, from failing a call."""
    # These are private names of numba. If they change, its errors reach the callers again.
    with contextlib.suppress(AttributeError):
        cache = dispatcher._cache
        flush, save, load = cache.flush, cache.save_overload, cache.load_overload

        def load_or_log(*args: Any) -> Any:
            found = load(*args)
            if found is None:
                _log_compiling(cache.cache_path)
            return found

        def save_resetting_index(*args: Any) -> None:
            try:
                save(*args)
            except OSError:
                raise
            except Exception:  # an unreadable index would block saving for good
                flush()
                save(*args)

        cache.load_overload = _tolerant(load_or_log, "read")
        cache.save_overload = _tolerant(save_resetting_index, "written")


def _log_compiling(folder: str) -> None:
    """Log, once per process, why the process seems idle for up to a minute."""
    if "compiling" in _told:
        return
    _told.add("compiling")
    # Imported here, because top-level imports count as sources of compiled functions.
    from paceline.telemetry.steps import step

    step("compiling for this processor, once, which takes half a minute or more; cached in %s", folder)


def _tolerant(work: Callable[..., Any], done: str) -> Callable[..., Any]:
    """`work`, but None if it raises; `done` names the failed operation in the log."""

    def tolerant(*args: Any) -> Any:
        try:
            return work(*args)
        except Exception as error:  # a damaged pickle may raise anything
            if done not in _told:
                _told.add(done)
                log.warning("compiled code on disk cannot be %s, so it is compiled again: %r", done, error)
            return None

    return tolerant


@functools.cache
def _digest_of(module: str) -> str:
    """Digest of the module's sources, and of the processor if environment variables override it for numba."""
    digest = hashlib.sha256()
    for path in sources_of(module):
        digest.update(path.read_bytes())
    named = any(getattr(config, name, None) for name in ("CPU_NAME", "CPU_FEATURES"))
    if named or not getattr(config, "ENABLE_AVX", True):
        # numba then keys its cache by the overridden processor and features, but memory layout may depend on
        # the actual ones.
        digest.update(get_host_cpu_features().flatten().encode())
    return digest.hexdigest()[:_DIGITS]


def sources_of(module: str) -> list[Path]:
    """The source files of this module's compiled functions, sorted by module name.

    They are the module's own file, and transitively the files of the same package that files with compiled
    functions import.
    """
    found: dict[str, Path] = {}
    waiting, package = {module}, module.partition(".")[0]
    while waiting:
        name = waiting.pop()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ImportError(f"no file of module {name}")
        found[name] = Path(spec.origin)
        text = found[name].read_text(encoding="utf-8")
        if _COMPILED.search(text):
            imported = {name for name, first in _IMPORTED.findall(text) if first == package}
            waiting |= imported - found.keys()
    return [path for _, path in sorted(found.items())]


def _remove_others(folder: Path, function: Callable[..., Any], name: str) -> None:
    file = Path(function.__code__.co_filename).stem
    for path in folder.glob(f"{file}.{name}_{'?' * _DIGITS}-*.nb[ci]"):
        if not path.name.startswith(f"{file}.{function.__qualname__}-"):
            # Another process may have removed it, or the folder may be read-only.
            with contextlib.suppress(OSError):
                path.unlink()
