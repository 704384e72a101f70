"""The interfaces of a sequence's state on a worker and of the pool of states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.kv import PrefixIndex


class SequenceState(Protocol):
    """A worker's computed state of one sequence's tokens. It is a cache: it can be computed again."""

    @property
    def length(self) -> int:
        """Number of tokens in the state."""

    @property
    def finite_length(self) -> int:
        """Length of the prefix that is known to be finite."""

    def mark_finite(self) -> None:
        """Mark the state as finite: the row after the last token was a distribution."""

    def truncate_to(self, length: int) -> int:
        """Drop everything after the first `length` tokens, and any reservation.

        Returns the number of tokens left: fewer than `length` if the state cannot return to every position.
        """

    def lookup(self, tokens: Sequence[int]) -> int:
        """Add cached state for `tokens`, which begin with the tokens in the state, as far as there is any.

        Returns the number of tokens added.
        """

    def publish(self, tokens: Sequence[int]) -> None:
        """Make the state of `tokens`, the committed ones from position 0 on, available to later sequences."""

    def withdraw(self, length: int) -> None:
        """Unpublish the state of tokens at `length` and beyond, whichever sequence published it."""

    def free(self) -> None:
        """Release all memory."""


class SequenceStates(Protocol):
    """Makes the states of one worker, which share memory."""

    @property
    def prefix_index(self) -> PrefixIndex | None:
        """The index for later sequences; None if nothing is kept for them."""

    def new(self, salt: str) -> SequenceState:
        """An empty state. Sequences share only state published under their own salt."""
