"""Decides which rows the next pass feeds: a pure decision over the ready work.

Short feeds (a verification, a decode step) go first, in order of arrival. The rest of the budget goes to
prefill chunks, for which a share is reserved so that short feeds cannot starve them. The rows whose logits
are wanted stay together in the last chunk of a feed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREFILL_SHARE = 4
"""While a prefill waits, one row in this many is reserved for it, up to the rows it may take."""
SCORED_ROWS = 256
"""Maximum rows of a pass over all scored feeds: each takes a vocabulary's width of memory, and more while its
log-probabilities are computed."""


@dataclass(frozen=True, slots=True)
class Feed:
    """`remaining` tokens to feed for one sequence; logits are wanted of the last `rows` of them.

    With `scored`, logits of all other rows are wanted as well, chunk by chunk.
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

    Prefill takes at most `most_prefill` rows, and no more are reserved for it, because the running streams
    wait for them. The result is never empty if there is a feed, as long as no feed wants more rows than the
    budget. The oldest feed always makes progress.
    """
    chunks: list[Chunk] = []
    left, scored_left = budget, SCORED_ROWS
    share = max(1, budget // PREFILL_SHARE)
    if most_prefill is not None:
        share = min(share, most_prefill)
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
