"""Which target a sequence goes to: one that has its prefix in the cache, within a bound of load. Pure.

A target keeps the cache of what it was sent, and of what it generated, until it needs the room. The router
remembers chained hashes of these tokens in blocks, for each target. It does not know what a target has
dropped since, so it can be wrong; that costs a prefill, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, Protocol, TypeVar

ROUTING_BLOCK: Final = 16
"""Tokens of a block. A target's own blocks may be larger; then a match rounds up."""
MAX_BLOCKS: Final = 1024
"""Blocks of a sequence that count: hashing them takes less than a millisecond."""
MAX_REMEMBERED: Final = 1 << 15
"""Blocks remembered of one target, half a million tokens; the least recently sent ones are forgotten."""
LOAD_BOUND: Final = 4
"""A sequence follows its prefix to a target with at most this many sequences more than the least loaded."""


class Target(Protocol):
    """What the router needs of a link."""

    @property
    def ready(self) -> bool: ...

    load: int


TargetT = TypeVar("TargetT", bound=Target)


def block_hashes(token_ids: Sequence[int], salt: str) -> list[int]:
    """A hash for each whole block, chained: equal hashes mean equal tokens from the beginning on.

    `salt` separates sequences that must not share cached prefixes.
    """
    ends = range(0, min(len(token_ids), MAX_BLOCKS * ROUTING_BLOCK) + 1, ROUTING_BLOCK)
    before, hashes = hash(salt), []
    for begin, end in pairwise(ends):
        before = hash((before, *token_ids[begin:end]))
        hashes.append(before)
    return hashes


class PrefixRouter:
    """Remembers what each target was sent."""

    def __init__(self) -> None:
        self._sent: dict[Target, OrderedDict[int, None]] = {}

    def choose(self, targets: Iterable[TargetT], token_ids: Sequence[int], salt: str) -> TargetT | None:
        """The ready target with the longest prefix of these tokens, of equal ones the least loaded.

        None if none is ready. A target beyond the bound of load is not considered.
        """
        ready = [target for target in targets if target.ready]
        if len(ready) < 2 or not any(target in self._sent for target in ready):
            return min(ready, key=lambda target: target.load, default=None)
        most = min(target.load for target in ready) + LOAD_BOUND
        hashes = block_hashes(token_ids, salt)
        within = [target for target in ready if target.load <= most]
        return min(within, key=lambda target: (-self._matched(target, hashes), target.load))

    def sent(self, target: Target, token_ids: Sequence[int], salt: str) -> None:
        """The target has these tokens in its cache now."""
        known = self._sent.setdefault(target, OrderedDict())
        for block in block_hashes(token_ids, salt):
            known[block] = None
            known.move_to_end(block)
        while len(known) > MAX_REMEMBERED:
            known.popitem(last=False)

    def forget(self, target: Target) -> None:
        """The target's cache is gone."""
        self._sent.pop(target, None)

    def _matched(self, target: Target, hashes: Sequence[int]) -> int:
        known = self._sent.get(target, ())
        return next((i for i, block in enumerate(hashes) if block not in known), len(hashes))
