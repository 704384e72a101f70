"""Bad words as tokens, and the text of one token."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coordinator.vocabulary import Vocabulary
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Bytes, some merges, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("b", "a"), ("ba", "d"), ("Ġ", "o"), ("Ġo", "k")]
    tokens = ["<end>", *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return Vocabulary(tokenizer, "fingerprint", len(tokens))


def pieces(vocabulary: Vocabulary, *words: str) -> list[list[str]]:
    return [[vocabulary.tokenizer.id_to_token(token) for token in ids] for ids in vocabulary.bad_words(words)]


def test_a_word_is_forbidden_at_the_beginning_and_after_a_space(vocabulary: Vocabulary) -> None:
    assert pieces(vocabulary, "bad") == [["bad"], ["Ġ", "bad"]]
    assert pieces(vocabulary, "ok") == [["o", "k"], ["Ġok"]]
    assert pieces(vocabulary, " ok") == [["o", "k"], ["Ġok"]]


def test_what_is_said_twice_counts_once(vocabulary: Vocabulary) -> None:
    assert pieces(vocabulary, "ok", " ok", "ok") == [["o", "k"], ["Ġok"]]


def test_white_space_stands_for_itself(vocabulary: Vocabulary) -> None:
    assert pieces(vocabulary, "\n") == [["Ċ"]]
    assert pieces(vocabulary, "  ") == [["Ġ", "Ġ"]]


def test_nothing_is_put_in_front_of_a_word(vocabulary: Vocabulary) -> None:
    assert pieces(vocabulary, "<end>")[0] == ["<end>"]


def test_words_without_tokens_or_with_too_many_are_refused(vocabulary: Vocabulary) -> None:
    silent = Tokenizer(models.BPE({}, []))
    for words, tokenizer in ((["é" * limits.MAX_BAD_WORD_TOKENS], vocabulary.tokenizer), (["x"], silent)):
        with pytest.raises(InvalidArgumentError) as caught:
            Vocabulary(tokenizer, "fingerprint", 1).bad_words(words)
        assert caught.value.field == "bad_words"


def test_the_text_of_a_token_alone(vocabulary: Vocabulary) -> None:
    ids = {token: vocabulary.tokenizer.token_to_id(token) for token in ("Ġok", "<end>", "Ã")}
    for _ in range(2):
        assert vocabulary.token_text(ids["Ġok"]) == " ok"
        assert vocabulary.token_text(ids["<end>"]) == "<end>"
        assert vocabulary.token_text(ids["Ã"]) == "\ufffd"


async def test_other_streams_go_on_while_a_long_text_is_tokenised(vocabulary: Vocabulary) -> None:
    """In a thread alone it would keep the interpreter to itself."""
    text = "ok bad " * 200_000
    encoding = asyncio.create_task(vocabulary.encode(text))
    moments = [time.perf_counter()]
    while not encoding.done():
        await asyncio.sleep(0)
        moments.append(time.perf_counter())
    longest = max(after - before for before, after in itertools.pairwise(moments))
    assert longest < (moments[-1] - moments[0]) / 2
    short = await vocabulary.encode("ok bad")
    assert (await encoding)[: len(short)] == short
