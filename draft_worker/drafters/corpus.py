"""Counts of a text: of a file, or of a part of the embedded pair's training text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.assets.training import corpus
from paceline.core.config import DraftConfig
from paceline.core.errors import InvalidArgumentError
from paceline.core.system.small_files import read_text
from paceline.engine.loading.build import Built
from paceline.telemetry.steps import step

EMBEDDED_PART: Final = 16
"""One in so many files of the embedded text is counted: two megabytes, in a second or two."""
_PIECE: Final = 1 << 16
"""Characters that are given to the tokenizer at a time, from a line's beginning on."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CorpusCounts:
    """How often each token occurs, and how often each follows another.

    Pairs are sorted by their first token: those of token t are `starts[t]` to `starts[t + 1]` of `followers`
    and `pairs`.
    """

    singles: Counts
    """[vocabulary]."""
    starts: Counts
    """[vocabulary + 1]."""
    followers: Counts
    """[different pairs]: the second token of each."""
    pairs: Counts
    """[different pairs]: their counts."""

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], vocabulary_size: int) -> CorpusCounts:
        """Count texts of token ids below `vocabulary_size`. No pair goes from one text to the next."""
        parts = [np.asarray(text, dtype=np.int64) for text in texts]
        singles = np.zeros(vocabulary_size, dtype=np.int64)
        codes: list[Counts] = [np.empty(0, dtype=np.int64)]
        for part in parts:
            singles += np.bincount(part, minlength=vocabulary_size)
            codes.append(part[:-1] * vocabulary_size + part[1:])
        found, pairs = np.unique(np.concatenate(codes), return_counts=True)
        starts = np.searchsorted(found, np.arange(vocabulary_size + 1) * vocabulary_size)
        return cls(singles, starts, found % vocabulary_size, pairs)

    def after(self, token: int) -> tuple[Counts, Counts]:
        """The tokens that follow one, and how often each does."""
        own = slice(self.starts[token], self.starts[token + 1])
        return self.followers[own], self.pairs[own]


def count_corpus(built: Built, config: DraftConfig) -> CorpusCounts:
    """Tokenize and count `config.corpus`, or the embedded text.

    Raises InvalidArgumentError naming `corpus` for a file that cannot be read or has no text.
    """
    step("counting the tokens of %s", config.corpus or "the embedded text")
    if config.corpus:
        texts = list(_pieces(read_text("corpus", config.corpus)))
    else:
        texts = list(corpus.sample(EMBEDDED_PART))
    if not texts:
        why = f"{config.corpus} is empty" if config.corpus else "is required: this Python has no source files"
        raise InvalidArgumentError("corpus", why)
    tokenizer: Any = built.loaded.tokenizer
    tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return CorpusCounts.of(tokens, built.loaded.vocab_size)


def _pieces(text: str) -> Iterator[str]:
    """The text in parts that begin with a line, where lines are not longer than a part."""
    begin = 0
    while begin < len(text):
        end = begin + _PIECE
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or end
        yield text[begin:end]
        begin = end
