"""The tokenizer the coordinator needs: text to ids and back, and proof that the workers use the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from coordinator.detokenize import StreamDetokenizer
from paceline import assets
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.fingerprint import vocabulary_fingerprint

LONG_TEXT = 10_000
"""Characters from which tokenising moves to a thread, so that other streams go on."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A loaded tokenizer with its fingerprint."""

    tokenizer: Tokenizer
    fingerprint: str
    size: int
    _token_texts: dict[int, str] = field(default_factory=dict, compare=False)

    @classmethod
    def load(cls, name: str) -> Vocabulary:
        """From a folder, a tokenizer.json, or a hub id. Raises InvalidArgumentError."""
        path = Path(assets.resolve(name))
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
        except Exception as error:  # the library raises plain Exception
            raise InvalidArgumentError(
                "tokenizer", f"{name} has no tokenizer.json that can be loaded"
            ) from error
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        return cls(tokenizer, vocabulary_fingerprint(vocabulary), max(vocabulary.values()) + 1)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids as transformers gives them, by default with the tokenizer's own special tokens."""
        if len(text) > LONG_TEXT:
            # Of a batch, for only then the library lets other threads go on meanwhile.
            encode = partial(self.tokenizer.encode_batch, [text], add_special_tokens=add_special_tokens)
            (encoding,) = await asyncio.to_thread(encode)
        else:
            encoding = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """One token alone, special tokens included; bytes that are no whole character show as U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = str(self.tokenizer.decode([token_id], skip_special_tokens=False))
            self._token_texts[token_id] = text
        return text

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens, as it is at the beginning of a text and after a space, where they differ.

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

    def detokenizer(self, prompt: Sequence[int]) -> StreamDetokenizer:
        """An incremental decoder for what follows `prompt`."""
        return StreamDetokenizer(self.tokenizer, prompt)
