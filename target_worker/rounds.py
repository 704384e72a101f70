"""One verification in progress on the target, and the round that follows it without a message. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from paceline.core.messages import VerifyAhead, VerifyRound
from paceline.core.types import Outcome, Proposal, SequenceParams, Verdict
from paceline.engine.scheduling.mask import Restriction
from paceline.engine.scheduling.passes import Job, broken_rows
from paceline.engine.scheduling.session import Session

NOTHING = Proposal()
"""The proposal of a plain round."""


@dataclass(frozen=True, slots=True)
class FirstRow:
    """What follows a ledger, known before its round begins."""

    logits: Tensor
    """float32 [1, V]."""
    verdict: Outcome | None
    """That of a round without draft tokens: (0, next token); None where the logits are no distribution, or
    leave no token that the request permits."""


@dataclass(slots=True)
class Round:
    """A verification in progress."""

    command: VerifyRound
    job: Job
    foreseen: dict[Outcome, Proposal] = field(default_factory=dict)
    """What the next round judges, by outcome: (accepted, next token)."""
    plain_otherwise: bool = False
    """After any other outcome the next round has no draft tokens."""
    restriction: Restriction | None = None
    """What its rows may be; None where that is anything."""
    first_row: FirstRow | None = None
    """Where it was known before (preverify.py): the job's rows are those after it."""
    apart: list[Tensor] | None = None
    """Where its rows could not be judged together: those computed one by one so far, each float32 [1, V]."""

    @property
    def rows(self) -> int:
        """That are judged."""
        return self.command.proposal.num_draft_tokens + 1

    def take_apart(self) -> bool:
        """Compute its rows again, one a pass; False where that tells nothing new, or tokens are not drawn.

        One that is no numbers says nothing of the others: it may have spoilt those before it, for attention
        multiplies by 0 what a row must not see. By itself each is what plain decoding would have.
        """
        session = self.job.held.session
        if self.apart is not None or self.rows == 1 or session.params.target_decides:
            return False
        self.apart, self.first_row = [], None
        # What the prompt's rows say has been told.
        self.job.reused, self.job.scored = 0, False
        self.job.feed_next(session.tokens[self.job.held.table.length :], 1)
        return True

    def with_next(self, row: Tensor) -> Tensor | None:
        """All its rows, float32 [K + 1, V], with the next one that was computed apart; None before the last.

        Behind a draft token whose row is no numbers nothing may come, and no row is computed: the chain ends
        with that token, as it does where a request permits nothing behind it.
        """
        assert self.apart is not None
        drafts, known, broken = self.command.proposal.token_ids, len(self.apart), broken_rows(row)[0]
        self.apart.append(row.clone())
        if not broken and known < len(drafts):
            self.job.feed_next([drafts[known]], 1)
            return None
        if not broken or known == 0:
            return torch.cat([*self.apart, row.expand(len(drafts) - known, -1)])
        allowed = np.ones((self.rows, row.shape[1]), dtype=np.bool_)
        r = self.restriction or Restriction(allowed, self.job.held.session.params)
        allowed &= r.allowed
        allowed[known:] = False
        self.restriction = replace(r, allowed=allowed)
        return torch.cat([*self.apart[:known], torch.zeros_like(row).expand(self.rows - known, -1)])

    def settled(self, outcome: Outcome) -> Outcome:
        """A verdict, (accepted, next token), as far as a grammar was followed.

        Where a chain is accepted up to there, its last token is the verdict's: what may come behind that is
        the next round's question, as it is in plain decoding. To ask for this round again without its draft
        tokens would be a second draw where they lead to a dead end.
        """
        end = None if self.restriction is None else self.restriction.end
        if end is None or outcome[0] < end:
            return outcome
        return Outcome(end - 1, self.command.proposal.token_ids[end - 1])

    def following(self, outcome: Outcome, eos_token_ids: Collection[int]) -> VerifyRound | None:
        """The next round, if it was told for this outcome: (accepted, next token)."""
        params = self.job.held.session.params
        return _told(self.command, self.foreseen, self.plain_otherwise, outcome, params, eos_token_ids)


def following_late(
    command: VerifyAhead, session: Session[Verdict], eos_token_ids: Collection[int]
) -> VerifyRound | None:
    """The next round of a sequence whose verdict is out already; None where it was not told, or has begun."""
    verdict = session.answer
    if verdict is None or session.question is None or session.abandoned:
        return None
    if place(command) != (session.epoch, session.round, session.question[0]):
        return None
    outcome = verdict.outcome
    told = command.proposals, command.plain_otherwise
    return _told(command, *told, outcome, session.params, eos_token_ids)


def _told(
    command: VerifyRound | VerifyAhead,
    proposals: Mapping[Outcome, Proposal],
    plain_otherwise: bool,
    outcome: Outcome,
    params: SequenceParams,
    eos_token_ids: Collection[int],
) -> VerifyRound | None:
    """The round after this one, which ended so; None where nobody has said what it is."""
    accepted, next_token = outcome
    proposal = proposals.get(outcome)
    if proposal is None and plain_otherwise and not ends(params, next_token, eos_token_ids):
        proposal = NOTHING
    return None if proposal is None else after(command, accepted, proposal)


def ends(params: SequenceParams, token_id: int, eos_token_ids: Collection[int]) -> bool:
    """True where the sequence ends with this token: no round follows it by itself."""
    sampling = params.sampling
    is_end = token_id in eos_token_ids and not sampling.ignore_eos
    return is_end or token_id in sampling.stop_token_ids


def after(command: VerifyRound | VerifyAhead, accepted: int, proposal: Proposal) -> VerifyRound:
    """The round after this one with so many accepted draft tokens."""
    base = command.base_length + accepted + 1
    return VerifyRound(command.sequence_id, command.epoch, command.round + 1, base, (), proposal)


def place(command: VerifyRound | VerifyAhead) -> tuple[int, int, int]:
    """Which round of which sequence is meant."""
    return command.epoch, command.round, command.base_length


def is_scored(params: SequenceParams, base_length: int) -> bool:
    """True when the round is to report the prompt's log-probabilities: the first one, and its repetitions."""
    wanted = params.sampling.prompt_logprobs is not None
    return wanted and 1 < base_length == params.prompt_length
