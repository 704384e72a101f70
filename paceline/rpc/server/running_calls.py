"""The calls that run on a server, and whether it takes more of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from paceline.core.errors import UnavailableError
from paceline.rpc.security.auth import Context, is_open


class RunningCalls:
    """Counts calls while their handlers run; once it is closed it refuses others."""

    def __init__(self) -> None:
        self._running = 0
        self._refusal = ""
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    def close(self, why: str) -> None:
        """From here on every call but those of health is refused with UNAVAILABLE: clients may ask another
        server, or this one when it is back."""
        self._refusal = why

    def check(self, _context: Context, method: str) -> None:
        """Raises UnavailableError where no call is welcome any more."""
        if self._refusal and not is_open(method):
            raise UnavailableError(self._refusal)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """A handler runs for as long as the block lasts."""
        self._running += 1
        self._none_runs.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._none_runs.set()

    async def all_ended(self, seconds: float) -> None:
        """Wait until no handler runs, at most for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._none_runs.wait()
