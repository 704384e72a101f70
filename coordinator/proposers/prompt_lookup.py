"""Draft tokens copied from an earlier place in the sequence's own text. Pure.

Prompt lookup (Saxena 2023, "Prompt lookup decoding"): code, edits, extracts and lists repeat themselves. Such
a proposal needs no model and no round trip to a draft worker. The target judges it like any other, so it
changes no token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.proposers.interface import ContextSource, Guess
from coordinator.sequence.round_record import PROMPT_LOOKUP
from paceline.predictors.copying import TextIndex, copied

NAME: Final = PROMPT_LOOKUP

GRADES = (3, 5, 9)
"""Match lengths at which a new grade of guesses begins."""
PRIOR_RATES = (0.4, 0.55, 0.7, 0.85)
"""Prior acceptance of a copied token in each grade."""


def grade_of(match_length: int) -> int:
    """The grade of copies after a match of that many tokens."""
    return bisect_right(GRADES, match_length)


@dataclass(slots=True)
class PromptLookup(ContextSource):
    """A context source that copies the continuation of the latest matching text."""

    index: TextIndex = field(default_factory=TextIndex)
    name: str = NAME

    def guess(self, tokens: Sequence[int], most: int, after: Sequence[int] = ()) -> Guess | None:
        """A copy of `most` tokens; None if the end of the text did not occur before.

        A match behind `after` counts its tokens too. If `after` is not a copy of the continuation, there is
        no guess.
        """
        match = self.index.find(tokens)
        if match is None:
            return None
        token_ids = copied(tokens, match.start, len(after) + most)
        if token_ids[: len(after)] != tuple(after):
            return None
        length = min(match.length + len(after), self.index.longest)
        grade = grade_of(length)
        return Guess(self.name, token_ids[len(after) :], length, grade, PRIOR_RATES[grade])
