"""A worker's view of one sequence, and checks of the commands for it. Pure bookkeeping.

A worker's state is soft: it can be rebuilt from the coordinator's ledger at any time. Therefore a session
never relies on relative counts: a round names the ledger's absolute length, and the cache is truncated to the
part that agrees with it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.core.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    StaleEpochError,
)
from paceline.core.types import CHAIN, Proposal, SequenceParams, TreeShape

Answer = TypeVar("Answer")

_ROUND = 64
"""Exceeds the tokens of a round plus those drafted ahead of its verdict."""


class Disposition(enum.Enum):
    """How to handle a round."""

    COMPUTE = "compute"
    IN_PROGRESS = "in progress"
    """A repetition of the round being computed, whose answer will follow."""
    REPEAT = "repeat"
    """A repetition of the last finished round: send `Session.answer` again."""


Question = tuple[int, int, Proposal, TreeShape]
"""Content that two commands of one round number must share (the tail may differ)."""


def question_of(
    base_length: int,
    proposal: Proposal | None = None,
    num_draft_tokens: int = 0,
    shape: TreeShape = CHAIN,
) -> Question:
    """Questions are compared only when a round is repeated; hashing distributions would cost every round."""
    return base_length, num_draft_tokens, Proposal() if proposal is None else proposal, shape


@dataclass(slots=True)
class Session(Generic[Answer]):
    """One sequence: `(epoch, round, tokens, last answer)` and the tokens of its cache entries."""

    sequence_id: str
    epoch: int
    params: SequenceParams
    tokens: list[int]
    """The ledger, as far as this worker knows it."""
    cached: list[int] = field(default_factory=list)
    """The token of every cache entry, including speculative ones."""
    round: int = 0
    question: Question | None = None
    answer: Answer | None = None
    _before: tuple[int, Question | None, Answer | None] = (0, None, None)
    """The previous round, with its question and answer."""

    def begin(
        self, epoch: int, round_number: int, base_length: int, tail: Sequence[int], question: Question
    ) -> Disposition:
        """Begin a round, and update `tokens` to the ledger that it names.

        Raises StaleEpochError (an older epoch or round), InvalidArgumentError (the same round with another
        question), FailedPreconditionError (a gap: resend from `known_length`).
        """
        if epoch != self.epoch:
            raise StaleEpochError(f"epoch {epoch} is not the current epoch {self.epoch}")
        if round_number < self.round:
            raise StaleEpochError(f"round {round_number} is over; the last one is {self.round}")
        if round_number == self.round:
            if question != self.question:
                raise InvalidArgumentError("round", f"{round_number} was requested before with other content")
            return Disposition.IN_PROGRESS if self.answer is None else Disposition.REPEAT
        start = base_length - len(tail)
        if base_length < 1 or start < 0:
            raise InvalidArgumentError("base_length", f"{base_length} is shorter than its tail")
        if start > len(self.tokens):
            raise FailedPreconditionError(
                f"tokens {len(self.tokens)} to {start} are missing", known_length=len(self.tokens)
            )
        del self.tokens[start:]
        self.tokens.extend(tail)
        self._before = self.round, self.question, self.answer
        self.round, self.question, self.answer = round_number, question, None
        return Disposition.COMPUTE

    def agreed_length(self) -> int:
        """Number of cache entries that agree with the ledger, excluding its newest token.

        The newest token is always fed, since its row gives the next distribution.
        """
        bound = min(len(self.cached), len(self.tokens) - 1)
        if self.cached[:bound] == self.tokens[:bound]:
            return bound
        # The first difference is usually a rejected draft token of the last round.
        start = max(0, bound - _ROUND)
        if self.cached[:start] != self.tokens[:start]:
            start = 0
        return next(i for i in range(start, bound) if self.cached[i] != self.tokens[i])

    @property
    def abandoned(self) -> bool:
        """True if the round after the last answered one was abandoned, so it will be requested again."""
        return self.round == self._before[0]

    def finish(self, answer: Answer) -> None:
        """Keep the answer for a repetition of the round."""
        self.answer = answer

    def abandon_round(self) -> None:
        """Forget the last round, so that a repeated request computes it.

        The previous round may be requested again as well: the worker began this round by itself, and its
        answer to the previous one crossed with an earlier refusal of this one.
        """
        self.round, self.question, self.answer = self._before
