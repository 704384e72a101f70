"""Where short runs of tokens occurred in a growing text. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

REACH = 16_384
"""Number of tokens indexed when a text is taken in for the first time, which bounds its time."""


@dataclass(slots=True)
class Occurrences:
    """The ends of each run of `width` tokens, newest first. The tokens themselves stay with their owner."""

    width: int = 2
    """1 or 2 tokens."""
    _newest: dict[int, int] = field(default_factory=dict)
    """By run, the index of its last token at the latest occurrence."""
    _before: array[int] = field(default_factory=lambda: array("i"))
    """For each indexed token, the end of the previous occurrence of its run; -1 if there is none."""
    _first: int | None = None
    """The first indexed token."""

    def take_in(self, tokens: Sequence[int], end: int) -> None:
        """Index the runs that end before index `end`. `tokens` may only grow between calls."""
        if self._first is None:
            self._first = max(self.width - 1, end - REACH)
        for i in range(self._first + len(self._before), end):
            run = self._run(tokens, i)
            self._before.append(self._newest.get(run, -1))
            self._newest[run] = i

    def ends(self, tokens: Sequence[int], last: int) -> Iterator[int]:
        """Where the run that ends at index `last` of `tokens` ended in the indexed text, newest first."""
        end = self._newest.get(self._run(tokens, last), -1)
        while end >= 0:
            yield end
            assert self._first is not None
            end = self._before[end - self._first]

    def _run(self, tokens: Sequence[int], end: int) -> int:
        """Encode a run as one integer, which takes half the memory of a tuple."""
        return tokens[end] if self.width == 1 else tokens[end - 1] << 32 | tokens[end]


def agreement(text: Sequence[int], end: int, tokens: Sequence[int], last: int, most: int) -> int:
    """Number of equal tokens that end at `end` in `text` and at `last` in `tokens`, at most `most`."""
    most = min(most, end + 1, last + 1)
    if text[end - most + 1 : end + 1] == tokens[last - most + 1 : last + 1]:
        return most
    length = 0
    while text[end - length] == tokens[last - length]:
        length += 1
    return length
