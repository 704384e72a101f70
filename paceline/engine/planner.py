"""Which rows the next pass feeds: a pure decision over the work that is ready.

Short feeds (a verification, a decode step) go first, in order of arrival; what the budget leaves goes
to prefill chunks, for which a share is kept so that no stream of short feeds can starve them. The rows
whose logits are wanted stay together in the last chunk of a feed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREFILL_SHARE = 4
"""While a prefill waits, one row in so many is kept for it."""


@dataclass(frozen=True, slots=True)
class Feed:
    """`remaining` tokens to feed for one sequence; logits are wanted of the last `rows` of them."""

    sequence_id: str
    remaining: int
    rows: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Feed the next `count` tokens; `final` when they include all rows whose logits are wanted."""

    sequence_id: str
    count: int
    final: bool


def plan_pass(feeds: Sequence[Feed], budget: int) -> list[Chunk]:
    """Chunks of one pass, at most `budget` rows in all (feeds in order of arrival).

    Never empty when there is a feed, as long as no feed wants more rows than the budget. The oldest feed
    always gets on.
    """
    chunks: list[Chunk] = []
    left = budget
    kept = budget // PREFILL_SHARE if any(feed.remaining != feed.rows for feed in feeds) else 0
    for i, feed in enumerate(feeds):
        if feed.remaining == feed.rows and feed.rows <= left - (kept if i else 0):
            chunks.append(Chunk(feed.sequence_id, feed.rows, final=True))
            left -= feed.rows
    for feed in feeds:
        if feed.remaining == feed.rows:
            continue
        if feed.remaining <= left:
            chunks.append(Chunk(feed.sequence_id, feed.remaining, final=True))
            left -= feed.remaining
        else:
            count = min(left, feed.remaining - feed.rows)
            if count > 0:
                chunks.append(Chunk(feed.sequence_id, count, final=False))
                left -= count
    return chunks
