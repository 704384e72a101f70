"""Draft tokens that a structured output leaves no choice about. Pure.

Where only one token continues the structure, the target knows it: it has the compiled grammar, and sends such
tokens with its verdict (`Verdict.forced_token_ids`). They are always accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.proposers.interface import ContextSource, Guess
from paceline.core.types import Verdict

NAME: Final = "grammar"

PRIOR_RATE = 0.99
"""Prior acceptance. A token may still be replaced by an end of the text, such as a stop."""


@dataclass(slots=True)
class GrammarSource(ContextSource):
    """A context source of forced tokens."""

    awaits_verdict: bool
    """True for a request with a structured output; others have no forced tokens."""
    name: str = NAME
    _forced: tuple[int, ...] = ()
    _length: int = 0
    """Length of the text that they follow."""

    def guess(self, tokens: Sequence[int], most: int, after: Sequence[int] = ()) -> Guess | None:
        """The forced tokens behind `after`; None where there are none."""
        known, wanted = self._forced, len(after)
        if len(tokens) != self._length or known[:wanted] != tuple(after) or not known[wanted:]:
            return None
        return Guess(self.name, known[wanted : wanted + most], len(tokens) + wanted, prior_rate=PRIOR_RATE)

    def on_verdict(self, verdict: Verdict, length: int) -> None:
        """Take the forced tokens behind the committed ones."""
        self._forced, self._length = verdict.forced_token_ids, length
