"""The tokens before each row of a batch: context of penalties, min_tokens and bad words.

The context grows along a proposal as in plain decoding: row i of a chain follows the ledger and the first i
draft tokens; the row of a tree node follows the ledger and the path to that node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.decoding.rows.row_params import RowParams
from paceline.decoding.transfer import to_device


def ledger_counts(token_ids: Sequence[int], num_prompt_tokens: int, vocab_size: int) -> Tensor:
    """Occurrences of each token in a sequence: in the whole ledger, and among the generated tokens.

    A caller may keep the result and add 1 in both rows for each committed token.

    Args:
        token_ids: the ledger, prompt first.
        num_prompt_tokens: length of the prompt.
        vocab_size: V.

    Returns:
        int32 [2, V].
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    parts = (ids, ids[num_prompt_tokens:])
    counts = np.stack([np.bincount(part, minlength=vocab_size) for part in parts]).astype(np.int32)
    return torch.from_numpy(counts)


def counts_of(
    row_params: RowParams, ledger: Callable[[int], tuple[Sequence[int], int]], vocab_size: int
) -> list[Tensor | None]:
    """`ledger_counts` of each sequence that needs them, else None; on the device of the rows.

    A device gets the tokens and counts them, since counts are the larger ones: 8 bytes a token of the
    vocabulary.

    Args:
        row_params: parameters of the batch.
        ledger: gives a sequence's ledger and the length of its prompt.
        vocab_size: V.
    """
    counts: list[Tensor | None] = [None] * len(row_params.num_rows)
    if row_params.penalties is None:
        return counts
    sequences, device = row_params.penalties.sequences, row_params.penalties.rows.device
    ledgers = [ledger(i) for i in sequences]
    if device.type == "cpu":
        counted = [ledger_counts(*item, vocab_size) for item in ledgers]
    else:
        keys = []
        for row, (token_ids, prompt) in enumerate(ledgers):
            ids = np.asarray(token_ids, dtype=np.int64) + 2 * row * vocab_size
            keys += [ids, ids[prompt:] + vocab_size]
        sent = to_device(torch.from_numpy(np.concatenate(keys)), device)
        one = torch.ones((), dtype=torch.int32, device=device)
        whole = torch.zeros(2 * len(ledgers) * vocab_size, dtype=torch.int32, device=device)
        whole.scatter_add_(0, sent, one.expand(len(sent)))
        counted = list(whole.view(-1, 2, vocab_size).unbind())
    for i, own in zip(sequences, counted, strict=True):
        counts[i] = own
    return counts


