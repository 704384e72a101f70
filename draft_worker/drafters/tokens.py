"""A drafter whose scores are made of the text alone, such as a table: no model, no cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from draft_worker.drafters.interface import Drafter, DrafterKind, DraftSkills
from paceline.core.clock import Clock
from paceline.core.config import DraftConfig
from paceline.core.errors import PacelineError
from paceline.core.messages import DraftProposal
from paceline.engine.cancel import CancelToken
from paceline.engine.loading.build import Built, build_vocabulary
from paceline.engine.multi_step import Chain, ChainInput
from paceline.engine.scheduling.passes import Job, PassResult, own_error
from paceline.engine.scheduling.sequences import HeldSequence, HeldSequences
from paceline.telemetry.worker import Passes

Row = npt.NDArray[np.float32]


class TextScorer(Protocol):
    """Scores the next token after one text, and keeps what it needs for that, such as counts.

    A text grows and shrinks at its end only. Scores must be the same whichever way it came to be.
    """

    def count(self, text: Sequence[int], length: int) -> None:
        """Take account of the first `length` tokens of `text`, and of no others.

        Called after tokens were added to the text and before tokens are removed from it. The time it takes
        must depend on the number of these tokens, not on the text's length.
        """

    def has_context(self, text: Sequence[int]) -> bool:
        """False if all that it knows of the text's end is what it would say after any text."""

    def score(self, text: Sequence[int], row: Row) -> None:
        """Fill `row`, float32 [vocabulary], with log q of the token after `text`, which is not empty."""


Scorers = Callable[[Built, DraftConfig], Callable[[], TextScorer]]
"""Loads what all sequences share, and returns what makes the scorer of each one."""


class FixedScorer:
    """A scorer that keeps nothing, so that one object serves all texts."""

    def count(self, text: Sequence[int], length: int) -> None:
        """Nothing to count."""

    def has_context(self, text: Sequence[int]) -> bool:
        """It says something of every text."""
        return True

    def score(self, text: Sequence[int], row: Row) -> None:
        """See `TextScorer`."""
        raise NotImplementedError


@dataclass(slots=True)
class TokenState:
    """The tokens of a sequence, and what its scorer keeps of them."""

    scorer: TextScorer
    token_ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How many there are."""
        return len(self.token_ids)

    @property
    def finite_length(self) -> int:
        """All of them: scores are made of tokens, and leave nothing behind that could be broken."""
        return len(self.token_ids)

    def mark_finite(self) -> None:
        """Nothing changes."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens."""
        self.token_ids += token_ids
        self.scorer.count(self.token_ids, len(self.token_ids))

    def truncate_to(self, length: int) -> int:
        """Keep the first `length` tokens."""
        self.scorer.count(self.token_ids, length)
        del self.token_ids[length:]
        return length

    def lookup(self, tokens: Sequence[int]) -> int:
        """Nothing is cached."""
        return 0

    def publish(self, tokens: Sequence[int]) -> None:
        """Nothing is cached."""

    def withdraw(self, length: int) -> None:
        """Nothing is cached."""

    def free(self) -> None:
        """Keep no tokens."""
        self.truncate_to(0)


@dataclass(frozen=True, slots=True)
class TokenStates:
    """Makes the states of sequences, each with a scorer."""

    new_scorer: Callable[[], TextScorer]
    prefix_index = None

    def new(self, salt: str) -> TokenState:
        """No tokens."""
        return TokenState(self.new_scorer())


@dataclass(slots=True)
class TokenBranch:
    """The first tokens of a sequence and others after them, without a scorer of its own."""

    sequence: TokenState
    kept: int
    own: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Of its text."""
        return self.kept + len(self.own)

    def cut(self, length: int) -> TokenBranch:
        """A copy of the first `length` tokens, at least those of the sequence."""
        return TokenBranch(self.sequence, self.kept, self.own[: length - self.kept])

    def score(self, row: Row) -> None:
        """Score its text with the sequence's scorer, which then returns to the sequence's own text."""
        sequence, rest = self.sequence, self.sequence.token_ids[self.kept :]
        self.replace_end()
        try:
            sequence.scorer.score(sequence.token_ids, row)
        finally:
            sequence.truncate_to(self.kept)
            sequence.extend(rest)

    def replace_end(self) -> None:
        """Make its text the sequence's."""
        self.sequence.truncate_to(self.kept)
        self.sequence.extend(self.own)


@dataclass(frozen=True, slots=True)
class TokenBranches:
    """Branches of one sequence."""

    sequence: TokenState

    def branch(self, kept: int) -> TokenBranch:
        """A branch after the sequence's first `kept` tokens."""
        return TokenBranch(self.sequence, kept)

    def free(self) -> None:
        """Branches hold nothing that others could use."""


