"""Which rows the next pass feeds: a pure decision over the work that is ready.

Short feeds (a verification, a decode step) go first, in order of arrival; what the budget leaves goes
to prefill chunks, for which a share is kept so that no stream of short feeds can starve them. The rows
whose logits are wanted stay together in the last chunk of a feed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREFILL_SHARE = 4
"""While a prefill waits, one row in so many is kept for it, as far as it may take them."""
SCORED_ROWS = 256
"""Rows a pass at most, over all feeds that are scored: each takes a vocabulary's width of memory, and more
while its log-probabilities are computed."""


@dataclass(frozen=True, slots=True)
class Feed:
    """`remaining` tokens to feed for one sequence; logits are wanted of the last `rows` of them.

    With `scored` those of all other rows are wanted as well, chunk by chunk.
    """

    sequence_id: str
    remaining: int
    rows: int
    scored: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Feed the next `count` tokens; `final` when they include all rows whose logits are wanted."""

    sequence_id: str
    count: int
    final: bool


def plan_pass(feeds: Sequence[Feed], budget: int, most_prefill: int | None = None) -> list[Chunk]:
    """Chunks of one pass, at most `budget` rows in all (feeds in order of arrival).

    Prefill takes at most `most_prefill` rows of it: the running streams wait for them. So no more is kept.
    Never empty when there is a feed, as long as no feed wants more rows than the budget. The oldest feed
    always gets on.
    """
    chunks: list[Chunk] = []
    left, scored_left = budget, SCORED_ROWS
    share = budget // PREFILL_SHARE if most_prefill is None else min(budget // PREFILL_SHARE, most_prefill)
    kept = share if any(feed.remaining != feed.rows for feed in feeds) else 0
    for i, feed in enumerate(feeds):
        if feed.remaining == feed.rows and feed.rows <= left - (kept if i else 0):
            chunks.append(Chunk(feed.sequence_id, feed.rows, final=True))
            left -= feed.rows
    if most_prefill is not None:
        left = min(left, most_prefill)
    for feed in feeds:
        if feed.remaining == feed.rows:
            continue
        room = min(left, scored_left) if feed.scored else left
        final = feed.remaining <= room
        count = feed.remaining if final else min(room, feed.remaining - feed.rows)
        if count > 0:
            chunks.append(Chunk(feed.sequence_id, count, final))
            left -= count
            scored_left -= count if feed.scored else 0
    return chunks
