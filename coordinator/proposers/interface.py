"""Sources of proposals that guess from the text at once; a draft worker is asked instead (drafts.py).

To add a context source, write a file here with a subclass of `ContextSource`, and add a line in registry.py.
Sources never change a token of the output: the target judges every proposal alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.core.types import Proposal, Verdict

Evidence = tuple[str, int]
"""Evidence of a guess: its source and its grade."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Draft tokens that a context source proposes, with their evidence."""

    source: str
    """The source's name."""
    token_ids: tuple[int, ...]
    context_length: int
    """Number of text tokens that precede the guess."""
    grade: int = 0
    """Guesses of one source and grade share an acceptance estimate."""
    prior_rate: float = 0.5
    """Prior acceptance of a token of this grade."""

    @property
    def proposal(self) -> Proposal:
        """The guess as a proposal for the target; its tokens count as drawn from a point mass."""
        return Proposal(self.token_ids)

    @property
    def evidence(self) -> Evidence:
        """Guesses with equal evidence share an acceptance estimate."""
        return self.source, self.grade

    def cut(self, length: int) -> Guess:
        """The first `length` tokens."""
        return replace(self, token_ids=self.token_ids[:length])

    def behind_first(self) -> Guess:
        """The guess without its first token, which then counts as text. Requires at least two tokens."""
        return replace(self, token_ids=self.token_ids[1:], context_length=self.context_length + 1)


class ContextSource(Protocol):
    """Guesses from the text alone, in microseconds: deterministic, without I/O. One object a sequence."""

    name: str
    awaits_verdict: bool = False
    """True if its guess needs the verdict before it: the target must not begin that round by itself."""

    def guess(self, tokens: Sequence[int], most: int, after: Sequence[int] = ()) -> Guess | None:
        """Up to `most` tokens that may follow `tokens` and then `after`; None without a guess.

        Args:
            tokens: the sequence's committed tokens, prompt included. They may only grow between calls.
            most: a positive number of tokens.
            after: tokens that are proposed and not judged yet.
        """

    def on_verdict(self, verdict: Verdict, length: int) -> None:
        """A verdict was committed; the text then has `length` tokens. Most sources ignore it."""
        del verdict, length

    def close(self, tokens: Sequence[int]) -> None:
        """The sequence has come to its end with these tokens. A source may share them with later ones."""
        del tokens
