"""N-gram drafting: the worked examples of its source, the tables against brute force, and their bound."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paceline.predictors import ngram
from paceline.predictors.ngram import NgramPredictor

THE, CAT, SAT, ON, MAT, STOP, DOWN, AND, RUG = range(9)


def trained(*texts: list[int], **changes: int) -> NgramPredictor:
    """A predictor that has seen the texts, each by itself."""
    predictor = NgramPredictor(**changes)
    for text in texts:
        predictor.update_batch(text)
        predictor.context = ()
    return predictor


def test_predict_traces_the_cat_on_the_mat() -> None:
    """Three steps from contexts of three tokens, then one by back-off to two."""
    predictor = trained([THE, CAT, SAT, ON], [CAT, SAT, ON, THE], [SAT, ON, THE, MAT], [THE, MAT, STOP])
    # The context (on, the, mat) has no continuation of its own.
    assert (ON, THE, MAT) not in predictor.tables[2]
    predictor.update_batch([THE, CAT, SAT])
    assert predictor.predict(4) == ([ON, THE, MAT, STOP], 3)


def test_the_most_frequent_continuation_is_taken() -> None:
    texts = [[THE, CAT, SAT, token] for token, count in ((ON, 4), (DOWN, 3), (AND, 1)) for _ in range(count)]
    random.Random(1).shuffle(texts)
    predictor = trained(*texts)
    predictor.update_batch([THE, CAT, SAT])
    assert predictor.predict(1) == ([ON], 3)


def test_equal_counts_take_the_continuation_seen_last() -> None:
    predictor = trained([CAT, SAT, ON], [CAT, SAT, DOWN])
    predictor.update_batch([CAT, SAT])
    assert predictor.predict(1)[0] == [DOWN]


@pytest.mark.parametrize(
    ("known", "length"),
    [([THE, CAT, SAT, ON], 3), ([AND, CAT, SAT, ON], 2), ([AND, RUG, SAT, ON], 1)],
    ids=["4-gram", "back-off to trigram", "back-off to bigram"],
)
def test_backs_off_to_the_longest_known_context(known: list[int], length: int) -> None:
    predictor = trained(known)
    predictor.update_batch([THE, CAT, SAT])
    assert predictor.predict(1) == ([ON], length)


def test_an_unknown_last_token_has_no_draft() -> None:
    predictor = trained([THE, CAT, SAT])
    predictor.update(RUG)
    assert predictor.predict(4) == ([], 0)


def test_a_rejected_draft_continues_from_its_correction() -> None:
    """The worked round: "on", "the" are accepted, "mat" is replaced by "rug", whose continuation is new."""
    predictor = trained([THE, CAT, SAT, ON, THE, MAT, STOP])
    predictor.update_batch([THE, CAT, SAT])
    drafts, _ = predictor.predict(4)
    verified = [ON, THE, RUG]
    accepted = next(i for i in range(len(drafts)) if drafts[i] != verified[i])
    assert accepted == 2
    predictor.update_batch(verified)
    assert predictor.predict(4) == ([], 0)
    predictor.update_batch([STOP, ON, THE])
    assert predictor.predict(1) == ([RUG], 2)


def test_the_context_evicts_tokens_and_keeps_counts() -> None:
    """The published predictor keeps 512 tokens, of which a context uses the last three."""
    predictor = trained([THE, CAT, SAT, ON])
    predictor.update_batch(range(1000, 2024))
    assert predictor.context == (2021, 2022, 2023)
    predictor.update_batch([THE, CAT, SAT])
    assert predictor.predict(1) == ([ON], 3)


def test_a_full_table_counts_known_pairs_only() -> None:
    predictor = NgramPredictor(capacity=6)
    predictor.update_batch([THE, CAT, SAT, ON, DOWN, RUG])
    assert predictor.capacity == 0
    assert sum(len(table) for table in predictor.tables) == 6
    predictor.update_batch([THE, CAT])
    assert predictor.predict(1) == ([SAT], 2)


def test_tables_are_those_of_counting() -> None:
    rng = random.Random(3)
    tokens = rng.choices(range(3), k=300)
    predictor = NgramPredictor()
    for size, token in enumerate(tokens):
        predictor.update(token)
        text = tokens[: size + 1]
        for length, table in enumerate(predictor.tables, start=1):
            context = tuple(text[-length:])
            starts = (i for i in range(size + 1 - length) if tuple(text[i : i + length]) == context)
            following = [text[start + length] for start in starts]
            if not following:
                assert context not in table
                continue
            counts = Counter(following)
            most = max(counts.values())
            found = table[context]
            assert found.most == most == counts[found.likeliest]
            assert {token: found.count_of(token) for token in range(3)} == {t: counts[t] for t in range(3)}


def test_a_prompt_is_counted_once() -> None:
    predictor = NgramPredictor()
    text = [THE, CAT, SAT, THE, CAT, ON, THE]
    for _ in range(3):
        predictor.take_in(text)
        assert predictor.predict(1) == ([CAT], 1)
    assert predictor.tables[0][(THE,)].most == 2


def test_a_long_prompt_is_counted_within_its_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "REACH", 4)
    predictor = NgramPredictor()
    predictor.take_in([THE, CAT, SAT, ON, DOWN, THE])
    assert predictor.predict(1) == ([], 0)
    predictor.take_in([THE, CAT, SAT, ON, DOWN, THE, RUG, THE])
    assert predictor.predict(1) == ([RUG], 1)
