"""Invariant 5 from outside: the contents and holders of a worker's blocks, and what is cached.

Everything is compared with what the tables and the ledgers say, not with the bookkeeping's own counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from draft_worker.engine import DraftEngine
from paceline.engine.scheduling.sequences import HeldSequences
from paceline.kv import BlockTable
from paceline.kv.prefix import first_key, next_key
from tests.sim.toys import ToyRunner


def branch_tables(draft: DraftEngine) -> list[BlockTable]:
    """The tables of all branches and trees; with those of the sequences they own every used block."""
    regions: list[Any] = list(draft.regions)
    return [table for region in regions for table in region.tables]


class CacheChecker:
    """Looks at one worker between two steps; only if it does so always can it know every ledger."""

    def __init__(self, *, always: bool = True) -> None:
        self.always = always
        self.chains: dict[bytes, tuple[int, ...]] = {}
        """The tokens of every block's worth of ledger that the worker was ever told of, by key."""

    def check(
        self, runner: ToyRunner, sequences: HeldSequences[Any], branches: Iterable[BlockTable] = ()
    ) -> None:
        """Raises AssertionError."""
        pool = runner.pool
        pool.check_integrity()
        tables = [one.table for one in sequences]
        owners = Counter(block for table in (*tables, *branches) for block in table.blocks)
        known = pool.used_blocks == len(owners) and all(pool.count(b) == n for b, n in owners.items())
        assert known, "invariant 5: a block has an owner that does not know it, or none"
        shared = [block for block, count in owners.items() if count > 1]
        assert all(pool.is_kept(b) for b in shared), "invariant 5: a block belongs to two sequences"
        for one in sequences:
            own = runner.read(one.table) == one.session.cached
            assert own, "invariant 5: a cache entry does not hold its own token"
        self._check_index(runner, sequences)

    def _check_index(self, runner: ToyRunner, sequences: HeldSequences[Any]) -> None:
        index, size = sequences.prefix_index, runner.pool.block_size
        if index is None:
            assert not runner.pool.cached_blocks, "invariant 5: blocks are cached without an index"
            return
        index.check_integrity()
        for one in sequences:
            self._learn(one.session.params.cache_salt, one.session.tokens, size)
        for key, block in index.items() if self.always else ():
            tokens = self.chains.get(key)
            assert tokens is not None, "invariant 5: a cached block is no part of any ledger of its salt"
            held = tuple(runner.memory[block * size + i] for i in range(size))
            assert held == tokens, "invariant 5: a cached block does not hold its own tokens"

    def _learn(self, salt: str, ledger: list[int], size: int) -> None:
        key = first_key(salt)
        for start in range(0, len(ledger) - size + 1, size):
            tokens = tuple(ledger[start : start + size])
            key = next_key(key, tokens)
            self.chains[key] = tokens
