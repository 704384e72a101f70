"""What the coordinator and its workers say to each other, as values.

Everything is named by absolute position, so that repeating a message is harmless (docs/protocol.md).
`epoch` numbers the owners of a sequence on one worker: a command of an older epoch is fenced off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.core.errors import PacelineError
from paceline.core.types import Outcome, Proposal, SequenceParams, Timings, TokenLogprobs, Verdict


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Take a sequence on, with the whole ledger."""

    sequence_id: str
    epoch: int
    token_ids: tuple[int, ...]
    params: SequenceParams


@dataclass(frozen=True, slots=True)
class VerifyRound:
    """Judge `proposal` after a ledger of `base_length` tokens; an empty one is plain decoding."""

    sequence_id: str
    epoch: int
    round: int
    base_length: int
    committed_tail: tuple[int, ...]
    """The ledger's last tokens, as many as the sender believes the worker lacks."""
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class VerifyAhead:
    """What to judge next if the verdict on `round` is one of these outcomes: (accepted, next token).

    The target then begins round + 1 by itself, as if a VerifyRound with that proposal had come: with the
    verdict, or when it reads this if its verdict is out by then.
    """

    sequence_id: str
    epoch: int
    round: int
    base_length: int
    proposals: Mapping[Outcome, Proposal]
    plain_otherwise: bool = False
    """After every other outcome a round without draft tokens follows."""


@dataclass(frozen=True, slots=True)
class DraftRound:
    """Propose `num_draft_tokens` tokens after a ledger of `base_length` tokens."""

    sequence_id: str
    epoch: int
    round: int
    base_length: int
    committed_tail: tuple[int, ...]
    num_draft_tokens: int
    num_lookahead_tokens: int = 0
    """Draft tokens of each continuation; 0: as many as `num_draft_tokens`."""
    proposal_known: bool = False
    """The sender has the proposal from a continuation and wants no answer."""


@dataclass(frozen=True, slots=True)
class CloseSequence:
    """Forget a sequence and free its blocks."""

    sequence_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """The answer to one VerifyRound."""

    sequence_id: str
    epoch: int
    round: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """The answer to one DraftRound."""

    sequence_id: str
    epoch: int
    round: int
    base_length: int
    proposal: Proposal
    num_computed_tokens: int
    """Entries in the draft's cache: base_length + K - 1, since the last draft token was not fed."""
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True)
class Continuations:
    """Proposals for outcomes of the verification of `round`: (accepted, next token) to what comes after."""

    sequence_id: str
    epoch: int
    round: int
    base_length: int
    proposals: Mapping[Outcome, Proposal]


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """Something went wrong for one sequence; all others go on. `round` 0 where no round was meant."""

    sequence_id: str
    epoch: int
    round: int
    error: PacelineError


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from absolute position `start` on, as its prefill goes on.

    All of them precede the first verdict. Repeating a part is harmless.
    """

    sequence_id: str
    epoch: int
    round: int
    start: int
    logprobs: tuple[TokenLogprobs, ...]


TargetCommand = OpenSequence | VerifyRound | VerifyAhead | CloseSequence
DraftCommand = OpenSequence | DraftRound | CloseSequence
TargetEvent = RoundVerdict | PromptLogprobs | SequenceFailed
DraftEvent = DraftProposal | Continuations | SequenceFailed
