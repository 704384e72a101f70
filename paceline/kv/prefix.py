"""The prefix cache: finds blocks by the tokens of their entries and of all entries before. No tensors here.

The key of a block is the hash of its tokens chained to the key of the block before it, and for the first
block to the salt. Equal keys therefore mean equal tokens at equal positions with an equal past, under one
salt, so the entries are equal. Only full blocks of committed tokens are indexed, and indexed blocks are not
written (pool.py, table.py).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import InternalError
from paceline.kv.pool import BlockPool
from paceline.kv.table import BlockTable

_KEY_BYTES = 32
"""Only keys are compared, not tokens, so two chains with one key must be infeasible to find."""


def first_key(salt: str) -> bytes:
    """The key that precedes a sequence's first block."""
    return hashlib.blake2b(salt.encode(), digest_size=_KEY_BYTES, person=b"salt").digest()


def next_key(key: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block with `tokens`, after a block with `key`."""
    content = key + struct.pack(f"<{len(tokens)}I", *tokens)
    return hashlib.blake2b(content, digest_size=_KEY_BYTES, person=b"block").digest()


class PrefixIndex:
    """Blocks of one pool by key. A block has at most one key."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.queries = 0
        """Number of looked up tokens over all sequences."""
        self.hits = 0
        """Number of looked up tokens whose entries were found."""
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        pool.on_discard = self._forget

    def __len__(self) -> int:
        return len(self._blocks)

    def items(self) -> Iterable[tuple[bytes, int]]:
        """Every key with its block."""
        return self._blocks.items()

    def find(self, key: bytes) -> int | None:
        """The block with this key."""
        return self._blocks.get(key)

    def enter(self, key: bytes, block: int) -> None:
        """Index `block`, which is final and held by the caller, unless its key is already indexed."""
        if key not in self._blocks and block not in self._keys:
            self.pool.keep(block)
            self._blocks[key] = block
            self._keys[block] = key

    def check_integrity(self) -> None:
        """Raise InternalError unless the index holds exactly the kept blocks."""
        kept = {block for block in range(self.pool.num_blocks) if self.pool.is_kept(block)}
        if {self._blocks[key] for key in self._keys.values()} != kept or len(self._blocks) != len(kept):
            raise InternalError("the prefix index and the block pool disagree on what is kept")

    def _forget(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]


@dataclass(slots=True)
class CachedPrefix:
    """The use of the index by one sequence: blocks it reuses and blocks it adds."""

    index: PrefixIndex
    table: BlockTable
    salt: str
    _keys: list[bytes] = field(default_factory=list)
    """Keys of the table's first blocks."""

    def extend(self, tokens: Sequence[int]) -> int:
        """Append the blocks that hold the entries of `tokens`, as far as the index has them.

        `tokens` begin at position 0 and end where reuse must end. Returns the number of entries added. A
        table that does not end with a block with a known key is left unchanged.
        """
        size, length = self.table.pool.block_size, self.table.length
        if len(self._keys) * size != length:
            return 0
        for start in range(length, len(tokens) - size + 1, size):
            key = self._next_key(tokens[start : start + size])
            block = self.index.find(key)
            if block is None:
                break
            self.table.share([block])
            self._keys.append(key)
        return self.table.length - length

    def enter(self, tokens: Sequence[int]) -> None:
        """Index the table's blocks that are full of committed `tokens` (from position 0 on)."""
        size = self.table.pool.block_size
        full = min(len(tokens), self.table.length) // size
        if full <= len(self._keys):
            return
        blocks = self.table.blocks
        for i in range(len(self._keys), full):
            key = self._next_key(tokens[i * size : (i + 1) * size])
            self.index.enter(key, blocks[i])
            self._keys.append(key)

    def withdraw(self, length: int) -> None:
        """Remove the table's blocks with entries at `length` and beyond from the index."""
        pool = self.table.pool
        for block in self.table.blocks[length // pool.block_size :]:
            if pool.is_kept(block):
                pool.discard(block)

    def cut_to(self, length: int) -> None:
        """Entries at `length` and beyond are gone, or belong to other tokens now."""
        del self._keys[length // self.table.pool.block_size :]

    def _next_key(self, tokens: Sequence[int]) -> bytes:
        return next_key(self._keys[-1] if self._keys else first_key(self.salt), tokens)
