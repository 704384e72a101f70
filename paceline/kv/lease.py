"""Leases: what has been idle for too long, on an injected clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from paceline.core.clock import Clock

Key = TypeVar("Key", bound=Hashable)


class Leases(Generic[Key]):
    """Keys, each alive for `duration` seconds after its last `renew`.

    All leases are equally long and the clock is monotonic, so the order of renewal is the order of
    expiry: every operation is O(1) but for the keys that `expired` returns.
    """

    def __init__(self, clock: Clock, duration: float) -> None:
        if not duration > 0:
            raise ValueError(f"duration must be positive, got {duration}")
        self._clock = clock
        self._duration = duration
        self._deadlines: OrderedDict[Key, float] = OrderedDict()

    def renew(self, key: Key) -> None:
        """Start the lease of `key`, or start it anew."""
        self._deadlines[key] = self._clock() + self._duration
        self._deadlines.move_to_end(key)

    def end(self, key: Key) -> None:
        """Forget `key`; an unknown key is fine (ending twice is harmless)."""
        self._deadlines.pop(key, None)

    def expired(self) -> list[Key]:
        """Keys whose lease is over (deadline reached), longest idle first. They stay until `end`."""
        now = self._clock()
        keys: list[Key] = []
        for key, deadline in self._deadlines.items():
            if deadline > now:
                break
            keys.append(key)
        return keys

    @property
    def next_deadline(self) -> float | None:
        """When the next lease is over, on the clock's scale; None without leases."""
        return next(iter(self._deadlines.values()), None)

    def __iter__(self) -> Iterator[Key]:
        """Keys, longest idle first: the order in which to evict."""
        return iter(list(self._deadlines))

    def __contains__(self, key: object) -> bool:
        return key in self._deadlines

    def __len__(self) -> int:
        return len(self._deadlines)
