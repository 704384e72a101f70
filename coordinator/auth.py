"""Who may use this coordinator, and how much: API keys and their limits, for both faces.

A face hands the token of a call to `Gate.enter`, which says who calls or refuses; what the call then does is
counted by `Gate.holding`, in the one place where sequences begin. A call that may be free of charge goes
through `Gate.recognise`, and is `charged` where it turns out to begin a request. Pure but for `principal`,
the variable that carries the caller from the face to that place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import ResourceExhaustedError, UnauthenticatedError
from paceline.core.security.keys import KeyRing

ROOM_SECONDS = 1.0
"""What a caller with too many sequences is told to wait: nobody knows when one of them ends."""


class NeverFitsError(ResourceExhaustedError):
    """More sequences than the key may ever have at a time: waiting does not help."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a call. Two calls of the same `name` are of the same tenant."""

    name: str
    """Empty where the server has no keys: everybody is the same tenant then."""
    max_sequences: int | None = None
    owes: int | None = None
    """The rate, in requests a minute, of which nothing was taken for this call; None once that was done, and
    where there is no limit."""


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
        self._buckets: dict[tuple[str, int], TokenBucket] = {}
        """By the key's name and rate: a key with another rate has another bucket."""
        self._held: dict[str, int] = {}

    @property
    def asks_for_keys(self) -> bool:
        """True if a call needs a key."""
        return self._keys is not None

    def replace(self, keys: KeyRing) -> None:
        """Other keys from now on. A key whose rate is as before keeps its count; sequences stay counted."""
        same = {(key.name, key.requests_per_minute) for key in keys.keys}
        self._buckets = {of: bucket for of, bucket in self._buckets.items() if of in same}
        self._keys = keys

    def enter(self, token: str | None) -> Principal:
        """The caller, of whose rate one request is taken.

        Raises UnauthenticatedError, in the same words for every wrong token and for none at all, or
        ResourceExhaustedError with the time until the next request.
        """
        return self.charged(self.recognise(token))

    def recognise(self, token: str | None) -> Principal:
        """The caller, of whose rate nothing is taken yet. Raises UnauthenticatedError as `enter` does."""
        if self._keys is None:
            return ANYBODY
        key = self._keys.find(token) if token else None
        if key is None:
            raise UnauthenticatedError("a valid API key is required")
        return Principal(key.name, key.max_sequences, key.requests_per_minute)

    def charged(self, caller: Principal) -> Principal:
        """The same caller once a request was taken of its rate, which for one call is done once.

        Raises ResourceExhaustedError with the time until the next request.
        """
        if caller.owes is None:
            return caller
        of = caller.name, caller.owes
        bucket = self._buckets.setdefault(of, TokenBucket(caller.owes, caller.owes / 60))
        seconds = bucket.take(self._clock())
        if seconds:
            message = f"this API key's limit of {caller.owes} requests a minute is reached"
            raise ResourceExhaustedError(message, seconds)
        return replace(caller, owes=None)

    def charge(self) -> Principal:
        """The same of who calls now, which the rest of the call is told as well."""
        caller = self.charged(principal.get())
        principal.set(caller)
        return caller

    @contextlib.contextmanager
    def holding(self, caller: Principal, sequences: int) -> Iterator[None]:
        """Count the caller's sequences for as long as the block lasts. Raises ResourceExhaustedError."""
        self.hold(caller, sequences)
        try:
            yield
        finally:
            self.let_go(caller, sequences)

    def hold(self, caller: Principal, sequences: int) -> None:
        """Count the caller's sequences until they are let go, at once or in parts.

        Raises ResourceExhaustedError; NeverFitsError where the caller may not have as many at all.
        """
        held, most = self._held.get(caller.name, 0) + sequences, caller.max_sequences
        if most is not None and sequences > most:
            message = f"this API key allows {most} sequences at a time, and this asks for {sequences}"
            raise NeverFitsError(message)
        if most is not None and held > most:
            message = f"this API key's limit of {most} sequences at a time is reached"
            raise ResourceExhaustedError(message, ROOM_SECONDS)
        self._held[caller.name] = held

    def let_go(self, caller: Principal, sequences: int) -> None:
        """Count so many of those that are held no more."""
        held = self._held[caller.name] - sequences
        if held:
            self._held[caller.name] = held
        else:
            del self._held[caller.name]


class Group:
    """Requests of one caller that come together: the first that begins has the sequences of all counted.

    So there is room for all of them, or none begins. To each it is what the gate is to one that comes alone.
    """

    def __init__(self, gate: Gate, sequences: int) -> None:
        """`sequences` are those of all its requests together."""
        self._gate = gate
        self._uncounted = sequences
        self._spare = 0
        """Counted for requests that have not begun."""
        self._caller = ANYBODY

    @contextlib.contextmanager
    def holding(self, caller: Principal, sequences: int) -> Iterator[None]:
        """As `Gate.holding`, for one of its requests."""
        if self._uncounted:
            self._gate.hold(caller, self._uncounted)
            self._caller, self._spare, self._uncounted = caller, self._uncounted, 0
        self._spare -= sequences
        try:
            yield
        finally:
            self._gate.let_go(caller, sequences)

    def close(self) -> None:
        """None of its requests will begin any more: let go what was counted for them."""
        if self._spare:
            self._gate.let_go(self._caller, self._spare)
            self._spare = 0


def bearer(values: Iterable[str]) -> str | None:
    """The token of the one `authorization` header of a call; None for any other number or form of them."""
    headers = list(values)
    scheme, _, token = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    return token.strip() or None if scheme.lower() == "bearer" else None
