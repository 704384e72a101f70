"""A small vocabulary, finite languages, and the slow obvious answer to which tokens may follow."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.core.structured import StructuredOutputs
from paceline.grammar import Grammars, GrammarState, Mask

TOKENS = ("<end>", "a", "b", "c", "ab", "ba", "abc", '"', '"a', "1", "11", "<other>")
"""Special ones are in angle brackets."""
END, OTHER = 0, len(TOKENS) - 1
VOCAB = len(TOKENS)


def tokenizer_json() -> str:
    """The tokens as a byte-level BPE vocabulary."""
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    merges = [("a", "b"), ("b", "a"), ("ab", "c"), ('"', "a"), ("1", "1")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([TOKENS[END], TOKENS[OTHER]])
    return str(tokenizer.to_str())


def grammars(vocabulary_size: int = VOCAB, **changes: Any) -> Grammars:
    return Grammars(tokenizer_json(), vocabulary_size, (END,), **changes)


@functools.cache
def _shared_grammars() -> Grammars:
    """Their clock stands still: a stall of the machine is not the structure's."""
    return grammars(clock=lambda: 0.0)


def text_of(tokens: Iterable[int]) -> str:
    return "".join(TOKENS[token] for token in tokens)


@dataclass(frozen=True)
class Language:
    """A structure and all the texts that have it."""

    wanted: StructuredOutputs
    texts: frozenset[str]

    def start(self) -> GrammarState:
        return _shared_grammars().start(self.wanted)

    def allowed(self, tokens: Sequence[int]) -> set[int] | None:
        """What may come after `tokens`; None where nothing can be said: behind the end or a wrong token."""
        text = text_of(tokens)
        if END in tokens or OTHER in tokens or not any(full.startswith(text) for full in self.texts):
            return None
        going_on = {
            token
            for token in range(VOCAB)
            if token not in (END, OTHER) and any(full.startswith(text + TOKENS[token]) for full in self.texts)
        }
        return going_on | ({END} if text in self.texts else set())

    def is_forced(self, tokens: Sequence[int]) -> bool:
        """True where one character only may come next, and not the end."""
        text = text_of(tokens)
        following = {full[len(text) : len(text) + 1] for full in self.texts if full.startswith(text)}
        return len(following) == 1 and following != {""}

    def agrees(self, row: Mask, tokens: Sequence[int]) -> bool:
        """Whether a mask is right after `tokens`: where the text is forced, some of its spellings suffice."""
        found, want = {int(token) for token in np.flatnonzero(row)}, self.allowed(tokens)
        if want is None:
            return len(found) == VOCAB
        return bool(found) and found <= want if self.is_forced(tokens) else found == want


def _of(texts: Iterable[str], **wanted: Any) -> Language:
    return Language(StructuredOutputs(**wanted), frozenset(texts))


_PAIRS = [x + y for x in ("ab", "c", "ba") for y in ("", "ab", "c", "ba")]
_ENUM = ["a", "ab", 1, 11, "ba1"]
LANGUAGES = {
    "regex": _of(_PAIRS, regex="(ab|c|ba)(ab|c|ba)?"),
    "regex with anchors": _of(["aab", "aaab", "aa", "aaa"], regex="^a{2,3}b?$"),
    "choice": _of(["a", "abc", "abca", "1", '"a"'], choice=["a", "abc", "abca", "1", '"a"']),
    "grammar": _of(_PAIRS, grammar='start: x x?\nx: "ab" | "c" | "ba"\n'),
    # What may come behind a "1" is told by what came before it, and by nothing that is written there.
    "alike in the middle": _of(
        ["a1b", "a11b", "c1a", "c11a"], grammar='start: "a" ONE "b" | "c" ONE "a"\nONE: /11?/\n'
    ),
    "json": _of([json.dumps(value) for value in _ENUM], json={"enum": _ENUM}),
    "one text": _of(["abcabc"], choice=["abcabc"]),
}
