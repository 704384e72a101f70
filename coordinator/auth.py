"""API keys and their limits, for gRPC and HTTP.

An API passes the token of a call to `Gate.enter`, which authenticates the caller or refuses. `Gate.holding`
counts the call's sequences, in the one place where sequences begin. A call that may be free of charge goes
through `Gate.recognise`, and is `charged` if it begins a request. The module is pure except for `principal`,
the variable that carries the caller from the API to that place.
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
"""Suggested wait for a caller with too many sequences; the end of a sequence cannot be predicted."""


class NeverFitsError(ResourceExhaustedError):
    """More sequences than the key may ever have at once, so waiting does not help."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller. Two calls with the same `name` belong to the same tenant."""

    name: str
    """Empty if the server has no keys; all callers are then the same tenant."""
    max_sequences: int | None = None
    owes: int | None = None
    """Rate, in requests a minute, not yet charged for this call; None once charged, or without a limit."""
    admin: bool = False
    """May profile workers."""


ANYBODY = Principal("")
principal: ContextVar[Principal] = ContextVar("principal", default=ANYBODY)
"""The caller of the request that the current task serves."""


@dataclass(slots=True)
class TokenBucket:
    """Allows `capacity` requests at once and `rate` more a second. Pure: the time is an argument."""

    capacity: float
    rate: float
    _tokens: float = field(init=False)
    _seen: float | None = None

    def __post_init__(self) -> None:
        """A new bucket is full."""
        self._tokens = self.capacity

    def take(self, now: float) -> float:
        """0 if a request is allowed and taken; else the seconds until the next one."""
        if self._seen is not None:
            self._tokens = min(self.capacity, self._tokens + max(0.0, now - self._seen) * self.rate)
        self._seen = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self.rate


class Gate:
    """The keys of a coordinator and their current use."""

    def __init__(self, keys: KeyRing | None = None, clock: Clock = monotonic) -> None:
        """`keys` None admits every caller without limits; an empty ring admits none."""
        self._clock = clock
        self._keys = keys
        self._buckets: dict[tuple[str, int], TokenBucket] = {}
        """By the key's name and rate: a key whose rate changes gets a new bucket."""
        self._held: dict[str, int] = {}

    @property
    def asks_for_keys(self) -> bool:
        """True if a call needs a key."""
        return self._keys is not None

    def replace(self, keys: KeyRing) -> None:
        """Replace the keys. A key with an unchanged rate keeps its count; sequences stay counted."""
        same = {(key.name, key.requests_per_minute) for key in keys.keys}
        self._buckets = {of: bucket for of, bucket in self._buckets.items() if of in same}
        self._keys = keys

    def enter(self, token: str | None) -> Principal:
        """Authenticate the caller and charge one request to its rate.

        Raises UnauthenticatedError, with the same message for a wrong and a missing token, or
        ResourceExhaustedError with the time until the next request.
        """
        return self.charged(self.recognise(token))

    def recognise(self, token: str | None) -> Principal:
        """Authenticate the caller without charging its rate. Raises UnauthenticatedError as `enter` does."""
        if self._keys is None:
            return ANYBODY
        key = self._keys.find(token) if token else None
        if key is None:
            raise UnauthenticatedError("a valid API key is required")
        return Principal(key.name, key.max_sequences, key.requests_per_minute, key.admin)

    def charged(self, caller: Principal) -> Principal:
        """The same caller after one request is charged to its rate, at most once a call.

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
        """Charge the current caller, for the rest of the call."""
        caller = self.charged(principal.get())
        principal.set(caller)
        return caller

    @contextlib.contextmanager
    def holding(self, caller: Principal, sequences: int) -> Iterator[None]:
        """Count the caller's sequences while the block lasts. Raises ResourceExhaustedError."""
        self.hold(caller, sequences)
        try:
            yield
        finally:
            self.let_go(caller, sequences)

    def hold(self, caller: Principal, sequences: int) -> None:
        """Count the caller's sequences until they are released, at once or in parts.

        Raises ResourceExhaustedError; NeverFitsError if the caller may never have that many.
        """
        held, most = self._held.get(caller.name, 0) + sequences, caller.max_sequences
        if most is not None and sequences > most:
            message = f"this API key allows {most} sequences at a time, and the call needs {sequences}"
            raise NeverFitsError(message)
        if most is not None and held > most:
            message = f"this API key's limit of {most} sequences at a time is reached"
            raise ResourceExhaustedError(message, ROOM_SECONDS)
        self._held[caller.name] = held

    def let_go(self, caller: Principal, sequences: int) -> None:
        """Release this many of the counted sequences."""
        held = self._held[caller.name] - sequences
        if held:
            self._held[caller.name] = held
        else:
            del self._held[caller.name]


class Group:
    """Requests of one caller that belong together. The first one to begin counts the sequences of all.

    Therefore all of them have room, or none begins. Each request uses the group like a gate.
    """

    def __init__(self, gate: Gate, sequences: int) -> None:
        """`sequences` is the total of all its requests."""
        self._gate = gate
        self._uncounted = sequences
        self._spare = 0
        """Sequences counted for requests that have not begun."""
        self._caller = ANYBODY

    @contextlib.contextmanager
    def holding(self, caller: Principal, sequences: int) -> Iterator[None]:
        """Like `Gate.holding`, for one of its requests."""
        if self._uncounted:
            self._gate.hold(caller, self._uncounted)
            self._caller, self._spare, self._uncounted = caller, self._uncounted, 0
        self._spare -= sequences
        try:
            yield
        finally:
            self._gate.let_go(caller, sequences)

    def close(self) -> None:
        """No further request will begin: release the sequences counted for them."""
        if self._spare:
            self._gate.let_go(self._caller, self._spare)
            self._spare = 0


def bearer(values: Iterable[str]) -> str | None:
    """The token of a call's only `authorization` header; None for several headers or another scheme."""
    headers = list(values)
    scheme, _, token = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    return token.strip() or None if scheme.lower() == "bearer" else None
