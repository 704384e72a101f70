"""Messages between the coordinator and its workers.

Every message uses absolute positions, so repeating one is harmless (docs/protocol.md).
`epoch` numbers the owners of a sequence on one worker; a command with an older epoch is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.core.errors import PacelineError
from paceline.core.types import (
    CHAIN,
    Outcome,
    Proposal,
    SequenceParams,
    Timings,
    TokenLogprobs,
    TreeShape,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Start serving a sequence; carries the whole ledger."""

    sequence_id: str
    epoch: int
    token_ids: tuple[int, ...]
    params: SequenceParams


@dataclass(frozen=True, slots=True)
class VerifyRound:
    """Verify `proposal` after a ledger of `base_length` tokens; an empty proposal is plain decoding."""

    sequence_id: str
    epoch: int
    round: int
    base_length: int
    committed_tail: tuple[int, ...]
    """The ledger's last tokens: those that the sender believes the worker lacks."""
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class VerifyAhead:
    """Proposals to verify next, by outcome of `round`.

    If the verdict on `round` is one of these outcomes, the target starts round + 1 as if it had received a
    VerifyRound with that proposal: together with the verdict, or on receipt if the verdict is already sent.
    """

    sequence_id: str
    epoch: int
    round: int
    base_length: int
    proposals: Mapping[Outcome, Proposal]
    plain_otherwise: bool = False
    """Every other outcome is followed by a round without draft tokens."""


@dataclass(frozen=True, slots=True)
class DraftRound:
    """Propose `num_draft_tokens` tokens after a ledger of `base_length` tokens, or a tree of that depth."""

    sequence_id: str
    epoch: int
    round: int
    base_length: int
    committed_tail: tuple[int, ...]
    num_draft_tokens: int
    num_lookahead_tokens: int = 0
    """Draft tokens of each continuation; 0 means `num_draft_tokens`."""
    proposal_known: bool = False
    """The sender already has the proposal from a continuation and expects no answer."""
    shape: TreeShape = CHAIN
    """Bounds of the tree; a chain by default."""
    no_lookahead: bool = False
    """The sender uses no continuations of this round: nothing is drafted ahead of its verdict."""


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
    """Entries in the draft's cache: base_length + K - 1, because the last draft token was not fed. After a
    tree, base_length: the entries of its nodes are not counted."""
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True)
class Continuations:
    """Proposals for the round after `round`, by outcome of `round`."""

    sequence_id: str
    epoch: int
    round: int
    base_length: int
    proposals: Mapping[Outcome, Proposal]


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """An error of one sequence; the others continue. `round` is 0 if the error belongs to no round."""

    sequence_id: str
    epoch: int
    round: int
    error: PacelineError


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from absolute position `start`, sent as prefill proceeds.

    All parts precede the first verdict. Repeating a part is harmless.
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
