"""Renewal of certificates in a running process: changed files are read again.

Files are checked at every handshake, which takes a thousand times as long as the check. Unusable files are
logged once, and the previous ones stay in use: a renewal replaces several files one after another, so they
may not match in between.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.core.errors import InvalidArgumentError
from paceline.core.security.tls import Tls

log = logging.getLogger(__name__)

Made = TypeVar("Made")
Stamp = tuple[tuple[int, int, int] | None, ...]


class Renewed(Generic[Made]):
    """An object built from certificate files, and rebuilt when they change. Thread-safe."""

    def __init__(self, tls: Tls, make: Callable[[Tls], Made], port: str) -> None:
        """`make` raises InvalidArgumentError for unusable files, also in this constructor. `port` is the name
        in log lines."""
        self._tls = tls
        self._make = make
        self._port = port
        self._lock = threading.Lock()
        # Taken before reading, so that a change during reading is noticed later.
        self._stamp = _stamp(tls)
        self._made = make(tls)

    def changed(self) -> Made | None:
        """The rebuilt object if the files have changed since the last call and are usable, else None."""
        with self._lock:
            stamp = _stamp(self._tls)
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            try:
                self._made = self._make(self._tls)
            except InvalidArgumentError as error:
                log.error("%s keeps its previous certificate: %s", self._port, error)  # noqa: TRY400
                return None
        log.info("%s has a renewed certificate, from %s", self._port, self._tls.certificate)
        return self._made

    @property
    def present(self) -> Made:
        """The object from the newest usable files."""
        self.changed()
        return self._made


def _stamp(tls: Tls) -> Stamp:
    return tuple(_stamp_of(file) for file in (tls.certificate, tls.key, tls.ca))


def _stamp_of(file: str) -> tuple[int, int, int] | None:
    """A value that changes when the file is written or replaced; None if missing."""
    try:
        found = os.stat(file) if file else None  # noqa: PTH116 - without creating a Path
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)
