"""The sampling parameters of a batch of rows as tensors.

Each sequence has consecutive rows: one for plain decoding, one more than its draft tokens for a proposal.
Greedy rows skip every step that leaves their argmax unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core.types import SamplingParams
from paceline.decoding.rows.bad_words import Words, WordTable, single_tokens
from paceline.decoding.transfer import to_device

_NO_TOP_K: Final = 2**31 - 1
_NO_TOP_P: Final = 2.0
"""Above every cumulative probability, so that rounding drops nothing."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """The P rows with a repetition, presence or frequency penalty."""

    rows: Tensor  # int64 [P]
    sequences: tuple[int, ...]  # sequences of these rows
    repetition: Tensor  # float32 [P, 1], as the other two
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class Bias:
    """The B pairs of a row and a biased token."""

    rows: Tensor  # int64 [B], as tokens
    tokens: Tensor
    values: Tensor  # float32 [B]
    largest_token: int


@dataclass(frozen=True, slots=True)
class MinTokens:
    """The M pairs of a row and a token it must not take before `at_least` tokens are generated."""

    rows: Tensor  # int64 [M], as the other two
    tokens: Tensor
    at_least: Tensor
    largest_token: int


@dataclass(frozen=True, slots=True)
class Forbidden:
    """The N pairs of a row and a token it must never take: bad words of one token."""

    rows: Tensor  # int64 [N], as tokens
    tokens: Tensor
    largest_token: int


@dataclass(frozen=True, slots=True)
class BadWords:
    """The sequences with bad words of several tokens; the forbidden tokens depend on the context."""

    sequences: tuple[int, ...]
    tables: tuple[WordTable, ...]
    largest_token: int


@dataclass(frozen=True, slots=True)
class Allowed:
    """The S sequences with `allowed_token_ids`. A long list is stored once for all rows of its sequence."""

    rows: tuple[slice, ...]  # rows of each sequence
    tokens: Tensor  # int32 [N]: lists of all sequences, concatenated
    counts: Tensor  # int64 [S]: length of each list
    largest_token: int  # ids that do not fit into `tokens` are above every vocabulary


@dataclass(frozen=True, slots=True)
class MinP:
    """The F rows with a min_p."""

    rows: Tensor  # int64 [F]
    min_p: Tensor  # float32 [F, 1]


@dataclass(frozen=True, slots=True)
class TopFilters:
    """The F rows with a top_k or a top_p."""

    rows: Tensor  # int64 [F]
    top_k: Tensor  # int64 [F, 1]
    top_p: Tensor  # float32 [F, 1]
    largest_top_k: int
    any_top_p: bool


@dataclass(frozen=True, slots=True)
class RowParams:
    """The sampling parameters of a batch as tensors, one entry per row; an unused step is None.

    It depends only on the requests and their numbers of rows, so a caller may keep it between steps.
    """

    num_rows: tuple[int, ...]
    """Rows of each sequence."""
    temperature: Tensor | None
    """float32 [R, 1]; 1 for greedy rows. None if all are 1."""
    penalties: Penalties | None
    bias: Bias | None
    min_tokens: MinTokens | None
    forbidden: Forbidden | None
    bad_words: BadWords | None
    allowed: Allowed | None
    min_p: MinP | None
    top: TopFilters | None

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        rows: Sequence[int],
        device: torch.device | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
        bad_words: Sequence[Words] = (),
    ) -> RowParams:
        """Lay out one batch.

        Args:
            params: one per sequence.
            rows: number of rows of each sequence.
            device: device of the logits.
            eos_token_ids: the model's; masked, like `stop_token_ids`, until `min_tokens` are generated.
            bad_words: tokenised bad words of each sequence; empty if no sequence has any.
        """
        layout = _Layout.of(rows, device)
        sampled = [i for i, p in enumerate(params) if not p.greedy]
        temperatures = [p.temperature or 1.0 for p in params]
        return cls(
            num_rows=tuple(rows),
            temperature=layout.column(temperatures) if any(t != 1 for t in temperatures) else None,
            penalties=_penalties(params, layout),
            bias=_bias(params, layout),
            min_tokens=_min_tokens(params, layout, eos_token_ids),
            forbidden=_forbidden(bad_words, layout),
            bad_words=_bad_words(bad_words),
            allowed=_allowed(params, layout),
            min_p=_min_p(params, layout, sampled),
            top=_top_filters(params, layout, sampled),
        )

    @property
    def needs_counts(self) -> tuple[int, ...]:
        """The sequences whose token counts the context must hold."""
        return self.penalties.sequences if self.penalties is not None else ()

    @property
    def needs_context(self) -> bool:
        """True if the transforms depend on the tokens before a row."""
        return self.penalties is not None or self.min_tokens is not None or self.bad_words is not None

    @property
    def changes_logits(self) -> bool:
        """True if the transforms may change some row's argmax."""
        return (
            self.penalties is not None
            or self.bias is not None
            or self.min_tokens is not None
            or self.forbidden is not None
            or self.bad_words is not None
            or self.allowed is not None
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and tables."""
        return sum(array.nbytes for array in _arrays(self))

    @property
    def only_temperature(self) -> bool:
        """True if no transform but the temperature applies."""
        return not self.changes_logits and self.min_p is None and self.top is None


def _arrays(part: object) -> Iterator[Tensor | npt.NDArray[np.int64]]:
    """All tensors and arrays inside a layout."""
    if isinstance(part, Tensor | np.ndarray):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _arrays(item)
    elif is_dataclass(part):
        for each in fields(part):
            yield from _arrays(getattr(part, each.name))


@dataclass(frozen=True, slots=True)
class _Layout:
    """The rows of each sequence."""

    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    device: torch.device | None

    @classmethod
    def of(cls, rows: Sequence[int], device: torch.device | None) -> _Layout:
        sizes = np.asarray(rows, dtype=np.int64)
        return cls(sizes, np.cumsum(sizes) - sizes, device)

    def slice_of(self, sequence: int) -> slice:
        """The rows of a sequence."""
        start = int(self.starts[sequence])
        return slice(start, start + int(self.rows[sequence]))

    def rows_of(self, sequences: Sequence[int]) -> Tensor:
        """int64: the rows of these sequences, in order."""
        indices = [np.arange(self.starts[i], self.starts[i] + self.rows[i]) for i in sequences]
        return to_device(torch.from_numpy(np.concatenate(indices)), self.device)

    def column(
        self,
        values: Iterable[float],
        sequences: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """[rows, 1]: each sequence's value, repeated over its rows. `sequences` None means all."""
        repeats = self.rows if sequences is None else self.rows[list(sequences)]
        repeated = np.repeat(np.asarray(list(values)), repeats)
        return to_device(torch.from_numpy(repeated).to(dtype), self.device)[:, None]

    def pairs(self, sequences: Sequence[int], tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Two int64 [N]: every row of each sequence with every one of that sequence's tokens."""
        rows = [
            np.repeat(np.arange(self.starts[i], self.starts[i] + self.rows[i]), len(ids))
            for i, ids in zip(sequences, tokens, strict=True)
        ]
        repeated = [
            np.tile(np.asarray(ids, dtype=np.int64), self.rows[i])
            for i, ids in zip(sequences, tokens, strict=True)
        ]
        return (
            to_device(torch.from_numpy(np.concatenate(rows)), self.device),
            to_device(torch.from_numpy(np.concatenate(repeated)), self.device),
        )

    def pair_values(
        self, sequences: Sequence[int], values: Sequence[Sequence[float]], dtype: torch.dtype
    ) -> Tensor:
        """[N]: values in the order of `pairs`."""
        repeated = [np.tile(np.asarray(v), self.rows[i]) for i, v in zip(sequences, values, strict=True)]
        return to_device(torch.from_numpy(np.concatenate(repeated)).to(dtype), self.device)


def _penalties(params: Sequence[SamplingParams], layout: _Layout) -> Penalties | None:
    users = [i for i, p in enumerate(params) if p.has_penalties]
    if not users:
        return None
    return Penalties(
        rows=layout.rows_of(users),
        sequences=tuple(users),
        repetition=layout.column([params[i].repetition_penalty for i in users], users),
        presence=layout.column([params[i].presence_penalty for i in users], users),
        frequency=layout.column([params[i].frequency_penalty for i in users], users),
    )


def _bias(params: Sequence[SamplingParams], layout: _Layout) -> Bias | None:
    users = [i for i, p in enumerate(params) if p.logit_bias]
    if not users:
        return None
    tokens = [list(params[i].logit_bias) for i in users]
    rows, flat = layout.pairs(users, tokens)
    values = layout.pair_values(users, [list(params[i].logit_bias.values()) for i in users], torch.float32)
    return Bias(rows, flat, values, max(max(ids) for ids in tokens))


def ends_of(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """Ids that end the sequence: its stop ids, and the model's unless `ignore_eos`."""
    return sorted({*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids})


def _min_tokens(
    params: Sequence[SamplingParams], layout: _Layout, eos_token_ids: Sequence[int]
) -> MinTokens | None:
    masked = [ends_of(p, eos_token_ids) if p.min_tokens else [] for p in params]
    users = [i for i, ids in enumerate(masked) if ids]
    if not users:
        return None
    tokens = [masked[i] for i in users]
    rows, flat = layout.pairs(users, tokens)
    at_least = layout.pair_values(
        users, [[params[i].min_tokens] * len(masked[i]) for i in users], torch.int64
    )
    return MinTokens(rows, flat, at_least, max(max(ids) for ids in tokens))


def _forbidden(bad_words: Sequence[Words], layout: _Layout) -> Forbidden | None:
    if not any(bad_words):
        return None
    singles = [single_tokens(words) for words in bad_words]
    users = [i for i, tokens in enumerate(singles) if tokens]
    if not users:
        return None
    tokens = [singles[i] for i in users]
    return Forbidden(*layout.pairs(users, tokens), max(max(ids) for ids in tokens))


def _bad_words(bad_words: Sequence[Words]) -> BadWords | None:
    if not any(bad_words):
        return None
    tables = [(i, table) for i, words in enumerate(bad_words) if (table := WordTable.of(words)) is not None]
    if not tables:
        return None
    largest = max(int(table.last.max()) for _, table in tables)
    return BadWords(tuple(i for i, _ in tables), tuple(table for _, table in tables), largest)


def _allowed(params: Sequence[SamplingParams], layout: _Layout) -> Allowed | None:
    users = [i for i, p in enumerate(params) if p.allowed_token_ids is not None]
    if not users:
        return None
    tokens = [np.asarray(params[i].allowed_token_ids, dtype=np.int64) for i in users]
    flat, counts = np.concatenate(tokens), np.asarray([len(ids) for ids in tokens], dtype=np.int64)
    return Allowed(
        rows=tuple(map(layout.slice_of, users)),
        tokens=to_device(torch.from_numpy(flat.astype(np.int32)), layout.device),
        counts=to_device(torch.from_numpy(counts), layout.device),
        largest_token=int(flat.max()),
    )


def _min_p(params: Sequence[SamplingParams], layout: _Layout, sampled: Sequence[int]) -> MinP | None:
    users = [i for i in sampled if params[i].min_p > 0]
    if not users:
        return None
    return MinP(layout.rows_of(users), layout.column([params[i].min_p for i in users], users))


def _top_filters(
    params: Sequence[SamplingParams], layout: _Layout, sampled: Sequence[int]
) -> TopFilters | None:
    users = [i for i in sampled if params[i].top_k > 0 or params[i].top_p < 1]
    if not users:
        return None
    top_k = [params[i].top_k or _NO_TOP_K for i in users]
    top_p = [params[i].top_p if params[i].top_p < 1 else _NO_TOP_P for i in users]
    return TopFilters(
        rows=layout.rows_of(users),
        top_k=layout.column(top_k, users, torch.int64),
        top_p=layout.column(top_p, users),
        largest_top_k=max(top_k),
        any_top_p=any(p < 1 for p in top_p),
    )
