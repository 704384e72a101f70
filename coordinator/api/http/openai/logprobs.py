"""Log-probabilities in OpenAI's two forms, and the prompt's in vLLM's.

They are of the target's own distribution, before temperature and filters. Bytes of a token that are no whole
character show as U+FFFD.
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
"""What stands for minus infinity, which JSON has not."""


@dataclass(slots=True)
class TextOffsets:
    """Where the tokens of a text begin in it, in order: behind all that those before them gave out.

    So special tokens take no room, but where `echo` spells them out, and all tokens of one character begin
    where it does.
    """

    detokenizer: Detokenizer
    given: int = 0
    """Characters of the text so far."""
    echo: str = ""
    """The text itself, where it is known as it came. Decoding leaves its special tokens out."""
    spellings: Mapping[int, re.Pattern[str]] = field(default_factory=dict)
    """How special tokens stand in it."""

    def push(self, token_id: int) -> int:
        """Where the next token begins."""
        begin = self.given
        self.given += len(self.detokenizer.push(token_id))
        # The tokenizer may have put it there itself: then the text has it not.
        if token_id in self.spellings and (spelt := self.spellings[token_id].match(self.echo, begin)):
            self.given = spelt.end()
        return begin


@lru_cache(maxsize=4)
def spellings(tokenizer: Tokenizer) -> Mapping[int, re.Pattern[str]]:
    """What text each special token is made of, with the white space that it takes in."""
    return {
        token_id: re.compile(
            (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
        )
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }


@dataclass(frozen=True, slots=True)
class LogprobWriter:
    """Names tokens by their texts."""

    vocabulary: Vocabulary
    names_by_id: bool = False
    """Tokens are named `token_id:N`, as with vLLM, instead of by their texts."""

    def completion(
        self, entries: Sequence[TokenLogprobs], offsets: TextOffsets, *, first_token: int | None = None
    ) -> dict[str, list[Any]]:
        """Parallel lists for a completion.

        Args:
            entries: one a token, in order.
            offsets: of the text that they go on with.
            first_token: the prompt's first token, which nothing precedes, where `entries` go on after it.
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
        """The token itself and the likeliest; of tokens with one text the likelier stands."""
        result = {self._text(entry.token_id): _finite(entry.logprob)}
        for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
            text = self._text(token_id)
            result[text] = max(_finite(logprob), result.get(text, LOWEST))
        return result

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The list for a message."""
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
        """One a token of the prompt: token id to what is known. The first has None."""
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
