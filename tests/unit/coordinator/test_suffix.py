"""Suffix drafting: counted continuations, how far they go, and whose answers they come from."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest

from coordinator.proposers.finished_texts import OVERHEAD_TOKENS, SEGMENTS, TENANT_SHARE, FinishedTexts
from coordinator.proposers.suffix import SuffixSettings, SuffixSource, groups


def guessed(tokens: list[int], most: int = 8, source: SuffixSource | None = None) -> tuple[int, ...]:
    guess = (source or SuffixSource()).guess(tokens, most)
    return () if guess is None else guess.token_ids


def test_the_likeliest_continuation_is_taken() -> None:
    text = [1, 2, 3, 8, 1, 2, 4, 8, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2]
    assert guessed(text, 1) == (3,)


def test_a_longer_match_outweighs_more_occurrences() -> None:
    text = [5, 6, 1, 2, 4, *(7, 1, 2, 3) * 3, 5, 6, 1, 2]
    assert guessed(text, 1) == (4,)


def test_a_path_ends_where_earlier_texts_part() -> None:
    """The product of shares falls below the threshold."""
    sharp = SuffixSource(SuffixSettings(min_token_prob=0.6, max_spec_factor=9))
    text = [1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2]
    assert guessed(text, 8, sharp) == (3,)
    assert len(guessed(text, 8, SuffixSource(SuffixSettings(max_spec_factor=9)))) > 1


@pytest.mark.parametrize(("factor", "tokens"), [(0.5, 1), (1.0, 3), (2.0, 6)])
def test_a_guess_is_bounded_by_its_match(factor: float, tokens: int) -> None:
    text = [*range(20), 50, 0, 1, 2]
    settings = SuffixSettings(max_spec_factor=factor)
    assert guessed(text, 16, SuffixSource(settings)) == tuple(range(3, 3 + tokens))


def test_matches_are_compared_up_to_the_depth() -> None:
    text = [*range(20), 50, *range(10)]
    shallow = SuffixSource(SuffixSettings(max_tree_depth=4))
    assert guessed(text, 16, shallow) == (10, 11, 12, 13)


def test_the_share_of_the_next_token_is_that_of_counting() -> None:
    rng = random.Random(5)
    source = SuffixSource(SuffixSettings(min_token_prob=0.0))
    tokens = rng.choices(range(3), k=2)
    for _ in range(40):
        tokens.append(rng.randrange(3))
        places = sorted(source._places(tokens), key=lambda place: -place.length)
        for group in groups(places) if places else ():
            path = source._path(group, 1)
            following = Counter(tokens[place.following] for place in group if place.following < len(tokens))
            if not following:
                assert path.token_ids == ()
                continue
            most = max(following.values())
            assert following[path.token_ids[0]] == most
            assert path.score == pytest.approx(most / len(group))


def finish(texts: FinishedTexts, answer: list[int], *, salt: str = "") -> None:
    """A request with the prompt (90, 91) has ended with this answer."""
    SuffixSource(finished=texts, salt=salt, prompt_length=2).close([90, 91, *answer])


def test_answers_help_later_requests() -> None:
    texts = FinishedTexts(10)
    finish(texts, [1, 2, 3, 4, 5])
    later = SuffixSource(finished=texts, prompt_length=2)
    assert guessed([70, 71, 2, 3], 8, later) == (4, 5)
    assert guessed([70, 71, 2, 3]) == ()


def test_prompts_and_borders_of_answers_are_not_shared() -> None:
    texts = FinishedTexts(10)
    finish(texts, [1, 2])
    finish(texts, [3, 4])
    later = SuffixSource(finished=texts)
    assert guessed([90, 91], 8, later) == ()
    assert guessed([70, 1, 2], 8, later) == ()


def test_no_tenant_learns_of_anothers_text() -> None:
    """All of one tenant's tokens are above 1,000; no guess of the other contains one."""
    texts, rng = FinishedTexts(100), random.Random(7)
    for _ in range(200):
        low = rng.choices(range(4), k=12)
        finish(texts, low, salt="a")
        finish(texts, [*low[:4], *(1000 + token for token in low)], salt="b")
    for _ in range(200):
        text = rng.choices(range(4), k=6)
        found = guessed(text, 8, SuffixSource(finished=texts, salt="a"))
        assert all(token < 1000 for token in found)
        assert guessed(text, 8, SuffixSource(finished=texts, salt="c")) == guessed(text)


def test_sharing_can_be_switched_off() -> None:
    texts = FinishedTexts(0)
    finish(texts, [1, 2, 3])
    assert texts.size == 0


def test_a_flood_stays_within_its_bound() -> None:
    texts = FinishedTexts(10_000, most_tokens=8_000)
    rng = random.Random(1)
    finish(texts, [1, 2, 3, 4], salt="quiet")
    for number in range(3_000):
        finish(texts, rng.choices(range(50_000), k=rng.randint(1, 400)), salt=f"noisy {number % 3}")
        finish(texts, [7] * 20_000, salt="long")
        texts.texts("quiet")
        assert texts.size <= 8_000
    assert guessed([70, 1, 2], 4, SuffixSource(finished=texts, salt="quiet")) == (3, 4)


def test_a_flood_of_salts_stays_within_its_bound() -> None:
    texts = FinishedTexts(10, most_tokens=8_000)
    for number in range(5_000):
        finish(texts, [number], salt=str(number))
    assert len(texts._tenants) <= 8_000 // (2 * OVERHEAD_TOKENS)


def test_a_tenant_keeps_its_newest_answers() -> None:
    texts = FinishedTexts(4)
    for number in range(20):
        finish(texts, [5, 6, 100 + number])
    kept = [text for text, _ in texts.texts("")]
    assert sum(len(text) for text in kept) <= 4 * 4
    assert guessed([5, 6], 1, SuffixSource(finished=texts)) == (119,)


def test_shared_answers_take_the_memory_they_are_said_to() -> None:
    """The bound of 524,288 tokens stands for about 100 MB, so 200 bytes a token."""
    rng = random.Random(2)
    texts = FinishedTexts(10_000, most_tokens=TENANT_SHARE * SEGMENTS * 20_000)
    answers = [rng.choices(range(100_000), k=1_000) for _ in range(36)]
    tracemalloc.start()
    for answer in answers:
        finish(texts, [token + 1 for token in answer])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 36_000 < 230