@dataclass(frozen=True, slots=True)
class RowContext:
    """Context of each row: the ledger and the draft tokens before the row."""

    num_generated: Tensor
    """int64 [R], on the host: generated tokens before the row, drafts included."""
    counts: Tensor | None
    """int32 [P, 2, V] for the P rows with penalties: counts over all tokens and over generated tokens."""
    completes_bad_word: tuple[Tensor, Tensor] | None = None
    """int64 rows and tokens, on the host: pairs that would complete a bad word of several tokens."""

    @classmethod
    def build(
        cls,
        row_params: RowParams,
        num_generated: Sequence[int],
        drafts: Sequence[Sequence[int]],
        counts: Sequence[Tensor | None] = (),
        parents: Sequence[Sequence[int]] = (),
        ledgers: Sequence[Sequence[int]] = (),
    ) -> RowContext:
        """The context of proposals: row i of a chain follows the ledger and drafts[:i].

        Args:
            row_params: parameters of the batch; sequence s has len(drafts[s]) + 1 rows.
            num_generated: generated tokens in each sequence's ledger.
            drafts: draft tokens of each sequence.
            counts: `counts_of` the sequences, or `ledger_counts` of each on the host; required for sequences
                in `row_params.needs_counts`.
            parents: for trees, each node's parent or -1; a missing or empty entry means a chain.
            ledgers: tokens of each sequence; required for sequences in `row_params.bad_words`.
        """
        shapes = [
            _tree(tuple(parents[i])) if parents and parents[i] else _chain(len(draft))
            for i, draft in enumerate(drafts)
        ]
        if tuple(len(s.depth) for s in shapes) != row_params.num_rows:
            raise ValueError("each sequence must have one more row than draft tokens")
        generated = np.concatenate([n + s.depth for n, s in zip(num_generated, shapes, strict=True)])
        completes = _completes(row_params, drafts, shapes, ledgers)
        penalties = row_params.penalties
        if penalties is None:
            return cls(torch.from_numpy(generated), None, completes)
        device = penalties.rows.device
        bases = [_present(counts[i]) for i in penalties.sequences]
        sizes = [row_params.num_rows[i] for i in penalties.sequences]
        repeats = to_device(torch.tensor(sizes), device)
        # A given output size avoids waiting for the device.
        base = torch.stack(bases)
        base = base if base.device == device else to_device(base, device)
        grown = base.repeat_interleave(repeats, dim=0, output_size=sum(sizes))
        starts = np.cumsum([0, *sizes])
        rows = np.concatenate(
            [start + shapes[i].row for start, i in zip(starts[:-1], penalties.sequences, strict=True)]
        )
        tokens = np.concatenate(
            [np.asarray(drafts[i], dtype=np.int64)[shapes[i].ancestor] for i in penalties.sequences]
        )
        where = (to_device(torch.from_numpy(rows), device)[:, None], torch.arange(2, device=device))
        one = torch.ones((), dtype=grown.dtype, device=device)
        grown.index_put_((*where, to_device(torch.from_numpy(tokens), device)[:, None]), one, accumulate=True)
        return cls(torch.from_numpy(generated), grown, completes)


def _completes(
    row_params: RowParams,
    drafts: Sequence[Sequence[int]],
    shapes: Sequence[_Shape],
    ledgers: Sequence[Sequence[int]],
) -> tuple[Tensor, Tensor] | None:
    words = row_params.bad_words
    if words is None:
        return None
    if not ledgers:
        raise ValueError("bad words need the ledgers")
    starts = np.cumsum(row_params.num_rows) - row_params.num_rows
    parts = [
        (starts[i] + rows, tokens)
        for i, table in zip(words.sequences, words.tables, strict=True)
        for rows, tokens in [table.completed_by(ledgers[i], drafts[i], shapes[i].depth, shapes[i].paths)]
    ]
    rows, tokens = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
    return rows, tokens


def _present(counts: Tensor | None) -> Tensor:
    if counts is None:
        raise ValueError("a sequence with penalties needs its ledger counts")
    return counts


@dataclass(frozen=True, slots=True)
class _Shape:
    """A proposal's rows: ordered pairs (row, draft token on its path), and the depth of each row."""

    row: npt.NDArray[np.int64]
    ancestor: npt.NDArray[np.int64]
    depth: npt.NDArray[np.int64]

    @property
    def paths(self) -> npt.NDArray[np.int64]:
        """int64 [rows, largest depth]: indices of the draft tokens on the path to each row, 0 beyond its
        depth."""
        paths = np.zeros((len(self.depth), int(self.depth.max())), dtype=np.int64)
        place = np.arange(len(self.row)) - np.repeat(np.cumsum(self.depth) - self.depth, self.depth)
        paths[self.row, place] = self.ancestor
        return paths


@functools.lru_cache(maxsize=64)
def _chain(length: int) -> _Shape:
    row, ancestor = np.tril_indices(length + 1, -1, length)
    return _Shape(row.astype(np.int64), ancestor.astype(np.int64), np.arange(length + 1))


@functools.lru_cache(maxsize=256)
def _tree(parents: tuple[int, ...]) -> _Shape:
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(parents):
        paths.append([*paths[parent + 1], node])
    depth = np.array([len(path) for path in paths], dtype=np.int64)
    row = np.repeat(np.arange(len(paths)), depth)
    return _Shape(row, np.array([n for path in paths for n in path], dtype=np.int64), depth)
