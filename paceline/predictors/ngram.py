"""Next tokens by n-gram counts over one text. Pure.

For each context of one, two or three tokens the tables count the tokens that followed it. A prediction takes
the most frequent continuation of the longest known context, appends it to the text tentatively, and goes on
from there. No model is needed, and the tables learn with each token.

The tables are dictionaries keyed by the tokens of the context, so contexts cannot collide as hashes could.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core import limits

MAX_ORDER = 4
"""Longest n-gram: a context of three tokens and its continuation."""
REACH = 16_384
"""Number of tokens counted when a text is taken in for the first time, which bounds its time."""


@dataclass(slots=True)
class ContextCounts:
    """Counts of the tokens that followed one context."""

    likeliest: int
    """The most frequent token; among equals, the one seen last."""
    most: int = 1
    """Its count."""
    _others: dict[int, int] | None = None
    """Counts of the other tokens; most contexts have none."""

    def count_of(self, token: int) -> int:
        """Number of times that the token followed."""
        return self.most if token == self.likeliest else (self._others or {}).get(token, 0)

    def add(self, token: int) -> None:
        """Count one more occurrence."""
        if token == self.likeliest:
            self.most += 1
            return
        others = self._others = self._others or {}
        count = others.pop(token, 0) + 1
        if count >= self.most:
            token, count, self.likeliest, self.most = self.likeliest, self.most, token, count
        others[token] = count


@dataclass(slots=True)
class NgramPredictor:
    """Tables of each order from 2 to `max_order`, with back-off from the longest context to the shortest."""

    max_order: int = MAX_ORDER
    tables: list[dict[tuple[int, ...], ContextCounts]] = field(default_factory=list)
    """Entry i: the table of order i + 2, by context. Counts of a whole text stay."""
    context: tuple[int, ...] = ()
    """The longest context at the end of the text. A longer history would predict the same."""
    capacity: int = limits.MAX_NGRAM_ENTRIES
    """Number of (context, continuation) pairs that may still be added. Counts of known pairs go on."""
    _length: int | None = None
    """Number of tokens of a growing text that are counted or skipped; None before `take_in`."""

    def __post_init__(self) -> None:
        """Make an empty table for each order."""
        self.tables = [{} for _ in range(self.max_order - 1)]

    def update(self, token: int) -> None:
        """Count a committed token behind the contexts before it, and append it to the context."""
        before = self.context
        for length in range(1, len(before) + 1):
            table, context = self.tables[length - 1], before[-length:]
            found = table.get(context)
            if found is not None and found.likeliest == token:
                found.most += 1
            else:
                self._add(table, context, found, token)
        self.context = (*before, token)[1 - self.max_order :]

    def update_batch(self, tokens: Sequence[int]) -> None:
        """Count several tokens, such as a prompt."""
        for token in tokens:
            self.update(token)

    def take_in(self, tokens: Sequence[int]) -> None:
        """Count what is new in a text that only grows between calls; of the first one, the last `REACH`."""
        if self._length is None:
            self._length = max(0, len(tokens) - REACH)
        self.update_batch(tokens[self._length :])
        self._length = len(tokens)

    def predict(self, count: int, after: Sequence[int] = ()) -> tuple[list[int], int]:
        """Up to `count` tokens that may follow the text and then `after`, and the first one's context length.

        Stops at the first position where no order knows the context.
        """
        context = (*self.context, *after)[1 - self.max_order :]
        predicted: list[int] = []
        first = 0
        while len(predicted) < count:
            token, length = self._next(context)
            if not length:
                break
            first = first or length
            predicted.append(token)
            context = (*context, token)[1 - self.max_order :]
        return predicted, first

    def _next(self, context: tuple[int, ...]) -> tuple[int, int]:
        """The likeliest token of the longest known context, and that context's length; (-1, 0) if none."""
        for length in range(len(context), 0, -1):
            found = self.tables[length - 1].get(context[-length:])
            if found is not None:
                return found.likeliest, length
        return -1, 0

    def _add(
        self,
        table: dict[tuple[int, ...], ContextCounts],
        context: tuple[int, ...],
        found: ContextCounts | None,
        token: int,
    ) -> None:
        if found is None or not found.count_of(token):
            if self.capacity == 0:
                return
            self.capacity -= 1
        if found is None:
            table[context] = ContextCounts(token)
        else:
            found.add(token)
