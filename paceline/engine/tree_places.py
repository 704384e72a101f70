"""Where the nodes of a draft tree lie in a pass and in the cache. Pure.

One longest path, the trunk, is fed like a chain, at the end of the sequence's table. The entries of the other
nodes lie behind it: reserved, never committed. So the entries of a table are always those of one text, and
whatever cuts the table releases the others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import InvalidArgumentError
from paceline.core.types import depths_of


@dataclass(frozen=True, slots=True)
class Beside:
    """A node that is not on the trunk."""

    node: int
    shared: int
    """Number of its ancestors on the trunk: their entries are in the table."""
    own: tuple[int, ...]
    """Places behind the trunk: of its other ancestors, from the trunk on, then its own."""


@dataclass(frozen=True, slots=True)
class TreePlaces:
    """The places of the nodes of one tree."""

    depths: tuple[int, ...]
    """Of each node; 1 for a child of the root."""
    trunk: tuple[int, ...]
    """The nodes of a longest path from the root."""
    beside: tuple[Beside, ...]
    """The other nodes, in order. Number k has place k behind the trunk."""

    @classmethod
    def of(cls, parents: Sequence[int]) -> TreePlaces:
        """The places of the nodes with these parents, -1 standing for the root; no nodes have none.

        Raises InvalidArgumentError: `parents`, if a parent does not come before its child.
        """
        return _places(tuple(parents))

    def moves(self, path: Sequence[int]) -> tuple[int, list[int]]:
        """How to make the trunk's places hold an accepted path.

        Returns how many of its first nodes are on the trunk, and the places behind the trunk of all others,
        in order: the entries that belong into the table instead of the rest of the trunk.
        """
        kept = 0
        while kept < len(path) and path[kept] == self.trunk[kept]:
            kept += 1
        if kept == len(path):
            return kept, []
        places = {item.node: place for place, item in enumerate(self.beside)}
        return kept, [places[node] for node in path[kept:]]


@functools.lru_cache(maxsize=1024)
def _places(parents: tuple[int, ...]) -> TreePlaces:
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InvalidArgumentError("parents", f"node {node} has parent {parent}")
    depths = depths_of(parents)
    trunk: list[int] = []
    at = depths.index(max(depths)) if depths else -1
    while at >= 0:
        trunk.append(at)
        at = parents[at]
    trunk.reverse()
    # Of each node: how many of its ancestors and itself are on the trunk, and its places behind it.
    found: dict[int, tuple[int, tuple[int, ...]]] = {-1: (0, ())}
    on_trunk, beside = set(trunk), list[Beside]()
    for node, parent in enumerate(parents):
        shared, own = found[parent]
        if node in on_trunk:
            found[node] = shared + 1, ()
        else:
            found[node] = shared, (*own, len(beside))
            beside.append(Beside(node, *found[node]))
    return TreePlaces(tuple(depths), tuple(trunk), tuple(beside))
