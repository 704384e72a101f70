"""Branches of one sequence, as bookkeeping: they share the sequence's entries and add their own.

A branch sees the first entries of its sequence's table and then its own entries. All branches of the sequence
keep their own entries in one shared region, so that one pass can feed them all as rows of a tree. The table
itself does not change until a branch is adopted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.errors import ResourceExhaustedError
from paceline.kv.table import BlockTable


@dataclass(slots=True, eq=False)
class Branch:
    """One branch: entries [0, kept) of the table, then `own` places of the region."""

    of: Branching
    kept: int
    own: list[int] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    """Places reserved for later entries."""

    @property
    def length(self) -> int:
        """Number of entries, which is the position of the next one."""
        return self.kept + len(self.own)

    def reserve(self, count: int) -> list[int]:
        """Reserve places for `count` more entries. Raises ResourceExhaustedError if the region is full."""
        missing = count - len(self.room)
        if missing > 0:
            self.room.extend(self.of.take(missing))
        return self.room[:count]

    def commit(self, count: int) -> None:
        """Turn the first `count` reserved places into entries that hold values."""
        self.own += self.room[:count]
        del self.room[:count]

    def cut(self, length: int) -> Branch:
        """A branch of the first `length` entries that shares their places; at least the table's entries."""
        return Branch(self.of, self.kept, self.own[: length - self.kept])

    def own_slots(self, more: int = 0) -> list[int]:
        """Slots of its own entries, and of the next `more` reserved ones."""
        return [self.of.slots[place] for place in (*self.own, *self.room[:more])]

    def slots(self, more: int = 0) -> list[int]:
        """Slots of all entries in order of position, and of the next `more` reserved ones."""
        return self.of.trunk.slots(0, self.kept) + self.own_slots(more)


class Branching:
    """The branches over one table, which must not change while they are in use."""

    def __init__(self, trunk: BlockTable, room: int) -> None:
        """`room`: maximum number of own entries of all branches together.

        Raises ResourceExhaustedError if the pool has too few blocks.
        """
        self.trunk = trunk
        self._region = BlockTable(trunk.pool)
        self._region.reserve(room)
        self.slots = self._region.slots(0, room)
        """Slot of every place in the region."""
        self.used = 0
        """Number of places in use."""

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """All tables whose blocks are used by branches."""
        return (self._region,)

    def branch(self, kept: int, parent: Branch | None = None) -> Branch:
        """A branch after the table's first `kept` entries, or after all entries of `parent`."""
        if parent is not None:
            return Branch(self, parent.kept, list(parent.own))
        if not 0 <= kept <= self.trunk.length:
            raise ValueError(f"cannot keep {kept} entries, the table has {self.trunk.length}")
        return Branch(self, kept)

    def take(self, count: int) -> range:
        """Take new places. Raises ResourceExhaustedError if the region is full."""
        if self.used + count > len(self.slots):
            raise ResourceExhaustedError(f"{count} places are needed, {len(self.slots) - self.used} are free")
        self.used += count
        return range(self.used - count, self.used)

    def free(self) -> None:
        """Release the region's blocks. No branch may be used afterwards."""
        self._region.free()