class TokenDrafter:
    """Scores each text by itself; prompts are taken in whole, since that takes no time."""

    skills = DraftSkills(row_invariant=True)
    free_entries = sys.maxsize

    def __init__(
        self, new_scorer: Callable[[], TextScorer], vocabulary_size: int, config: DraftConfig, clock: Clock
    ) -> None:
        """`new_scorer` makes the scorer of one sequence, with rows of `vocabulary_size` scores."""
        self._vocabulary_size = vocabulary_size
        self._clock = clock
        self.sequences: HeldSequences[DraftProposal] = HeldSequences(
            TokenStates(new_scorer), config.max_sequences, clock, config.lease_seconds
        )

    def step(
        self,
        feeds: Sequence[Job],
        *,
        max_rows: int,
        max_prefill_rows: int | None,
        free_branches: Callable[[], bool],
        passes: Passes,
    ) -> PassResult:
        """Score every feed; see `Drafter`. A feed that fails leaves its sequence as it was."""
        result, begun = PassResult(), self._clock()
        scores = []
        for job in feeds:
            taken = self._take_in(job)
            if isinstance(taken, PacelineError):
                result.failed.append((job, taken))
            else:
                result.finished.append(job)
                scores.append(taken)
        ended = self._clock()
        fed = [job.feed[job.offset :] for job in result.finished]
        prefills = [len(tokens) - job.rows for job, tokens in zip(result.finished, fed, strict=True)]
        rows, prefill = sum(map(len, fed)), sum(prefills)
        passes.ran(rows, len(fed), ended - begun)
        self.sequences.passed(begun, ended, prefill)
        for job, tokens, own in zip(result.finished, fed, prefills, strict=True):
            job.held.fed(tokens)
            job.offset = len(job.feed)
            job.ran(begun, ended - begun, rows, len(fed), own, prefill)
        result.logits = torch.cat(scores) if scores else None
        return result

    def _take_in(self, job: Job) -> torch.Tensor | PacelineError:
        """Extend a sequence by its feed: float32 [rows that the feed wants, vocabulary], or an error."""
        state, tokens = state_of(job.held), job.feed[job.offset :]
        before, scores = state.length, self._empty(job.rows)
        try:
            state.extend(tokens[: len(tokens) - job.rows])
            for row, token in zip(scores.numpy(), tokens[len(tokens) - job.rows :], strict=True):
                state.extend([token])
                state.scorer.score(state.token_ids, row)
        except Exception as error:
            state.truncate_to(before)
            return own_error(error, "the drafter", job.sequence_id)
        return scores

    def _empty(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, self._vocabulary_size)

    def draw_chains(self, chains: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        """Not asked of a drafter without this skill."""
        raise NotImplementedError

    def fork(self, held: HeldSequence[DraftProposal], max_entries: int) -> TokenBranches:
        """Branches of any length."""
        return TokenBranches(state_of(held))

    def step_branches(self, branches: Sequence[TokenBranch], token_ids: Sequence[int]) -> torch.Tensor:
        """Score every branch behind its next token."""
        scores = self._empty(len(branches))
        for branch, token, row in zip(branches, token_ids, scores.numpy(), strict=True):
            branch.own.append(token)
            branch.score(row)
        return scores

    def extend_branch(self, branch: TokenBranch, source: TokenBranch, count: int) -> None:
        """Take over tokens of another branch."""
        first = branch.length - source.kept
        branch.own += source.own[first : first + count]

    def adopt(self, held: HeldSequence[DraftProposal], branch: TokenBranch) -> None:
        """The branch's tokens are the sequence's."""
        branch.replace_end()


def state_of(held: HeldSequence[Any]) -> TokenState:
    """What this drafter made for a sequence."""
    return cast(TokenState, held.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDrafterKind(DrafterKind):
    """A drafter of scorers, which `stacked` may combine."""

    scorers: Scorers
    may_lack_context: bool
    """False if its scorers have a context after every text."""


def of_scorers(
    scorers: Scorers, *, may_lack_context: bool = True, reads_corpus: bool = False
) -> TextDrafterKind:
    """The kind of drafter that needs the tokenizer only."""

    def make(built: Built, config: DraftConfig, clock: Clock) -> Drafter:
        return TokenDrafter(scorers(built, config), built.loaded.vocab_size, config, clock)

    return TextDrafterKind(
        build_vocabulary, make, reads_corpus, scorers=scorers, may_lack_context=may_lack_context
    )
