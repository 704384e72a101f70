"""The coordinator's tokenizer: text to ids and back, and a fingerprint to compare with the workers'."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tokenizers import Tokenizer

from coordinator.text.detokenizer import StreamDetokenizer
from paceline.assets.tokenizer import load_tokenizer
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.fingerprint import vocabulary_fingerprint

LONG_TEXT = 10_000
"""Above this many characters or tokens, the tokenizer runs in a thread, so that other streams go on."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A loaded tokenizer with its fingerprint."""

    tokenizer: Tokenizer
    fingerprint: str
    size: int
    _token_texts: dict[int, str] = field(default_factory=dict, compare=False)

    @classmethod
    def load(cls, name: str) -> Vocabulary:
        """Load from a folder, a tokenizer.json, or a hub id. Raises InvalidArgumentError."""
        tokenizer = load_tokenizer(name, "tokenizer")
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        return cls(tokenizer, vocabulary_fingerprint(vocabulary), max(vocabulary.values()) + 1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text to the ids that transformers gives, by default with the tokenizer's special tokens.

        Callers must know that the text is short; `LongTexts` encodes all others and bounds their length.
        """
        if len(text) > LONG_TEXT:
            # The library releases the interpreter lock only for a batch.
            (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        else:
            encoding = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, by default without special tokens."""
        ids = list(token_ids)
        if len(ids) > LONG_TEXT:
            (text,) = self.tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            return str(text)
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_names(self, token_ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's spelling of each token; None for an id that has no token."""
        return [self.tokenizer.id_to_token(token_id) for token_id in token_ids]

    def token_text(self, token_id: int) -> str:
        """The text of one token as it appears after other text. Special tokens are included.

        Incomplete characters appear as U+FFFD.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            letter, before = _letter(self.tokenizer)
            text = self._shown([*letter, token_id])
            text = text[len(before) :] if text.startswith(before) else self._shown([token_id])
            self._token_texts[token_id] = text
        return text

    def _shown(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word, at the beginning of a text and after a space, without duplicates.

        Raises InvalidArgumentError.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            for text in (bare, f" {bare}") if bare else (word,):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
                if not 1 <= len(ids) <= limits.MAX_BAD_WORD_TOKENS:
                    bounds = f"must have 1 to {limits.MAX_BAD_WORD_TOKENS} tokens each, got {len(ids)}"
                    raise InvalidArgumentError("bad_words", bounds)
                found[ids] = None
        return tuple(found)

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> StreamDetokenizer:
        """An incremental decoder for the tokens after `prompt`."""
        return StreamDetokenizer(self.tokenizer, prompt, skip_special_tokens=skip_special_tokens)


@lru_cache(maxsize=4)
def _letter(tokenizer: Tokenizer) -> tuple[tuple[int, ...], str]:
    """A single-letter token and its text; both are empty if there is no such token.

    A decoder strips the space at the beginning of a text. Decoding a token after a letter keeps its space.
    """
    for letter in string.ascii_letters:
        token_id = tokenizer.token_to_id(letter)
        if token_id is not None and tokenizer.decode([token_id]) == letter:
            return (token_id,), letter
    return (), ""
