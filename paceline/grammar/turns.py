"""Whose structure is next, and what was found about those of late. Pure.

Tenants take turns, so that one with many structures delays the others by one at a time. Nothing that one
tenant asked for is told to another, not even by how fast an answer comes: what was found is kept by tenant.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")


class Turns(Generic[Item]):
    """A queue for each tenant; the tenants take turns."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()
        """Those with somebody in them; the first one is next."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def of(self, tenant: str) -> int:
        """How many of the tenant's wait."""
        return len(self._queues.get(tenant, ()))

    def add(self, tenant: str, item: Item) -> None:
        """Put it behind the tenant's others."""
        self._queues.setdefault(tenant, deque()).append(item)

    def remove(self, tenant: str, item: Item) -> bool:
        """Take one out of its turn; False if it does not wait."""
        queue = self._queues.get(tenant)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        if not queue:
            del self._queues[tenant]
        return True

    def next(self) -> Item | None:
        """Take the next one out; its tenant is the last then."""
        if not self._queues:
            return None
        tenant, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        return item


class Memory(Generic[Key, Found]):
    """What was found lately, by tenant; the tenant with the most of it is the first to lose its oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, OrderedDict[Key, Found]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def get(self, tenant: str, key: Key) -> Found | None:
        """None if it is not known."""
        known = self._known.get(tenant)
        if known is None or key not in known:
            return None
        known.move_to_end(key)
        return known[key]

    def put(self, tenant: str, key: Key, found: Found) -> None:
        """Remember it, and forget another where there are too many."""
        known = self._known.setdefault(tenant, OrderedDict())
        self._size += key not in known
        known[key] = found
        known.move_to_end(key)
        if self._size > self._most:
            largest = max(self._known, key=lambda each: len(self._known[each]))
            self._known[largest].popitem(last=False)
            self._size -= 1
            if not self._known[largest]:
                del self._known[largest]
