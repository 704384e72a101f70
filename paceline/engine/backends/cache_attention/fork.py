"""The rows of one block table of which some see other entries than the table's: a tree, or branches. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.engine.layout import SequenceRows


@dataclass(slots=True)
class Fork:
    """Rows that share a gather. Each sees the first entries of the table, then some beside it.

    The lists have an item for each row.
    """

    longest: SequenceRows
    """The sequence that sees most of the table."""
    rows: list[int] = field(default_factory=list)
    """Rows of the pass."""
    positions: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    """Number of entries of the table that the row sees, from position 0 on."""
    seen: list[list[int]] = field(default_factory=list)
    """The places in `own` of the other entries that it sees, in the order of their positions."""
    own: dict[int, int] = field(default_factory=dict)
    """The slot and the position of each entry beside the table that any row sees."""

    @classmethod
    def of(cls, members: Sequence[SequenceRows]) -> Fork:
        """The rows of sequences of one table, in their order."""
        fork, columns = cls(max(members, key=lambda m: m.shared)), dict[int, int]()
        for m in members:
            shared = m.shared
            for position, slot in enumerate(m.own[: m.stop - shared], shared):
                columns.setdefault(slot, len(columns))
                fork.own[slot] = position
            own = [columns[slot] for slot in m.own[: m.stop - shared]]
            for position in range(m.start, m.stop):
                fork.shared.append(min(position + 1, shared))
                fork.seen.append(own[: max(0, position + 1 - shared)])
            fork.rows += range(m.first, m.first + m.count)
            fork.positions += range(m.start, m.stop)
        return fork

    @property
    def num_shared(self) -> int:
        """Number of entries of the table that any row sees."""
        return max(self.shared)


def forks_of(sequences: Iterable[SequenceRows]) -> list[Fork]:
    """All rows of a pass by block table, one without own entries included."""
    tables: dict[int, list[SequenceRows]] = {}
    for sequence in sequences:
        tables.setdefault(sequence.table, []).append(sequence)
    return [Fork.of(members) for members in tables.values()]
