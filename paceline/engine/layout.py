"""The layout of one forward pass: its rows, their cache slots, and their visible entries. No tensors here.

One layout serves prompts, decode steps, verification rows, chains and branches, and every backend. A backend
derives the inputs of its kernels from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.engine.multi_step import ChainInput
from paceline.engine.tree_places import Beside, TreePlaces
from paceline.kv import BlockTable, Branch

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Feed `token_ids` at the end of `table`; return the logits of the last `num_logits` rows (may be 0).

    With `parents`, the last tokens are the nodes of a tree that follows the token before them. The table then
    grows by the trunk only, a longest path of the tree (tree_places.py).
    """

    table: BlockTable
    token_ids: Sequence[int]
    num_logits: int
    parents: tuple[int, ...] = ()
    """Of each node: an earlier node, or -1 for the token before the tree. Empty for consecutive tokens."""

    @property
    def entries(self) -> Sequence[int]:
        """The tokens by which the table grows."""
        if not self.parents:
            return self.token_ids
        before = len(self.token_ids) - len(self.parents)
        trunk = TreePlaces.of(self.parents).trunk
        return [*self.token_ids[:before], *(self.token_ids[before + node] for node in trunk)]


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
    """int64 [W]: the rows whose logits are wanted, in the order in which they are."""

    @classmethod
    def of_sequences(cls, inputs: Sequence[SequenceInput]) -> PassLayout:
        """Tokens at the end of block tables, with entries reserved for them."""
        if len(inputs) == 1 and not inputs[0].parents:
            return cls._of_one(inputs[0])
        rows = _Rows()
        for item in inputs:
            if item.parents:
                rows.add_tree(item.table, item.token_ids, item.num_logits, item.parents)
            else:
                rows.add(item.table, item.token_ids, item.num_logits)
        return rows.layout()

    @classmethod
    def of_branches(cls, inputs: Sequence[BranchInput]) -> PassLayout:
        """One token at the end of each branch, with an entry reserved for it."""
        rows = _Rows()
        for item in inputs:
            rows.add(item.branch, (item.token_id,), 1)
        return rows.layout()

    @classmethod
    def of_chains(cls, inputs: Sequence[ChainInput]) -> PassLayout:
        """The rows of the first step of each chain, with entries reserved for all steps."""
        rows = _Rows()
        for item in inputs:
            rows.add(item.end, item.token_ids, 1, more=item.steps - 1)
        return rows.layout()

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


@dataclass(slots=True)
class _Rows:
    """The rows of a layout in the making.

    Lists, because most sequences have few rows: an array operation costs as much as a dozen numbers.
    """

    sequences: list[SequenceRows] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)

    def add(
        self, end: BlockTable | Branch, token_ids: Sequence[int], num_logits: int, more: int = 0
    ) -> SequenceRows:
        """Tokens at the end of a table or branch, with `more` entries reserved beyond them."""
        sequence = _rows_at(end, len(self.tokens), len(token_ids), more)
        start, stop, base = sequence.start, sequence.stop, sequence.base
        self.sequences.append(sequence)
        self.tokens += token_ids
        self.positions += range(start, stop)
        if base is not None and not sequence.own:
            self.slots += range(base + start, base + stop)
        else:
            self.slots += sequence.slots(start, stop).tolist()
        self.wanted += range(len(self.tokens) - num_logits, len(self.tokens))
        return sequence

    def add_tree(
        self, table: BlockTable, token_ids: Sequence[int], num_logits: int, parents: tuple[int, ...]
    ) -> None:
        """Tokens of which the last are the nodes of a tree: a sequence for the trunk, then one a node."""
        places, first = TreePlaces.of(parents), len(self.tokens)
        before, beside = len(token_ids) - len(parents), [item.node for item in places.beside]
        order = [*range(before), *(before + node for node in (*places.trunk, *beside))]
        trunk = self.add(table, [token_ids[i] for i in order[: len(order) - len(beside)]], 0)
        own = table.slots(trunk.stop, trunk.stop + len(beside))
        for item in places.beside:
            node = _row_beside(table, len(self.tokens), trunk.start + before, item, own)
            self.sequences.append(node)
            self.tokens.append(token_ids[before + item.node])
            self.positions.append(node.start)
            self.slots.append(node.own[-1])
        rows = {i: row for row, i in enumerate(order, first)}
        self.wanted += (rows[i] for i in range(len(token_ids) - num_logits, len(token_ids)))

    def layout(self) -> PassLayout:
        """The pass of all rows added."""
        rows = np.array([self.tokens, self.positions, self.slots], dtype=np.int64)
        return PassLayout(rows, self.sequences, np.array(self.wanted, dtype=np.int64))


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


def _row_beside(table: BlockTable, row: int, root: int, item: Beside, slots: Sequence[int]) -> SequenceRows:
    """The row of a node beside the trunk; `root` is the position of the tree's first nodes."""
    shared, size = root + item.shared, table.pool.block_size
    base, length = table.contiguous_start(shared), root + item.shared + len(item.own)
    blocks = () if base is not None else table.blocks[: -(-shared // size)]
    own = [slots[place] for place in item.own]
    return SequenceRows(row, 1, length - 1, length, id(table), size, base, blocks, own)
