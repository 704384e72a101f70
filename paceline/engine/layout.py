"""The layout of one forward pass: its rows, their cache slots, and their visible entries. No tensors here.

One layout serves prompts, decode steps, verification rows, chains and branches, and every backend. A backend
derives the inputs of its kernels from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.engine.multi_step import ChainInput
from paceline.kv import BlockTable, Branch

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Feed `token_ids` at the end of `table`; return the logits of the last `num_logits` rows (may be 0)."""

    table: BlockTable
    token_ids: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class BranchInput:
    """Feed `token_id` at the end of `branch`; the logits of the row are wanted."""

    branch: Branch
    token_id: int


@dataclass(slots=True)  # not frozen: creation would take longer, and a pass has many
class SequenceRows:
    """Consecutive rows of a pass at the end of one sequence, or of one branch of a sequence.

    Its entries are at positions [0, length): first those of a block table, then its own. A row at position p
    sees the entries [0, p], of which the last is its own. Other rows of the same pass may write some of them,
    so all nodes of a tree can be fed together: one path in the table, the others as branches.
    """

    first: int
    """The index of its first row in the pass."""
    count: int
    """Number of rows, at least 1."""
    start: int
    """The position of its first row."""
    length: int
    """Number of entries, including those of its rows and those reserved for later steps of a chain."""
    table: int
    """Equal for sequences of a pass that share a block table."""
    block_size: int
    base: int | None
    """The slot of position 0 if the table's entries have consecutive slots."""
    blocks: Sequence[int]
    """The table's blocks otherwise."""
    own: Sequence[int] = ()
    """Slots of the last entries if they are not in the table, as for a branch. They may lie anywhere."""

    @property
    def stop(self) -> int:
        """Number of entries after its rows are written."""
        return self.start + self.count

    @property
    def shared(self) -> int:
        """Number of entries in the table."""
        return self.length - len(self.own)

    def slots(self, start: int, stop: int) -> Indices:
        """Slots of positions [start, stop)."""
        shared = self.length - len(self.own)
        if stop <= shared:
            return self.slots_in_table(start, stop)
        own = np.array(self.own[max(start - shared, 0) : stop - shared], dtype=np.int64)
        return own if start >= shared else np.concatenate([self.slots_in_table(start, shared), own])

    def slots_in_table(self, start: int, stop: int) -> Indices:
        """Slots of positions [start, stop) whose entries are in the table."""
        if self.base is not None:
            return np.arange(self.base + start, self.base + stop)
        size = self.block_size
        first = start // size
        blocks = np.array(self.blocks[first : -(-stop // size)], dtype=np.int64)
        slots: Indices = (blocks[:, None] * size + np.arange(size)).ravel()
        return slots[start - first * size : stop - first * size]

    def blocks_of_table(self, count: int) -> Sequence[int]:
        """The first `count` blocks of its table."""
        if self.base is None:
            return self.blocks[:count]
        first = self.base // self.block_size
        return range(first, first + count)


@dataclass(slots=True)
class PassLayout:
    """The rows of one pass, grouped by sequence."""

    rows: Indices
    """int64 [3, R]: the token, the position and the slot to write of each row."""
    sequences: Sequence[SequenceRows]
    """In the order of their rows."""
    wanted: Indices
    """int64 [W], increasing: the rows whose logits are wanted."""

    @classmethod
    def of_sequences(cls, inputs: Sequence[SequenceInput]) -> PassLayout:
        """Tokens at the end of block tables, with entries reserved for them."""
        if len(inputs) == 1:
            return cls._of_one(inputs[0])
        return cls._build([(item.table, item.token_ids, item.num_logits, 0) for item in inputs])

    @classmethod
    def of_branches(cls, inputs: Sequence[BranchInput]) -> PassLayout:
        """One token at the end of each branch, with an entry reserved for it."""
        return cls._build([(item.branch, (item.token_id,), 1, 0) for item in inputs])

    @classmethod
    def of_chains(cls, inputs: Sequence[ChainInput]) -> PassLayout:
        """The rows of the first step of each chain, with entries reserved for all steps."""
        return cls._build([(item.end, item.token_ids, 1, item.steps - 1) for item in inputs])

    @classmethod
    def _of_one(cls, item: SequenceInput) -> PassLayout:
        count = len(item.token_ids)
        sequence = _rows_at(item.table, 0, count, 0)
        start, stop = sequence.start, sequence.length
        rows = np.empty((3, count), dtype=np.int64)
        rows[0] = item.token_ids
        rows[1] = np.arange(start, stop)
        rows[2] = sequence.slots_in_table(start, stop)
        return cls(rows, [sequence], np.arange(count - item.num_logits, count))

    @classmethod
    def _build(cls, ends: Sequence[tuple[BlockTable | Branch, Sequence[int], int, int]]) -> PassLayout:
        """`ends`: table or branch, tokens, rows wanted from the end, entries reserved beyond them."""
        # Lists, because most sequences have few rows: an array operation costs as much as a dozen numbers.
        sequences: list[SequenceRows] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        for end, token_ids, num_logits, more in ends:
            first = len(tokens)
            sequence = _rows_at(end, first, len(token_ids), more)
            start, stop, base = sequence.start, sequence.start + sequence.count, sequence.base
            sequences.append(sequence)
            tokens += token_ids
            positions += range(start, stop)
            if base is not None and not sequence.own:
                slots += range(base + start, base + stop)
            else:
                slots += sequence.slots(start, stop).tolist()
            wanted += range(len(tokens) - num_logits, len(tokens))
        rows = np.array([tokens, positions, slots], dtype=np.int64)
        return cls(rows, sequences, np.array(wanted, dtype=np.int64))


def _rows_at(end: BlockTable | Branch, first: int, count: int, more: int) -> SequenceRows:
    start = end.length
    length = start + count + more
    own: Sequence[int] = ()
    if isinstance(end, Branch):
        own = end.own_slots(count + more)
        end = end.of.trunk
    shared = length - len(own)
    size = end.pool.block_size
    base = end.contiguous_start(shared)
    blocks = () if base is not None else end.blocks[: -(-shared // size)]
    return SequenceRows(first, count, start, length, id(end), size, base, blocks, own)
