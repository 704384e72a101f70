"""Shared tables of bad words, and their memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import count

from paceline.core.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from paceline.decoding.rows.bad_words import Words, WordTable
from paceline.decoding.rows.row_params_cache import MOST_BYTES

MOST_WORDS = 2 * MAX_BAD_WORDS
"""With and without a space before it."""


def words_of(lengths: Sequence[int], number: int) -> Words:
    """Words of so many tokens each, all of them different from others' with another number."""
    ids = count(1000 * (number + 1))
    return tuple(tuple(next(ids) for _ in range(length)) for length in lengths)


def test_memory_of_ended_requests_word_tables_is_bounded() -> None:
    """Tables and their words together."""
    longest = MAX_BAD_WORD_TOKENS
    kinds = {
        "single tokens": ([2, *[1] * (MOST_WORDS - 1)], 260),
        "long words": ([longest] * 4, 260),
        "many words": ([4] * MOST_WORDS, 260),
        "one long word": ([longest, *[2] * (MOST_WORDS - 1)], 30),
        "the largest": ([longest] * MOST_WORDS, 30),
    }
    tracemalloc.start()
    try:
        for kind, (lengths, requests) in kinds.items():
            for number in range(requests):
                assert WordTable.of(words_of(lengths, number)) is not None
            assert tracemalloc.get_traced_memory()[0] < MOST_BYTES, kind
    finally:
        tracemalloc.stop()


def test_word_tables_are_shared_between_sequences() -> None:
    lists = [words_of([4] * MOST_WORDS, number) for number in range(256)]
    tables = [WordTable.of(words) for words in lists]
    assert all(WordTable.of(words) is table for words, table in zip(lists, tables, strict=True))


def test_single_tokens_need_no_table() -> None:
    assert WordTable.of(((3,), (4,))) is None
    assert WordTable.of(()) is None
