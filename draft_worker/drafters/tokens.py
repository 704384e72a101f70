"""A drafter whose scores are a function of the tokens alone, such as a table: no model, no cache."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from draft_worker.drafters.interface import DraftSkills
from paceline.core.clock import Clock
from paceline.core.config import DraftConfig
from paceline.core.messages import DraftProposal
from paceline.engine.cancel import CancelToken
from paceline.engine.multi_step import Chain, ChainInput
from paceline.engine.scheduling.passes import Job, PassResult, own_error
from paceline.engine.scheduling.sequences import HeldSequence, HeldSequences
from paceline.telemetry.worker import Passes

log = logging.getLogger(__name__)

Score = Callable[[Sequence[Sequence[int]]], torch.Tensor]
"""Float32 [N, vocabulary] of N texts, each given by its tokens from the first one on: the logits of the token
that follows each. A row depends on its own text alone, bit for bit."""


@dataclass(slots=True)
class TokenState:
    """The tokens of a sequence or of a branch."""

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

    def truncate_to(self, length: int) -> int:
        """Keep the first `length` tokens."""
        del self.token_ids[length:]
        return length

    def lookup(self, tokens: Sequence[int]) -> int:
        """Nothing is cached."""
        return 0

    def publish(self, tokens: Sequence[int]) -> None:
        """Nothing is cached."""

    def withdraw(self, length: int) -> None:
        """Nothing is cached."""

    def cut(self, length: int) -> TokenState:
        """A copy of the first `length` tokens."""
        return TokenState(self.token_ids[:length])

    def free(self) -> None:
        """Keep no tokens."""
        self.token_ids.clear()


class TokenStates:
    """Makes the states of sequences."""

    prefix_index = None

    def new(self, salt: str) -> TokenState:
        """No tokens."""
        return TokenState()


@dataclass(frozen=True, slots=True)
class TokenBranches:
    """Branches of one sequence: copies of its tokens."""

    sequence: TokenState

    def branch(self, kept: int) -> TokenState:
        """A branch after the sequence's first `kept` tokens."""
        return self.sequence.cut(kept)

    def free(self) -> None:
        """Branches hold nothing that others could use."""


class TokenDrafter:
    """Asks a function for the scores of each text; prompts are taken in whole, since that takes no time."""

    skills = DraftSkills(row_invariant=True)
    free_entries = sys.maxsize

    def __init__(self, score: Score, config: DraftConfig, clock: Clock) -> None:
        self._score = score
        self._clock = clock
        self.sequences: HeldSequences[DraftProposal] = HeldSequences(
            TokenStates(), config.max_sequences, clock, config.lease_seconds
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
        """Score every feed; each one alone where that fails for all together. See `Drafter`."""
        result, begun = PassResult(), self._clock()
        try:
            done, result.logits = list(feeds), self._scores(feeds)
        except Exception:
            log.exception("scoring %d texts failed; going on one by one", len(feeds))
            done, result.logits = self._one_by_one(feeds, result)
        ended = self._clock()
        fed = [job.feed[job.offset :] for job in done]
        prefills = [len(tokens) - job.rows for job, tokens in zip(done, fed, strict=True)]
        rows, prefill = sum(map(len, fed)), sum(prefills)
        passes.ran(rows, len(done), ended - begun)
        self.sequences.passed(begun, ended, prefill)
        for job, tokens, own in zip(done, fed, prefills, strict=True):
            state_of(job.held).token_ids.extend(tokens)
            job.held.fed(tokens)
            job.offset = len(job.feed)
            job.ran(begun, ended - begun, rows, len(done), own, prefill)
        result.finished = done
        return result

    def _scores(self, feeds: Sequence[Job]) -> torch.Tensor:
        """Float32 [sum of the rows that the feeds want, vocabulary]."""
        texts = []
        for job in feeds:
            text = [*state_of(job.held).token_ids, *job.feed[job.offset :]]
            texts += [text[: len(text) - behind] for behind in reversed(range(job.rows))]
        return self._score(texts)

    def _one_by_one(self, feeds: Sequence[Job], result: PassResult) -> tuple[list[Job], torch.Tensor | None]:
        """The feeds that can be scored, with their scores; the others have failed."""
        done, scores = [], []
        for job in feeds:
            try:
                scores.append(self._scores([job]))
            except Exception as error:
                result.failed.append((job, own_error(error, "the drafter", job.sequence_id)))
            else:
                done.append(job)
        return done, torch.cat(scores) if scores else None

    def draw_chains(self, chains: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        """Not asked of a drafter without this skill."""
        raise NotImplementedError

    def fork(self, held: HeldSequence[DraftProposal], max_entries: int) -> TokenBranches:
        """Branches of any length."""
        return TokenBranches(state_of(held))

    def step_branches(self, branches: Sequence[TokenState], token_ids: Sequence[int]) -> torch.Tensor:
        """Score every branch behind its next token."""
        for branch, token in zip(branches, token_ids, strict=True):
            branch.token_ids.append(token)
        return self._score([branch.token_ids for branch in branches])

    def extend_branch(self, branch: TokenState, source: TokenState, count: int) -> None:
        """Take over tokens of another branch."""
        branch.token_ids += source.token_ids[branch.length : branch.length + count]

    def adopt(self, held: HeldSequence[DraftProposal], branch: TokenState) -> None:
        """The branch's tokens are the sequence's."""
        state_of(held).token_ids[:] = branch.token_ids


def state_of(held: HeldSequence[Any]) -> TokenState:
    """What this drafter made for a sequence."""
    return cast(TokenState, held.state)
