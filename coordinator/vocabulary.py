"""The tokenizer the coordinator needs: text to ids and back, and proof that the workers use the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from coordinator.detokenize import StreamDetokenizer
from paceline import assets
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

    async def encode(self, text: str) -> list[int]:
        """Ids with the tokenizer's own special tokens, as transformers gives them."""
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self._encode, text)
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def detokenizer(self, prompt: Sequence[int]) -> StreamDetokenizer:
        """An incremental decoder for what follows `prompt`."""
        return StreamDetokenizer(self.tokenizer, prompt)
