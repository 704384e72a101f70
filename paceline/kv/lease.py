"""Leases: expire keys that have been idle too long, on an injected clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from paceline.core.clock import Clock

Key = TypeVar("Key", bound=Hashable)


class Leases(Generic[Key]):
    """Keys, each alive for `duration` seconds after its last `renew`.

    All leases have equal length and the clock is monotonic, so keys expire in the order of their renewal.
    Every operation is O(1), plus the keys that `expired` returns.
    """

    def __init__(self, clock: Clock, duration: float) -> None:
        if not duration > 0:
            raise ValueError(f"duration must be positive, got {duration}")
        self._clock = clock
        self._duration = duration
        self._deadlines: OrderedDict[Key, float] = OrderedDict()

    def renew(self, key: Key) -> None:
        """Start or restart the lease of `key`."""
        self._deadlines[key] = self._clock() + self._duration
        self._deadlines.move_to_end(key)

    def end(self, key: Key) -> None:
        """Remove `key`; an unknown key is ignored."""
        self._deadlines.pop(key, None)

    def expired(self) -> list[Key]:
        """Keys whose deadline is reached, longest idle first. They stay until `end`."""
        now = self._clock()
        keys: list[Key] = []
        for key, deadline in self._deadlines.items():
            if deadline > now:
                break
            keys.append(key)
        return keys

    @property
    def next_deadline(self) -> float | None:
        """Time at which the next lease expires; None without leases."""
        return next(iter(self._deadlines.values()), None)

    def __iter__(self) -> Iterator[Key]:
        """Keys, longest idle first, which is the order of eviction."""
        return iter(list(self._deadlines))

    def __contains__(self, key: object) -> bool:
        return key in self._deadlines

    def __len__(self) -> int:
        return len(self._deadlines)
