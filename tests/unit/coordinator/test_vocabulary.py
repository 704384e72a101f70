"""Bad words as tokens, the text of one token, and unloadable tokenizers."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from harness.refusals import refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from coordinator.text.long_texts import LongTexts
from coordinator.text.vocabulary import LONG_TEXT, Vocabulary
from paceline.bench.prompts import tokenized
from paceline.core import limits


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


def test_an_unloadable_tokenizer_is_reported_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with refused("tokenizer", r"has no loadable .*: EOF while parsing"):
        Vocabulary.load(str(tmp_path))


async def test_truncation_of_a_tokenizer_is_ignored(vocabulary: Vocabulary, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer.to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Vocabulary.load(str(tmp_path))
    for text in ("ok", "ok bad bad", "ok bad " * LONG_TEXT):
        ids = vocabulary.encode(text)
        assert loaded.encode(text) == ids
        assert tokenized(str(tmp_path), [text]) == [tuple(ids)]
    assert loaded.bad_words(["bad"]) == vocabulary.bad_words(["bad"])


@pytest.mark.parametrize("added", [True, False, None])
@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
async def test_special_tokens_are_added_like_transformers(
    vocabulary: Vocabulary, tmp_path: Path, kind: str, template: bool, added: bool | None
) -> None:
    """tokenizer.json decides; `add_bos_token` and `add_eos_token` beside it have no effect."""
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer.to_str())
    tokenizer.post_processor = (
        processors.TemplateProcessing("<end> $A", "<end> $A $B", [("<end>", 0)])
        if template
        else processors.ByteLevel(trim_offsets=False)
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": kind, "bos_token": "<end>", "eos_token": "<end>"}
    if added is not None:
        config |= {"add_bos_token": added, "add_eos_token": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    assert Vocabulary.load(str(tmp_path)).encode("ok bad") == reference("ok bad").input_ids


def test_a_bad_word_is_masked_at_the_start_and_after_a_space(vocabulary: Vocabulary) -> None:
    assert pieces(vocabulary, "bad") == [["bad"], ["Ġ", "bad"]]
    assert pieces(vocabulary, "ok") == [["o", "k"], ["Ġok"]]
    assert pieces(vocabulary, " ok") == [["o", "k"], ["Ġok"]]


def test_repeated_bad_words_count_once(vocabulary: Vocabulary) -> None:
    assert pieces(vocabulary, "ok", " ok", "ok") == [["o", "k"], ["Ġok"]]


def test_white_space_is_a_bad_word_of_its_own(vocabulary: Vocabulary) -> None:
    assert pieces(vocabulary, "\n") == [["Ċ"]]
    assert pieces(vocabulary, "  ") == [["Ġ", "Ġ"]]


def test_no_space_is_put_before_a_special_bad_word(vocabulary: Vocabulary) -> None:
    assert pieces(vocabulary, "<end>")[0] == ["<end>"]


def test_bad_words_without_or_with_too_many_tokens_are_refused(vocabulary: Vocabulary) -> None:
    silent = Tokenizer(models.BPE({}, []))
    for words, tokenizer in ((["é" * limits.MAX_BAD_WORD_TOKENS], vocabulary.tokenizer), (["x"], silent)):
        with refused("bad_words"):
            Vocabulary(tokenizer, "fingerprint", 1).bad_words(words)


def test_a_single_token_has_a_text(vocabulary: Vocabulary) -> None:
    ids = {token: vocabulary.tokenizer.token_to_id(token) for token in ("Ġok", "<end>", "Ã")}
    for _ in range(2):
        assert vocabulary.token_text(ids["Ġok"]) == " ok"
        assert vocabulary.token_text(ids["<end>"]) == "<end>"
        assert vocabulary.token_text(ids["Ã"]) == "\ufffd"


def test_a_tokens_leading_space_is_kept() -> None:
    tokens = ["<s>", "▁the", "the", "a", "<0xC3>", "▁"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    vocabulary = Vocabulary(tokenizer, "fingerprint", len(tokens))
    texts = [vocabulary.token_text(token_id) for token_id in range(len(tokens))]
    assert texts == ["<s>", " the", "the", "a", "\ufffd", " "]
    bare = Tokenizer(models.BPE({"▁the": 0}, []))
    bare.decoder = tokenizer.decoder
    assert Vocabulary(bare, "fingerprint", 1).token_text(0) == "the"


async def longest_stand_still(vocabulary: Vocabulary, text: str) -> float:
    """Of the time that tokenising takes, the share of the longest in which nobody else had a turn."""
    length = limits.MAX_PROMPT_TOKENS
    encoding = asyncio.create_task(LongTexts(vocabulary).encode("prompt", text, length))
    moments = [time.perf_counter()]
    while not encoding.done():
        await asyncio.sleep(0)
        moments.append(time.perf_counter())
    longest = max(after - before for before, after in itertools.pairwise(moments))
    short = vocabulary.encode("ok bad")
    assert (await encoding)[: len(short)] == short
    return longest / (moments[-1] - moments[0])


@pytest.mark.slow
async def test_streams_go_on_while_a_long_text_is_tokenised(vocabulary: Vocabulary) -> None:
    """A thread of this process would hold the interpreter. A busy machine may delay it too."""
    text = "ok bad " * 100_000
    for _ in range(5):
        if await longest_stand_still(vocabulary, text) < 1 / 2:
            return
    raise AssertionError("nobody else had a turn for half of the time")
