"""Continuations of one sequence side by side, as bookkeeping: shared entries below, own ones above.

A branch sees the first entries of its sequence's table and, after them, entries of its own. Those lie in
places of one region that all branches of the sequence share, so that one pass can feed them all as rows of
a tree. The table itself is not touched until a branch is adopted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.errors import ResourceExhaustedError
from paceline.kv.table import BlockTable


@dataclass(slots=True, eq=False)
class Branch:
    """One continuation: entries [0, kept) of the table, then `own` places of the region."""

    of: Branching
    kept: int
    own: list[int] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    """Places kept for entries to come."""

    @property
    def length(self) -> int:
        """Entries it has: the position of the next one."""
        return self.kept + len(self.own)

    def reserve(self, count: int) -> list[int]:
        """Places for the next `count` entries. Raises ResourceExhaustedError when the region is full."""
        missing = count - len(self.room)
        if missing > 0:
            self.room.extend(self.of.take(missing))
        return self.room[:count]

    def commit(self, count: int) -> None:
        """Turn the first `count` reserved places into entries that hold values."""
        self.own += self.room[:count]
        del self.room[:count]

    def cut(self, length: int) -> Branch:
        """Its first `length` entries, at least those of the table, as a branch that shares their places."""
        return Branch(self.of, self.kept, self.own[: length - self.kept])

    def own_slots(self, more: int = 0) -> list[int]:
        """The slots of its own entries, and of the next `more` that are reserved."""
        return [self.of.slots[place] for place in (*self.own, *self.room[:more])]

    def slots(self, more: int = 0) -> list[int]:
        """The slot of every entry, in order of position, and of the next `more` that are reserved."""
        return self.of.trunk.slots(0, self.kept) + self.own_slots(more)


class Branching:
    """The branches over one table, which must not change while they are in use."""

    def __init__(self, trunk: BlockTable, room: int) -> None:
        """`room`: entries that all branches together may have of their own.

        Raises ResourceExhaustedError when the pool has no blocks for them.
        """
        self.trunk = trunk
        self._region = BlockTable(trunk.pool)
        self._region.reserve(room)
        self.slots = self._region.slots(0, room)
        """Slot of every place in the region."""
        self.used = 0
        """Places that were given out."""

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """Every table whose blocks are in use for branches."""
        return (self._region,)

    def branch(self, kept: int, parent: Branch | None = None) -> Branch:
        """A branch after the table's first `kept` entries, or after all that `parent` sees."""
        if parent is not None:
            return Branch(self, parent.kept, list(parent.own))
        if not 0 <= kept <= self.trunk.length:
            raise ValueError(f"cannot keep {kept} entries, the table has {self.trunk.length}")
        return Branch(self, kept)

    def take(self, count: int) -> range:
        """New places. Raises ResourceExhaustedError when the region is full."""
        if self.used + count > len(self.slots):
            raise ResourceExhaustedError(f"{count} places are needed, {len(self.slots) - self.used} are free")
        self.used += count
        return range(self.used - count, self.used)

    def free(self) -> None:
        """Give the region's blocks back; no branch may be used any more."""
        self._region.free()
