"""Tracks a server's running calls and refuses new ones during shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from paceline.core.errors import UnavailableError
from paceline.rpc.security.auth import Context, is_open


class RunningCalls:
    """Counts running handlers; refuses new calls after `close`."""

    def __init__(self) -> None:
        self._running = 0
        self._refusal = ""
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    def close(self, why: str) -> None:
        """Refuse all further calls except health checks with UNAVAILABLE, so that clients try another server
        or try again later."""
        self._refusal = why

    def check(self, _context: Context, method: str) -> None:
        """Raises UnavailableError after `close`."""
        if self._refusal and not is_open(method):
            raise UnavailableError(self._refusal)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a running handler during the block."""
        self._running += 1
        self._none_runs.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._none_runs.set()

    async def all_ended(self, seconds: float) -> None:
        """Wait until no handler runs, for at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._none_runs.wait()
