"""The recorded shapes. A batch is padded to the smallest one that holds it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.core.limits import MAX_TREE_NODES
from paceline.engine.backends.cache_attention.fixed_forks import MAX_OWN

MAX_SEQUENCES: Final = 256
MAX_ROWS: Final = 17
MAX_BATCH_ROWS: Final = 544
"""Of all sequences: 32 with trees of 16 nodes, 16 of 32, 8 of 64."""
MAX_KEYS: Final = 2**18
"""Maximum keys of a batch's sequences together, if keys are gathered. Padding copies masked keys; above this,
grouping sequences by length is cheaper than saving a launch."""
_SMALLEST_KEYS: Final = 256
_FEW: Final = 8
"""Sequences up to which attention in place has buckets of keys: several workers may share a sequence, and
each takes an equal part of the bucket's keys."""
_SMALLEST_PART: Final = 1024
ROWS: Final = (1, 2, 3, 5, 9, MAX_ROWS)
"""One more than K for each K that is a power of two, and plain decoding."""
FORKED_ROWS: Final = (9, 17, 33, 1 + MAX_TREE_NODES)
"""The row before a tree and its nodes."""

MAX_FEED: Final = 2
"""Tokens that a chain may begin with: after a full acceptance the last draft token has no entry yet."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """`sequences` of `rows` new rows each, of which each sees up to `keys` entries of its sequence."""

    sequences: int
    rows: int
    keys: int
    scattered: bool = False
    """True if entries lie anywhere (chains on branches); else they lie in blocks, and `keys` is a whole
    number of blocks."""
    steps: int = 0
    """Number of rows chosen one after the other, each fed to the next; 0 for a pass that returns logits."""
    noisy: bool = False
    """True if some are chosen with noise."""
    ranks: int = 0
    """Number of next best tokens reported at each step."""
    support: tuple[float, int] | None = None
    """Mass and bound of the distributions that the rows are drawn from; None if they are not drawn."""


@dataclass(frozen=True, slots=True)
class ForkedBucket:
    """Passes with trees or branches: `forks` tables, each with `rows` new rows in its table and beside it.

    They see up to `keys` entries of the table, a whole number of blocks, and `MAX_OWN` beside it.
    """

    forks: int
    rows: int
    keys: int


def forked_bucket_of(
    forks: int, rows: int, keys: int, own: int = 0, *, max_keys: int, block_size: int
) -> ForkedBucket | None:
    """The bucket of a pass with trees or branches; None if it is too large for one.

    Args:
        forks: number of block tables.
        rows: rows of the table with most rows.
        keys: most entries of a table that any row sees.
        own: most entries beside a table.
        max_keys: the limit by the model's length.
        block_size: block size of the cache.
    """
    if not forks or not 0 < rows <= FORKED_ROWS[-1] or own > MAX_OWN or keys > max_keys:
        return None
    padded, height = _sequences(forks), next(size for size in FORKED_ROWS if size >= rows)
    width = -(-min(_width(keys), max_keys) // block_size) * block_size
    if padded * height > MAX_BATCH_ROWS or padded * width > MAX_KEYS:
        return None
    return ForkedBucket(padded, height, width)


def bucket_of(
    sequences: int, rows: int, keys: int, *, max_keys: int, block_size: int = 0, in_place: bool = False
) -> Bucket | None:
    """The bucket of a batch; None if the batch is too large for one.

    Args:
        sequences: number of sequences in the batch.
        rows: rows of the sequence with most rows.
        keys: keys of the longest sequence, including its new rows.
        max_keys: the limit by the model's length.
        block_size: block size of the cache; 0 for rows whose entries are scattered.
        in_place: keys are read where they lie, so that padding costs nothing.
    """
    if not 0 < sequences <= MAX_SEQUENCES or not 0 < rows <= MAX_ROWS or keys > max_keys:
        return None
    padded = _sequences(sequences)
    height = next(size for size in ROWS if size >= rows)
    width = _width_in_place(padded, keys, max_keys) if in_place else _width(keys)
    unit = block_size or 1
    width = -(-min(width, max_keys) // unit) * unit
    if padded * height > MAX_BATCH_ROWS or (padded * width > MAX_KEYS and not in_place):
        return None
    return Bucket(padded, height, width, scattered=not block_size)


def _width(keys: int) -> int:
    """Powers of two."""
    return max(_SMALLEST_KEYS, 1 << (keys - 1).bit_length())


def _width_in_place(sequences: int, keys: int, max_keys: int) -> int:
    """Powers of four for few sequences, else the most."""
    if sequences > _FEW:
        return max_keys
    return max(_SMALLEST_PART, 1 << 2 * ((keys - 1).bit_length() + 1 >> 1))


def _sequences(count: int) -> int:
    """Powers of two up to 8, then multiples of 8."""
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8
