"""One unary call at several coordinators: each is asked once, until one answers. No I/O."""

from __future__ import annotations

from typing import Generic, TypeVar

from paceline.client.channel import ClientClosedError, cut_by
from paceline.client.coordinators import HasAddress
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import PacelineError, UnavailableError

L = TypeVar("L", bound=HasAddress)


class UnaryTries(Generic[L]):
    """The tries of one call. It changes nothing at a server, so it may reach several."""

    def __init__(self, timeout: float | None, clock: Clock = monotonic) -> None:
        """`timeout` seconds cover all tries together; None is no deadline."""
        self.tried: set[str] = set()
        self._number = 0
        self.broken: L | None = None
        """Where the last try was broken."""
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout

    @property
    def timeout(self) -> float | None:
        """Seconds left; None is no deadline."""
        return None if self._deadline is None else max(self._deadline - self._clock(), 0.0)

    def end_after(
        self, error: PacelineError, link: L | None, count: int, *, closed: bool
    ) -> PacelineError | None:
        """The error for the caller after a try at `link`, None if there was none to try. Returns None if
        another of `count` coordinators is to be asked."""
        error = cut_by(error, closed=closed)
        if link is None:
            return error
        self.broken = link
        self._number += 1
        is_break = isinstance(error, UnavailableError) and not isinstance(error, ClientClosedError)
        return None if is_break and self._number < count else error
