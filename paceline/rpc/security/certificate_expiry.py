"""Monitors the expiry of certificates: warnings at start, 30, 7 and 1 days before, and after expiry."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from paceline.core.security.tls import Tls
from paceline.rpc.security.certificate_keys import ends

log = logging.getLogger(__name__)

WARNING_DAYS: Final = (30, 7, 1)
CHECK_SECONDS: Final = 60.0
"""Interval of reading the files."""
_DAY: Final = 86400.0


def stage(days: float) -> int:
    """Number of warnings due at this many days before expiry, including the one after expiry."""
    return sum(days < bound for bound in (*WARNING_DAYS, 0))


class CertificateExpiry:
    """The certificate files of a process, by setting."""

    def __init__(
        self, settings: Mapping[str, Tls | None], now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """`settings`: TLS settings by prefix, such as `tls`; None means plain text."""
        self._files = {
            f"{prefix}_{name}": file
            for prefix, tls in settings.items()
            for name in ("certificate", "ca")
            if tls is not None and (file := getattr(tls, name))
        }
        self._now = now
        self._ends: dict[str, datetime] = {}
        self._told: dict[str, int] = {}

    def days_left(self) -> Mapping[str, float]:
        """Days until each file's certificate expires, by setting; negative after expiry."""
        now = self._now()
        return {name: (end - now).total_seconds() / _DAY for name, end in self._ends.items()}

    def check(self) -> None:
        """Read the files and log warnings, each once until the file is renewed."""
        for name, file in self._files.items():
            try:
                found = ends(Path(file).read_bytes())
            except OSError:
                continue  # the process keeps using the previous content
            # All certificates of a chain must be valid, but only one of several authorities.
            if found:
                self._ends[name] = max(found) if name.endswith("_ca") else min(found)
        for name, days in self.days_left().items():
            due = stage(days)
            if due > self._told.get(name, 0):
                self._warn(name, days)
            self._told[name] = due

    def _warn(self, name: str, days: float) -> None:
        file, end = self._files[name], self._ends[name].strftime("%Y-%m-%d %H:%M UTC")
        if days < 0:
            log.error("%s has expired: %s was valid until %s; handshakes fail", name, file, end)
        else:
            log.warning("%s expires in %.1f days: %s is valid until %s", name, days, file, end)

    async def watch(self) -> None:
        """Check periodically until cancelled."""
        while self._files:
            self.check()
            await asyncio.sleep(CHECK_SECONDS)
