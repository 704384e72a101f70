"""Formats log-probabilities: OpenAI's completion and chat formats, and vLLM's format for prompts.

Values come from the target's distribution before temperature and filters. In token texts, incomplete
characters appear as U+FFFD.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from coordinator.api.http.openai.token_bytes import token_bytes
from coordinator.text.detokenizer import Detokenizer
from coordinator.text.vocabulary import Vocabulary
from paceline.core.types import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


@dataclass(slots=True)
class TextOffsets:
    """Start offsets of a text's tokens, in order. A token starts where the text of the tokens before it ends.

    Special tokens therefore have no length unless they appear in `echo`. If several tokens encode one
    character, all of them start at the offset of that character.
    """

    detokenizer: Detokenizer
    given: int = 0
    """Number of characters of the text so far."""
    echo: str = ""
    """The original text, if it is known. Decoding leaves out its special tokens."""
    spellings: Mapping[int, re.Pattern[str]] = field(default_factory=dict)
    """Patterns of special tokens in the original text."""

    def push(self, token_id: int) -> int:
        """The start offset of the next token."""
        begin = self.given
        self.given += len(self.detokenizer.push(token_id))
        # A special token that the tokenizer added is not in the original text.
        if token_id in self.spellings and (spelt := self.spellings[token_id].match(self.echo, begin)):
            self.given = spelt.end()
        return begin


@lru_cache(maxsize=4)
def spellings(tokenizer: Tokenizer) -> Mapping[int, re.Pattern[str]]:
    """The text pattern of each special token, including the white space that it absorbs."""
    return {
        token_id: re.compile(
            (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
        )
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }


@dataclass(frozen=True, slots=True)
class LogprobWriter:
    """Builds the log-probability objects of API responses."""

    vocabulary: Vocabulary
    names_by_id: bool = False
    """Name tokens `token_id:N`, as in vLLM, instead of by their texts."""

    def completion(
        self, entries: Sequence[TokenLogprobs], offsets: TextOffsets, *, first_token: int | None = None
    ) -> dict[str, list[Any]]:
        """The `logprobs` object of a completion: parallel lists with one entry per token.

        Args:
            entries: one per token, in order.
            offsets: offsets of the text that these tokens continue.
            first_token: the prompt's first token, if `entries` begin after it. It has no log-probability.
        """
        first = [] if first_token is None else [first_token]
        token_ids = [*first, *(entry.token_id for entry in entries)]
        unknown = [None] * len(first)
        return {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [*unknown, *(_finite(entry.logprob) for entry in entries)],
            "top_logprobs": [*unknown, *(self._likeliest(entry) for entry in entries)],
            "text_offset": [offsets.push(token_id) for token_id in token_ids],
        }

    def _likeliest(self, entry: TokenLogprobs) -> dict[str, float]:
        """The token itself and the most likely ones. Of tokens with equal text, the likeliest counts."""
        result = {self._text(entry.token_id): _finite(entry.logprob)}
        for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
            text = self._text(token_id)
            result[text] = max(_finite(logprob), result.get(text, LOWEST))
        return result

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The `logprobs` object of a chat message."""
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [
                    self._token(token_id, logprob)
                    for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
                ],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(self.vocabulary, token_id)
        return {
            "token": self._text(token_id),
            "logprob": _finite(logprob),
            "bytes": None if raw is None else list(raw),
        }

    def prompt(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """One entry per prompt token, keyed by token id. The first entry is None."""
        return [None, *(self._ranked(entry) for entry in entries)]

    def _ranked(self, entry: TokenLogprobs) -> dict[str, Any]:
        ranked = zip(entry.top_token_ids, entry.top_logprobs, itertools.count(1))
        return {
            str(token_id): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self.vocabulary.token_text(token_id),
            }
            for token_id, logprob, rank in ((entry.token_id, entry.logprob, entry.rank), *ranked)
        }

    def _text(self, token_id: int) -> str:
        if self.names_by_id:
            return f"token_id:{token_id}"
        return self.vocabulary.token_text(token_id)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
