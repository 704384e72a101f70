"""Text piece by piece against the library's decoding of all tokens, for tokenizers of several kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from coordinator.text.detokenizer import BROKEN_TOKENS, CONTEXT_TOKENS, UNFINISHED_TOKENS, StreamDetokenizer

SETTINGS = settings(max_examples=300, deadline=None, derandomize=True, database=None)

WORDS = ("a", "b", "▁", "▁a", "▁b", "##b", "▁▁", ".")
SPECIAL = ("<s>", "</s>")
CHARACTERS = ("é", "日", "🙂", "\ufffd")


def tokenizer_of(tokens: Iterable[str], decoder: decoders.Decoder) -> Tokenizer:
    """One that is only good for decoding."""
    tokens = dict.fromkeys((*SPECIAL, *tokens))
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """As Llama 2, Mistral, Gemma and Phi-3 have it: a token for each byte, valid only together."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return tokenizer_of((*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))), decoders.Sequence(parts))


@functools.cache
def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it; some tokens end one character and begin the next."""
    across = [visible("日日")[2:4], visible(" 🙂")[:3], visible("é日")[1:4], visible("aé")[:2]]
    return tokenizer_of((*sorted(pre_tokenizers.ByteLevel.alphabet()), *across), decoders.ByteLevel())


@functools.cache
def metaspace() -> Tokenizer:
    return tokenizer_of(WORDS, decoders.Metaspace())


@functools.cache
def word_piece() -> Tokenizer:
    return tokenizer_of(WORDS, decoders.WordPiece())


def visible(text: str) -> str:
    """Bytes as byte-level tokenizers write them."""
    return "".join(
        part for part, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
    )


def of_bytes(text: str | bytes) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in (text.encode() if isinstance(text, str) else text)]


def ids_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    """One that is not in the vocabulary stands for an id beyond it."""
    ids = [tokenizer.token_to_id(token) for token in tokens]
    return [tokenizer.get_vocab_size() + 7 if token_id is None else token_id for token_id in ids]


def streamed(tokenizer: Tokenizer, prompt: Sequence[str], generated: Sequence[str]) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer, ids_of(tokenizer, prompt))
    pieces = [detokenizer.push(token_id) for token_id in ids_of(tokenizer, generated)]
    return [*pieces, detokenizer.finish()]


def decoded(tokenizer: Tokenizer, tokens: Sequence[str]) -> str:
    return str(tokenizer.decode(ids_of(tokenizer, tokens), skip_special_tokens=True))


def continuation(before: str, whole: str) -> str:
    """What `whole` adds to `before`, whose last character may have become another one."""
    while not whole.startswith(before):
        before = before[:-1]
    return whole[len(before) :]


def with_rows_kept(tokens: Sequence[str]) -> str:
    """The decoding of `byte_fallback`, but what begins a faulty row of bytes as characters stays."""
    text, row = "", bytearray()
    for token in (*tokens, "▁"):
        if token.startswith("<0x"):
            row.append(int(token[3:5], 16))
        elif token in WORDS or token == "<tool>":
            text += row_kept(bytes(row)) + token.replace("▁", " ")
            row.clear()
    return text[:-1].removeprefix(" ")


def row_kept(row: bytes) -> str:
    for end in range(len(row), 0, -1):
        characters = row[:end].decode(errors="ignore")
        # One that is U+FFFD itself cannot be told from what is unfinished, and is not given out at once.
        whole = characters.encode() == row[:end] and (end == len(row) or not characters.endswith("\ufffd"))
        if whole:
            return characters + "\ufffd" * (len(row) - end)
    return "\ufffd" * len(row)


FALLBACK_PARTS = st.one_of(
    st.sampled_from([[token] for token in (*WORDS, *SPECIAL, "<tool>", "beyond")]),
    st.sampled_from([of_bytes(character) for character in (*CHARACTERS, "a", "\n")]),
    st.sampled_from([of_bytes(bytes([byte])) for byte in (0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0xFF, 0xC3)]),
)


def tokens_of(parts: st.SearchStrategy[list[str]], most: int) -> st.SearchStrategy[list[str]]:
    return st.lists(parts, max_size=most).map(
        lambda lists: [token for part in lists for token in part][:most]
    )


@SETTINGS
@given(tokens_of(FALLBACK_PARTS, 5), tokens_of(FALLBACK_PARTS, 14))
def test_byte_fallback_tokens_decode_piecewise(prompt: list[str], generated: list[str]) -> None:
    before, whole = with_rows_kept(prompt), with_rows_kept(prompt + generated)
    library = decoded(byte_fallback(), prompt + generated)
    assert whole == library or "\ufffd" in library
    assert "".join(streamed(byte_fallback(), prompt, generated)) == continuation(before, whole)


LEVEL_TOKENS = st.one_of(
    st.sampled_from([*map(visible, "ab "), *SPECIAL, "<tool>", "beyond"]),
    st.sampled_from(sorted(byte_level().get_vocab())),
    st.sampled_from([character for text in CHARACTERS for character in visible(text)]),
)


@SETTINGS
@given(st.lists(LEVEL_TOKENS, max_size=12), st.lists(LEVEL_TOKENS, max_size=14))
def test_byte_level_tokens_decode_piecewise(prompt: list[str], generated: list[str]) -> None:
    before, whole = decoded(byte_level(), prompt), decoded(byte_level(), prompt + generated)
    assert "".join(streamed(byte_level(), prompt, generated)) == continuation(before, whole)


@SETTINGS
@given(st.lists(st.sampled_from([*visible("日\ufffdé🙂"), "</s>"]), max_size=80))
def test_random_bytes_decode_piecewise(generated: list[str]) -> None:
    assert "".join(streamed(byte_level(), [], generated)) == decoded(byte_level(), generated)


@pytest.mark.parametrize("times", range(1, 60))
def test_tokens_spanning_two_characters_lose_none(times: int) -> None:
    first, second, third = visible("日")
    tokens = [first, second, *[third + first, second] * times, third]
    text = "日" * (times + 1)
    assert decoded(byte_level(), tokens) == text
    pieces = streamed(byte_level(), [], tokens)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= BROKEN_TOKENS


@pytest.mark.parametrize("tokenizer", [byte_fallback, metaspace, word_piece])
@SETTINGS
@given(st.data())
def test_special_tokens_do_not_disturb_others(
    tokenizer: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    tokens = st.lists(st.sampled_from([*WORDS, *SPECIAL, "<tool>", "beyond"]), max_size=16)
    prompt, generated = data.draw(tokens), data.draw(tokens)
    detokenizer = StreamDetokenizer(tokenizer(), ids_of(tokenizer(), prompt))
    text = decoded(tokenizer(), prompt)
    for i, token_id in enumerate(ids_of(tokenizer(), generated)):
        text += detokenizer.push(token_id)
        assert text == decoded(tokenizer(), prompt + generated[: i + 1])
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    ("prompt", "generated", "text"),
    [
        ([], [*of_bytes("日"), "<0xE6>", "▁a"], "日\ufffd a"),
        ([], [*of_bytes("日"), "<0xE6>"], "日\ufffd"),
        ([], [*of_bytes("日"), "<0xE6>", "<0x97>", *of_bytes("🙂"), "▁a"], "日" + "\ufffd" * 6 + " a"),
        ([], ["a", *of_bytes("日"), "<0xFF>", "b", *of_bytes("日")], "a日\ufffdb日"),
        (of_bytes("日"), ["<0xE6>", "▁a"], "\ufffd a"),
        ([*of_bytes("日"), "<0xE6>"], ["▁a"], " a"),
        ([*of_bytes("日"), "<0xE6>"], ["<0xE6>", "▁a"], "\ufffd a"),
        ([*of_bytes("日"), "<0xE6>"], ["<0x97>", "<0xA5>", "▁a"], "日 a"),
        (["<0xFF>", *of_bytes("日")], ["▁a"], " a"),
    ],
)
def test_invalid_bytes_become_replacement_characters(
    prompt: list[str], generated: list[str], text: str
) -> None:
    assert "".join(streamed(byte_fallback(), prompt, generated)) == text


@pytest.mark.parametrize("text", ["🙂🙂🙂🙂", "a日日日日日日", "ééééa日🙂日🙂é🙂"])
def test_a_prompt_may_be_cut_within_bytes(text: str) -> None:
    tokens = of_bytes(text)
    for cut in range(len(tokens)):
        after = text.encode()[:cut].decode(errors="ignore")
        pieces = streamed(byte_fallback(), tokens[:cut], tokens[cut:])
        assert "".join(pieces) == text.removeprefix(after)
        assert "\ufffd" not in "".join(pieces)


def test_a_prompt_that_ends_in_special_tokens_still_has_text() -> None:
    prompt = ["▁a", *["<s>", "</s>"] * CONTEXT_TOKENS]
    assert streamed(byte_fallback(), prompt, ["▁b"]) == [" b", ""]


class Counting(StreamDetokenizer):
    """Notes how many tokens it decodes at once."""

    most = 0

    def _text(self, token_ids: Sequence[int]) -> str:
        self.most = max(self.most, len(token_ids))
        return super()._text(token_ids)


@pytest.mark.parametrize("tokenizer", [byte_fallback, byte_level])
@pytest.mark.parametrize(
    "repeated",
    [["</s>"], ["beyond"], ["▁"], ["a"], of_bytes("\ufffd"), of_bytes(b"\xe6"), [*visible("\ufffd")]],
)
def test_decoding_a_token_costs_the_same_at_any_length(
    tokenizer: Callable[[], Tokenizer], repeated: list[str]
) -> None:
    detokenizer = Counting(tokenizer(), [])
    for token_id in ids_of(tokenizer(), [visible("日")[0], "<0xE6>", *repeated * 300]):
        detokenizer.push(token_id)
    most = 2 * (BROKEN_TOKENS + UNFINISHED_TOKENS + 1)
    assert len(detokenizer._context) + len(detokenizer._pending) <= most
    assert detokenizer.most <= most


def test_special_tokens_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    detokenizer = StreamDetokenizer(byte_fallback(), ids_of(byte_fallback(), ["▁a", "<0xE6>", "<0x97>"]))
    with monkeypatch.context() as patch:
        patch.setattr(detokenizer, "_text", None)
        for token_id in ids_of(byte_fallback(), ["</s>", "<s>", "beyond"] * 10):
            assert detokenizer.push(token_id) == ""
    assert [detokenizer.push(token_id) for token_id in ids_of(byte_fallback(), ["<0xA5>"])] == ["日"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_special_tokens_are_decoded_on_request(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    prompt, generated = ids_of(tokenizer, ["<s>", "a"]), ids_of(tokenizer, ["b", "</s>", "<s>", "a"])
    detokenizer = StreamDetokenizer(tokenizer, prompt, skip_special_tokens=False)
    text = "".join([*map(detokenizer.push, generated), detokenizer.finish()])
    whole, before = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (prompt + generated, prompt))
    assert before + text == whole
    assert "</s>" in text
