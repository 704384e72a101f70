"""The state of a sequence on a worker, and where states come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.kv import PrefixIndex


class SequenceState(Protocol):
    """What a worker has computed of one sequence's tokens. It is a cache: it can be computed again."""

    @property
    def length(self) -> int:
        """The tokens that it has taken in."""

    @property
    def finite_length(self) -> int:
        """The length of the beginning that is known to be finite."""

    def mark_finite(self) -> None:
        """The row after the last token was a distribution, so everything is finite."""

    def truncate_to(self, length: int) -> int:
        """Forget what follows the first `length` tokens, and any reservation.

        Returns the tokens that are left: fewer than `length` where the state cannot go back to every
        position.
        """

    def lookup(self, tokens: Sequence[int]) -> int:
        """Go on with what is cached of `tokens`, which begin with those taken in, as far as there is any.

        Returns how many tokens that brings.
        """

    def publish(self, tokens: Sequence[int]) -> None:
        """Let later sequences find what stands for `tokens`, the committed ones from position 0 on."""

    def withdraw(self, length: int) -> None:
        """Let nobody find what stands for tokens at `length` and beyond, whoever published it."""

    def free(self) -> None:
        """Give everything back."""


class SequenceStates(Protocol):
    """Makes the states of one worker, which share memory."""

    @property
    def prefix_index(self) -> PrefixIndex | None:
        """What later sequences find; None where nothing is kept for them."""

    def new(self, salt: str) -> SequenceState:
        """An empty state. Sequences find only what was published under their own salt."""
