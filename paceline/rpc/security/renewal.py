"""Certificates that are renewed while a process serves: files are read again once they have changed.

Whoever shakes hands asks for the present files. They are looked at then, not at times: a handshake takes a
thousand times as long. Files that cannot be used leave those before in use, and are told of once. A renewal
replaces several files one after another, so that between two of them they may not fit together.
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
    """Something made of certificate files, and made again when they have changed. For any thread."""

    def __init__(self, tls: Tls, make: Callable[[Tls], Made], port: str) -> None:
        """`make` raises InvalidArgumentError for files that cannot be used, also here; `port` is named in log
        lines."""
        self._tls = tls
        self._make = make
        self._port = port
        self._lock = threading.Lock()
        # Before they are read: a change while they are is seen later.
        self._stamp = _stamp(tls)
        self._made = make(tls)

    def changed(self) -> Made | None:
        """What the files make where they have changed since they were last asked for, and can be used."""
        with self._lock:
            stamp = _stamp(self._tls)
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            try:
                self._made = self._make(self._tls)
            except InvalidArgumentError as error:
                log.error("the certificate of %s stays as it was: %s", self._port, error)  # noqa: TRY400
                return None
        log.info("%s has a renewed certificate, from %s", self._port, self._tls.certificate)
        return self._made

    @property
    def present(self) -> Made:
        """What the newest usable files make."""
        self.changed()
        return self._made


def _stamp(tls: Tls) -> Stamp:
    return tuple(_stamp_of(file) for file in (tls.certificate, tls.key, tls.ca))


def _stamp_of(file: str) -> tuple[int, int, int] | None:
    """Changes when the file is written or replaced; None where it is not there."""
    try:
        found = os.stat(file) if file else None  # noqa: PTH116 - the same without an object
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)
