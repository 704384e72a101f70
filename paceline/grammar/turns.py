"""Fair queueing of structure checks by tenant, and a cache of their results. No I/O.

Tenants take turns, so that a tenant with many structures delays others by one at a time. Results are cached
per tenant, so that response times reveal nothing about other tenants' structures.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")


class Turns(Generic[Item]):
    """A queue per tenant; tenants take turns."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()
        """The non-empty queues; the first tenant is next."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def of(self, tenant: str) -> int:
        """Number of the tenant's waiting items."""
        return len(self._queues.get(tenant, ()))

    def add(self, tenant: str, item: Item) -> None:
        """Append an item to the tenant's queue."""
        self._queues.setdefault(tenant, deque()).append(item)

    def remove(self, tenant: str, item: Item) -> bool:
        """Remove a waiting item; False if it is not waiting."""
        queue = self._queues.get(tenant)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        if not queue:
            del self._queues[tenant]
        return True

    def next(self) -> Item | None:
        """Remove and return the next item; its tenant becomes last in turn."""
        if not self._queues:
            return None
        tenant, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        return item


class Memory(Generic[Key, Found]):
    """A bounded cache by tenant; evicts the least recently used entry of the tenant with the most entries."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, OrderedDict[Key, Found]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def get(self, tenant: str, key: Key) -> Found | None:
        """The cached value, or None."""
        known = self._known.get(tenant)
        if known is None or key not in known:
            return None
        known.move_to_end(key)
        return known[key]

    def put(self, tenant: str, key: Key, found: Found) -> None:
        """Store a value, evicting another if the cache is full."""
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
