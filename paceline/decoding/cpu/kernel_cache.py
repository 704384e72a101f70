"""Machine code that numba keeps on disk, and when it is out of date.

numba compares the text of a function's own file, and nothing of what the function calls in other files: an
upgrade that changed only those would run what was compiled of the old ones. Here all of them are compared.

numba's index of such code is a pickle, and what it names is run: whoever can write the folder can do whatever
the process may.
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
"""What numba said of each function that it found no folder for."""
_told: Final[set[str]] = set()
"""What could not be done with the files, once per process."""


def kept_on_disk(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Like `numba.njit` with these options; the code is kept on disk, by the text of its sources.

    What was kept of other versions of the sources is removed. `sources_of` says which files count. Where no
    folder can be written nothing is kept, and so it is of a function whose files cannot be read or written:
    every process compiles anew what it calls.
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
    """Log that there is no folder, if there is none. Functions may be decorated before there is a log."""
    if _not_kept:
        log.warning(
            "compiled code is not kept on disk, so every start compiles it anew; NUMBA_CACHE_DIR may name "
            "a folder for it, which nobody else may be able to write: what is in it is run (%s)",
            _not_kept[0],
        )


def _spare_callers(dispatcher: Any) -> None:
    """Let a call go on where numba would raise out of it: a full disk, a file that was cut short."""
    # All of it is numba's own; where it has other names, its errors are the callers' again.
    with contextlib.suppress(AttributeError):
        cache = dispatcher._cache
        flush, save, load = cache.flush, cache.save_overload, cache.load_overload

        def load_or_tell(*args: Any) -> Any:
            found = load(*args)
            if found is None:
                _tell_of_compiling(cache.cache_path)
            return found

        def save_in_a_new_index(*args: Any) -> None:
            try:
                save(*args)
            except OSError:
                raise
            except Exception:  # an index that cannot be read would be in the way for good
                flush()
                save(*args)

        cache.load_overload = _spared(load_or_tell, "read")
        cache.save_overload = _spared(save_in_a_new_index, "written")


def _tell_of_compiling(folder: str) -> None:
    """Once per process: whoever waits for it would else see it do nothing for a minute."""
    if "compiling" in _told:
        return
    _told.add("compiling")
    # Here, for what a module with compiled functions imports at its top is a source of them.
    from paceline.telemetry.steps import step

    step("compiling for this processor, once: half a minute or more; what is made is kept in %s", folder)


def _spared(work: Callable[..., Any], done: str) -> Callable[..., Any]:
    """The same, but None where it raises; `done` is what then cannot be done with the files."""

    def spared(*args: Any) -> Any:
        try:
            return work(*args)
        except Exception as error:  # a damaged pickle may raise anything
            if done not in _told:
                _told.add(done)
                log.warning("compiled code on disk cannot be %s, so it is compiled anew: %r", done, error)
            return None

    return spared


@functools.cache
def _digest_of(module: str) -> str:
    """Of its sources, and of the processor where numba is told of another one, or of less than it has."""
    digest = hashlib.sha256()
    for path in sources_of(module):
        digest.update(path.read_bytes())
    named = any(getattr(config, name, None) for name in ("CPU_NAME", "CPU_FEATURES"))
    if named or not getattr(config, "ENABLE_AVX", True):
        # numba keeps code by the processor that its variables name, and by what they leave of its features;
        # how numbers lie in memory may depend on the one that is there, and on all that it has.
        digest.update(get_host_cpu_features().flatten().encode())
    return digest.hexdigest()[:_DIGITS]


def sources_of(module: str) -> list[Path]:
    """The files whose text a compiled function of this module comes from, by name.

    They are the module's, and those of the package from which it or another one of them with compiled
    functions imports.
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
            # Another process may have done it, and a folder may be read only.
            with contextlib.suppress(OSError):
                path.unlink()
