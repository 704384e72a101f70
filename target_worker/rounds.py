"""One verification in progress on the target, and the round that follows it without a message. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.core.messages import VerifyAhead, VerifyRound
from paceline.core.types import Proposal, SequenceParams, Verdict
from paceline.engine.passes import Job
from paceline.engine.session import Session
from paceline.engine.structured import Restriction

NOTHING = Proposal()
"""The proposal of a plain round."""


@dataclass(slots=True)
class Round:
    """A verification in progress."""

    command: VerifyRound
    job: Job
    foreseen: dict[tuple[int, int], VerifyRound] = field(default_factory=dict)
    """The next round, by outcome: (accepted, next token)."""
    plain_otherwise: bool = False
    """After any other outcome the next round has no draft tokens."""
    restriction: Restriction | None = None
    """What its rows may be; None where that is anything."""

    def following(self, accepted: int, next_token: int, eos_token_ids: Collection[int]) -> VerifyRound | None:
        """The next round, if it was told."""
        foreseen = self.foreseen.get((accepted, next_token))
        if foreseen is not None or not self.plain_otherwise:
            return foreseen
        params = self.job.held.session.params
        return None if ends(params, next_token, eos_token_ids) else after(self.command, accepted, NOTHING)


def following_late(
    command: VerifyAhead, session: Session[Verdict], eos_token_ids: Collection[int]
) -> VerifyRound | None:
    """The next round of a sequence whose verdict is out already; None where it was not told, or has begun."""
    verdict = session.answer
    if verdict is None or session.question is None:
        return None
    if place(command) != (session.epoch, session.round, session.question[0]):
        return None
    next_token = verdict.token_ids[-1]
    proposal = command.proposals.get((verdict.num_accepted, next_token))
    if proposal is None:
        if not command.plain_otherwise or ends(session.params, next_token, eos_token_ids):
            return None
        proposal = NOTHING
    return after(command, verdict.num_accepted, proposal)


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
