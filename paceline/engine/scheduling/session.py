"""What one worker knows of one sequence, and which commands it may obey. Pure bookkeeping.

A worker's state is soft: it can be rebuilt from the coordinator's ledger at any time. So a session
never trusts relative counts: a round names the ledger's absolute length, and the cache is cut back to
what agrees with it.
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
from paceline.core.types import Proposal, SequenceParams

Answer = TypeVar("Answer")

_ROUND = 64
"""More tokens than a round and the one drafted ahead of its verdict can have."""


class Disposition(enum.Enum):
    """What to do with a round."""

    COMPUTE = "compute"
    IN_PROGRESS = "in progress"
    """A repetition of the round being computed: its answer is on the way."""
    REPEAT = "repeat"
    """A repetition of the last finished round: `Session.answer` once more."""


Question = tuple[int, int, Proposal]
"""What makes two commands of one round number the same question (the tail may differ)."""


def question_of(base_length: int, proposal: Proposal | None = None, num_draft_tokens: int = 0) -> Question:
    """Compared as it is, and only when a round is repeated: hashing distributions would cost every round."""
    return base_length, num_draft_tokens, Proposal() if proposal is None else proposal


@dataclass(slots=True)
class Session(Generic[Answer]):
    """One sequence: `(epoch, round, tokens, last answer)` and the tokens its cache entries stand for."""

    sequence_id: str
    epoch: int
    params: SequenceParams
    tokens: list[int]
    """The ledger as this worker knows it."""
    cached: list[int] = field(default_factory=list)
    """The token of every cache entry, speculative ones included."""
    round: int = 0
    question: Question | None = None
    answer: Answer | None = None
    _before: tuple[int, Question | None, Answer | None] = (0, None, None)
    """The round before the present one, with its question and answer."""

    def begin(
        self, epoch: int, round_number: int, base_length: int, tail: Sequence[int], question: Question
    ) -> Disposition:
        """Take up a round, bringing `tokens` to the ledger it names.

        Raises StaleEpochError (an older epoch or round), InvalidArgumentError (the same round with
        another question), FailedPreconditionError (a gap: resend from `known_length`).
        """
        if epoch != self.epoch:
            raise StaleEpochError(f"epoch {epoch} is not the current epoch {self.epoch}")
        if round_number < self.round:
            raise StaleEpochError(f"round {round_number} is over; the last one is {self.round}")
        if round_number == self.round:
            if question != self.question:
                raise InvalidArgumentError("round", f"{round_number} was asked before with other content")
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
        """Cache entries that may stay: those that agree with the ledger, short of its newest token.

        The newest token is always fed, since its row gives the next distribution.
        """
        bound = min(len(self.cached), len(self.tokens) - 1)
        if self.cached[:bound] == self.tokens[:bound]:
            return bound
        # Mostly it is a draft token of the last round that was rejected.
        start = max(0, bound - _ROUND)
        if self.cached[:start] != self.tokens[:start]:
            start = 0
        return next(i for i in range(start, bound) if self.cached[i] != self.tokens[i])

    @property
    def abandoned(self) -> bool:
        """The round after the last answered one was begun, and is to be asked before it begins again."""
        return self.round == self._before[0]

    def finish(self, answer: Answer) -> None:
        """Keep the answer for a repetition of the round."""
        self.answer = answer

    def abandon_round(self) -> None:
        """Forget that the last round was asked, so that asking it again computes it.

        The one before may be asked again as well: the worker began this one by itself, and its answer to that
        one crossed with a refusal that the same round had met before.
        """
        self.round, self.question, self.answer = self._before
