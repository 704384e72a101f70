"""The bytes of tokens, against llguidance, and texts shared by several tokens."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coordinator.api.http.openai.logprobs import LogprobWriter, TextOffsets
from coordinator.api.http.openai.token_bytes import BYTES, token_bytes
from coordinator.text.detokenizer import REPLACEMENT
from coordinator.text.vocabulary import Vocabulary
from paceline.core.types import FinishReason, TokenLogprobs
from tests.unit.http.api import CHATS, Api, commit, script


def test_the_alphabet_is_that_of_byte_level_bpe() -> None:
    assert set(BYTES) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTES.values()) == list(range(256))


def test_token_bytes_of_a_byte_level_vocabulary(vocabulary: Vocabulary) -> None:
    reference = LLTokenizer(vocabulary.tokenizer.to_str())
    special = vocabulary.tokenizer.get_added_tokens_decoder()
    # To the library 0xFF is a mark of its own.
    unlike = {*special, vocabulary.tokenizer.token_to_id("\u00ff")}
    plain = [token_id for token_id in range(vocabulary.size) if token_id not in unlike]
    for token_id in plain:
        assert token_bytes(vocabulary, token_id) == reference.decode_bytes([token_id])
    assert any(REPLACEMENT in vocabulary.token_text(token_id) for token_id in plain)
    for token_id, token in special.items():
        assert token_bytes(vocabulary, token_id) == token.content.encode()


@pytest.fixture(scope="module")
def falling_back() -> Vocabulary:
    """As SentencePiece's: some pieces, the bytes, U+FFFD itself, and a piece that looks byte-level."""
    every = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", *every, "a", "\u2581b", REPLACEMENT, "\u00f0\u0141"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Vocabulary(tokenizer, "fingerprint", len(tokens))


def test_token_bytes_of_a_byte_fallback_vocabulary(falling_back: Vocabulary) -> None:
    def of(token: str) -> bytes | None:
        return token_bytes(falling_back, falling_back.tokenizer.token_to_id(token))

    assert [of(f"<0x{byte:02X}>") for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    for token in ("a", REPLACEMENT, "\u00f0\u0141"):
        assert of(token) == token.encode()
    assert of("\u2581b") == b" b"


def test_unknown_bytes_are_absent(falling_back: Vocabulary) -> None:
    """This decoder hides the bytes of a token."""
    tokenizer = Tokenizer.from_str(falling_back.tokenizer.to_str())
    tokenizer.decoder = decoders.Replace("a", REPLACEMENT)
    other = Vocabulary(tokenizer, "fingerprint", falling_back.size)
    assert token_bytes(other, tokenizer.token_to_id("a")) is None


@pytest.mark.parametrize(("own", "top"), [(-3.0, (-0.5, -2.0)), (-0.5, (-1.0, -2.0)), (-2.0, (-3.0, -1.0))])
def test_the_likeliest_of_equal_texts_is_listed(
    own: float, top: tuple[float, float], falling_back: Vocabulary
) -> None:
    """A completion lists tokens by text, and partial characters share one."""
    first, second, third, letter = map(
        falling_back.tokenizer.token_to_id, ("<0x80>", "<0x81>", "<0x82>", "a")
    )
    entry = TokenLogprobs(first, own, 9, (second, third, letter), (*top, -2.5))
    offsets = TextOffsets(falling_back.detokenizer(()))
    lists = LogprobWriter(falling_back).completion([entry], offsets)
    assert lists["top_logprobs"] == [{REPLACEMENT: max(own, *top), "a": -2.5}]
    assert lists["token_logprobs"] == [own]


async def test_the_bytes_of_an_emojis_tokens_join_to_it(coordinator: Any, api: Api) -> None:
    """No token of it is a whole character."""
    content = "an 🎈é"
    entries = [TokenLogprobs(t, -0.5, 1, (t,), (-0.5,)) for t in await coordinator.tokenize(content)]
    coordinator.script = script(
        *(commit(index, "", logprobs=(entry,)) for index, entry in enumerate(entries[:-1])),
        commit(len(entries) - 1, content, FinishReason.LENGTH, logprobs=(entries[-1],)),
    )
    choice = await api.choice(CHATS, logprobs=True, top_logprobs=1)
    told = choice["logprobs"]["content"]
    assert any("\ufffd" in token["token"] for token in told)
    assert b"".join(bytes(token["bytes"]) for token in told).decode() == choice["message"]["content"]
    assert [token["top_logprobs"][0]["bytes"] for token in told] == [token["bytes"] for token in told]
