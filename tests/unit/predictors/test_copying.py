"""Matches in the text against brute force, and the copied tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paceline.predictors import occurrences
from paceline.predictors.copying import CANDIDATES, Match, TextIndex, copied

LONGEST = 16


def agreement(tokens: Sequence[int], end: int) -> int:
    """Tokens up to index `end` that are those at the end of all."""
    length = 0
    while length < LONGEST and length <= end and tokens[end - length] == tokens[-1 - length]:
        length += 1
    return length


def longest(tokens: Sequence[int]) -> Match | None:
    """By looking at every earlier place."""
    ends = [end for end in range(len(tokens) - 2, 0, -1) if agreement(tokens, end) >= 2][:CANDIDATES]
    if not ends:
        return None
    end = max(ends, key=lambda end: (agreement(tokens, end), end))
    return Match(agreement(tokens, end), end + 1)


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
@pytest.mark.parametrize("most", [1, 5])
def test_the_newest_longest_match_is_found(alphabet: int, most: int) -> None:
    """However much the text grows between two queries."""
    rng = random.Random(alphabet)
    tokens: list[int] = []
    index = TextIndex()
    while len(tokens) < 150:
        tokens.extend(rng.choices(range(alphabet), k=rng.randint(1, most)))
        assert index.find(tokens) == longest(tokens)


def test_tentative_tokens_are_matched_and_not_indexed() -> None:
    """The same matches as in an index of the committed tokens alone, whatever was tentative before."""
    rng = random.Random(5)
    tokens: list[int] = []
    index = TextIndex()
    while len(tokens) < 120:
        tokens.extend(rng.choices(range(3), k=rng.randint(1, 4)))
        for count in (0, 3, 1, 0):
            text = [*tokens, *rng.choices(range(3), k=count)]
            ends = [e for e in range(len(text) - 2, 0, -1) if agreement(text, e) >= 2 and e < len(tokens)]
            best = max(ends[:CANDIDATES], key=lambda e: (agreement(text, e), e), default=None)
            assert index.find(text, count) == (best and Match(agreement(text, best), best + 1))


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (3, 3), (4, 8)])
def test_matches_keep_within_their_range(shortest: int, longest: int) -> None:
    rng = random.Random(longest)
    for _ in range(60):
        tokens = rng.choices(range(3), k=rng.randint(1, CANDIDATES))
        best = max((min(agreement(tokens, end), longest) for end in range(len(tokens) - 1)), default=0)
        found = TextIndex(shortest, longest).find(tokens)
        assert (0 if found is None else found.length) == (best if best >= shortest else 0)


def test_new_text_has_no_match() -> None:
    index = TextIndex()
    assert index.find([]) is None
    assert index.find([1]) is None
    assert index.find([1, 1]) is None
    assert index.find([1, 1, 1]) == Match(2, 2)
    assert TextIndex().find([1, 2, 3, 4, 2]) is None


def test_a_match_reaches_back_to_the_first_token() -> None:
    assert TextIndex().find([5, 6, 7, 5, 6]) == Match(2, 2)
    assert TextIndex().find([9, 5, 6, 7, 9, 5, 6]) == Match(3, 3)


def test_a_long_prompt_is_searched_within_its_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occurrences, "REACH", 20)
    far, near = [1, 2, 3, *range(100, 140), 1, 2], [1, 2, 3, *range(100, 110), 1, 2]
    assert TextIndex().find(far) is None
    assert TextIndex().find(near) == Match(2, 2)
    index = TextIndex()
    index.find(far)
    assert index.find([*far, 8, 1, 2]) == Match(2, len(far))


def test_the_tokens_after_a_match_are_copied() -> None:
    assert copied([1, 2, 3, 4, 1, 2], 2, 3) == (3, 4, 1)
    assert copied([1, 2, 3, 4, 1, 2], 2, 0) == ()


def test_a_copy_past_the_end_repeats_the_period() -> None:
    assert copied([1, 2, 3, 1, 2], 2, 7) == (3, 1, 2, 3, 1, 2, 3)
    assert copied([4, 4, 4], 2, 3) == (4, 4, 4)
