"""Coordinators behind a host name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

ResolveBlocking = Callable[[str], Sequence[str]]
"""The IP addresses of a host name, IPv6 ones in brackets. Raises OSError."""


class HostName:
    """A name and the addresses of its latest answer. One question at a time, in a thread of its own, because
    the system's resolver blocks."""

    def __init__(self, host: str, port: str, resolve: ResolveBlocking) -> None:
        self.host = host
        self.addresses: tuple[str, ...] = ()
        """host:port of each; empty before the first answer. A question without an answer leaves them."""
        self._port = port
        self._resolve = resolve
        self._asking: Future[None] | None = None
        self._lock = threading.Lock()

    def ask(self) -> Future[None]:
        """Begin to ask, unless a question is under way. The future ends with the question, without an
        error."""
        with self._lock:
            if self._asking is None:
                self._asking = Future()
                threading.Thread(
                    target=self._ask, args=(self._asking,), name="paceline-resolve", daemon=True
                ).start()
            return self._asking

    def _ask(self, asking: Future[None]) -> None:
        try:
            found = tuple(f"{address}:{self._port}" for address in self._resolve(self.host))
            self.addresses = found or self.addresses
        except OSError:
            pass  # who finds no address at all says so
        finally:
            with self._lock:
                self._asking = None
            asking.set_result(None)
