"""Sub-drafters guess from a sequence's text which tokens its draft is about to draw.

The draft checks the guesses in one step (sampling/guesses.py), so a guess may be useless but never wrong. To
add a sub-drafter, write a class with `guess` and add a line to `SUB_DRAFTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from paceline.core.config import NO_SUB_DRAFTER, DraftConfig
from paceline.core.errors import InvalidArgumentError
from paceline.predictors.copying import TextIndex, copied
from paceline.predictors.ngram import NgramPredictor


class SubDrafter(Protocol):
    """Guesses in microseconds, without I/O. One object serves one sequence."""

    def guess(self, ledger: Sequence[int], drawn: Sequence[int], most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow `ledger` and then `drawn`.

        Args:
            ledger: the committed tokens. They only grow between calls.
            drawn: the draft tokens of the round so far. They may differ from those of an earlier call.
            most: a positive number of tokens.
        """


class GuessNothing:
    """Stands for no sub-drafter."""

    def guess(self, ledger: Sequence[int], drawn: Sequence[int], most: int) -> Sequence[int]:
        """See `SubDrafter`."""
        return ()


class GuessCopies:
    """Guesses what followed the latest place that matches the text's end, as prompt lookup does."""

    def __init__(self) -> None:
        self._index = TextIndex()

    def guess(self, ledger: Sequence[int], drawn: Sequence[int], most: int) -> Sequence[int]:
        """See `SubDrafter`."""
        text = [*ledger, *drawn]
        match = self._index.find(text, len(drawn))
        return () if match is None else copied(text, match.start, most)


class GuessCounts:
    """Guesses the most frequent continuations of the text's last tokens."""

    def __init__(self) -> None:
        self._predictor = NgramPredictor()

    def guess(self, ledger: Sequence[int], drawn: Sequence[int], most: int) -> Sequence[int]:
        """See `SubDrafter`."""
        self._predictor.take_in(ledger)
        return self._predictor.predict(most, drawn)[0]


SUB_DRAFTERS: Final[dict[str, Callable[[], SubDrafter]]] = {
    NO_SUB_DRAFTER: GuessNothing,
    "prompt-lookup": GuessCopies,
    "ngram": GuessCounts,
}


def sub_drafter_of(config: DraftConfig) -> Callable[[], SubDrafter]:
    """Makes the sub-drafter of each sequence. Raises InvalidArgumentError naming `sub_drafter`."""
    make = SUB_DRAFTERS.get(config.sub_drafter)
    if make is None:
        known = ", ".join(SUB_DRAFTERS)
        raise InvalidArgumentError("sub_drafter", f"must be one of {known}, got {config.sub_drafter!r}")
    return make
