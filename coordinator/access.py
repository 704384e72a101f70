"""Who may use this coordinator, and how much: API keys and their limits, for both faces.

A face hands the token of a call to `Gate.enter`, which says who calls or refuses; what the call then does is
counted by `Gate.holding`, in the one place where sequences begin. Pure but for `principal`, the variable that
carries the caller from the face to that place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import ResourceExhaustedError, UnauthenticatedError
from paceline.core.keys import ApiKey, KeyRing

ROOM_SECONDS = 1.0
"""What a caller with too many sequences is told to wait: nobody knows when one of them ends."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a call. Two calls of the same `name` are of the same tenant."""

    name: str
    """Empty where the server has no keys: everybody is the same tenant then."""
    max_sequences: int | None = None


ANYBODY = Principal("")
principal: ContextVar[Principal] = ContextVar("principal", default=ANYBODY)
"""The caller of the request that the present task works for."""


@dataclass(slots=True)
class TokenBucket:
    """`capacity` requests at once, and `rate` more a second. Pure: told the time."""

    capacity: float
    rate: float
    _tokens: float = field(init=False)
    _seen: float | None = None

    def __post_init__(self) -> None:
        """A new bucket is full."""
        self._tokens = self.capacity

    def take(self, now: float) -> float:
        """0 if one was there and is taken; else the seconds until there is one."""
        if self._seen is not None:
            self._tokens = min(self.capacity, self._tokens + max(0.0, now - self._seen) * self.rate)
        self._seen = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self.rate


class Gate:
    """The keys of a coordinator and what each of them uses just now."""

    def __init__(self, keys: KeyRing | None = None, clock: Clock = monotonic) -> None:
        """`keys` None admits everybody without limits; an empty ring admits nobody."""
        self._clock = clock
        self._keys = keys
        self._buckets: dict[str, TokenBucket] = {}
        self._held: dict[str, int] = {}

    @property
    def asks_for_keys(self) -> bool:
        """True if a call needs a key."""
        return self._keys is not None

    def replace(self, keys: KeyRing) -> None:
        """Other keys from now on. A key whose rate is as before keeps its count; sequences stay counted."""
        rates = {key.name: key.requests_per_minute for key in self._keys.keys} if self._keys else {}
        same = {key.name for key in keys.keys if rates.get(key.name) == key.requests_per_minute}
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if name in same}
        self._keys = keys

    def enter(self, token: str | None) -> Principal:
        """The caller, of whose rate one request is taken.

        Raises UnauthenticatedError, in the same words for every wrong token and for none at all, or
        ResourceExhaustedError with the time until the next request.
        """
        if self._keys is None:
            return ANYBODY
        key = self._keys.find(token) if token else None
        if key is None:
            raise UnauthenticatedError("a valid API key is required")
        if key.requests_per_minute is not None:
            seconds = self._bucket(key, key.requests_per_minute).take(self._clock())
            if seconds:
                message = f"this API key's limit of {key.requests_per_minute} requests a minute is reached"
                raise ResourceExhaustedError(message, seconds)
        return Principal(key.name, key.max_sequences)

    def _bucket(self, key: ApiKey, per_minute: int) -> TokenBucket:
        bucket = self._buckets.get(key.name)
        if bucket is None:
            bucket = self._buckets[key.name] = TokenBucket(per_minute, per_minute / 60)
        return bucket

    @contextlib.contextmanager
    def holding(self, caller: Principal, sequences: int) -> Iterator[None]:
        """Count the caller's sequences for as long as the block lasts. Raises ResourceExhaustedError."""
        self._hold(caller, sequences)
        try:
            yield
        finally:
            self._let_go(caller, sequences)

    def _hold(self, caller: Principal, sequences: int) -> None:
        held = self._held.get(caller.name, 0) + sequences
        if caller.max_sequences is not None and held > caller.max_sequences:
            message = f"this API key's limit of {caller.max_sequences} sequences at a time is reached"
            raise ResourceExhaustedError(message, ROOM_SECONDS if sequences <= caller.max_sequences else None)
        self._held[caller.name] = held

    def _let_go(self, caller: Principal, sequences: int) -> None:
        held = self._held[caller.name] - sequences
        if held:
            self._held[caller.name] = held
        else:
            del self._held[caller.name]


def bearer(values: Iterable[str]) -> str | None:
    """The token of the one `authorization` header of a call; None for any other number or form of them."""
    headers = list(values)
    scheme, _, token = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    return token.strip() or None if scheme.lower() == "bearer" else None
