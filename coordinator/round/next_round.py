"""What a sequence's next round is to be: drafted, copied from its text, or plain. Pure; round.py acts on it.

A round is planned when it begins, or while the one before it is in progress, where somebody can use that:
the draft, whose continuations are to be so long, or the target, which begins a plain round by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.proposers.prompt_lookup import LONGEST, Match, copied
from coordinator.round.sequence import Sequence
from coordinator.sequence.validation import shortened, verdict_fits
from paceline.core.types import Proposal, Verdict

NOTHING = Proposal()
"""The proposal of a plain round."""


@dataclass(slots=True)
class Planner(Sequence):
    """Decides for one sequence."""

    def _choose(self, most: int) -> int:
        """K of a round, out of what there is room for."""
        most = min(most, self.num_speculative_tokens)
        self._chosen = self._policy.choose(most, self._draft.unread(self.ledger), self.ledger.remaining)
        return self._chosen

    def _wanted_now(self) -> int:
        """K of the round that begins.

        The first round has none: its target pass prefills the prompt, and no draft should delay the first
        token. The last rounds have fewer: tokens past `max_tokens` or a model's length are wasted.
        """
        planned, self._planned = self._planned, None
        if self.round == 1 or not self._draft.usable(self.round):
            return 0
        room = max(0, self._room())
        return min(planned if planned is not None else self._choose(room), room)

    def _wanted_next(self) -> int:
        """K of the round after this one, whose verdict adds a token at least."""
        if self._planned is None:
            usable = self._draft.usable(self.round + 1)
            self._planned = self._choose(max(0, self._room(1))) if usable else 0
        return self._planned

    def _told_ahead(self) -> dict[tuple[int, int], Proposal] | None:
        """What follows this round for some outcomes, where after all others nothing does; None for a draft.

        None as well where there may be no next round. Where the text repeats itself, it is taken to go on as
        it did: then so does the copy, a token later than if that token were known.
        """
        drafted = self._proposal.num_draft_tokens
        most = self._room_on_target(1 + drafted)
        if self.round == 1 or self._client_behind or most < 0 or self._wanted_next():
            return None
        match = self._source if drafted else self._repetition()
        most = min(most, self.num_speculative_tokens)
        if match is None or most <= 0:
            return {}
        source = Match(min(match.length + drafted + 1, LONGEST), match.start + drafted + 1)
        if not (count := self._policy.copy_length(source.length, most, 0)):
            return {}
        self._source_ahead = source
        tokens = copied(self.ledger.token_ids, match.start, drafted + 1 + count)
        return {(drafted, tokens[drafted]): Proposal(tokens[drafted + 1 :])}

    def _copy_from_text(self) -> Proposal:
        """What followed the last time the text went like this, where that is worth more than a draft."""
        # The first round has no proposal, wherever it would come from.
        match = self._repetition() if self.round > 1 else None
        most = min(self.num_speculative_tokens, self._room_on_target())
        if (
            match is None
            or most <= 0
            or not (count := self._policy.copy_length(match.length, most, self._wanted))
        ):
            return NOTHING
        self._copies(match)
        return Proposal(copied(self.ledger.token_ids, match.start, count))

    def _copies(self, match: Match) -> None:
        """This round's proposal is a copy."""
        self._source, self._record.copied = match, True

    def _repetition(self) -> Match | None:
        """Where the text went like this before, if that is of use."""
        if not (self.prompt_lookup and self.num_speculative_tokens):
            return None
        return self._text.find(self.ledger.token_ids)

    @property
    def _is_drafted(self) -> bool:
        """This round's proposal is the draft's."""
        return self._proposal.num_draft_tokens > 0 and self._source is None

    @property
    def _match(self) -> int:
        """Tokens of the text that this round's copied proposal follows on; 0 is a proposal of the draft."""
        return 0 if self._source is None else self._source.length

    def _drop_proposal(self) -> None:
        """The target refuses this round's proposal. The draft that it is of is left alone for a while, and
        what it foresaw behind it is not asked for: every such round has the target read the whole ledger."""
        if self._is_drafted:
            self._draft.pause(self.round)
            self._planned = self._source_ahead = None
            self._forget_foreseen()
        self._source = None
        self._proposal = NOTHING
        self._record.hit = self._record.copied = False

    def _forget_foreseen(self) -> None:
        """What was handed to the target for the round after this one."""
        self._foreseen, self._plain_ahead = {}, False
        self._first_told.clear()

    def _shortened(self, proposal: Proposal, outcome: tuple[int, int]) -> Proposal | None:
        """A continuation as long as the round after that outcome; None where it is of no use."""
        most = min(self._wanted_next(), self._room(outcome[0] + 1))
        return shortened(proposal, most, self.vocabulary_size, self._foreseen.get(outcome, NOTHING))

    def _tell(self, proposals: Mapping[tuple[int, int], Proposal]) -> None:
        """Remember what the target is told."""
        self._foreseen.update(proposals)
        for outcome, proposal in proposals.items():
            self._first_told.setdefault(outcome, proposal.num_draft_tokens)

    def _following(self, verdict: Verdict) -> Proposal | None:
        """What the target judges next without being asked; None where it waits.

        If its verdict does not say so, what it was told for this outcome reaches it after that. It begins
        with the first of it, which may be the shorter one of two proposals, and so it may with the verdict.
        """
        count = verdict.went_on_with
        if count is None:
            otherwise = 0 if self._plain_ahead else None
            count = self._first_told.get((verdict.num_accepted, verdict.token_ids[-1]), otherwise)
        return None if count is None else Proposal(self._foreseen_by(verdict).token_ids[:count])

    def _foreseen_by(self, verdict: Verdict) -> Proposal:
        return self._foreseen.get((verdict.num_accepted, verdict.token_ids[-1]), NOTHING)

    def _fits(self, verdict: Verdict) -> bool:
        """True for a verdict that the round in progress can have."""
        wants_logprobs = self.params.sampling.logprobs is not None
        return (
            verdict_fits(verdict, self._proposal, len(self.ledger), self.vocabulary_size)
            and bool(verdict.logprobs) == wants_logprobs
            and not self.ledger.lacks_prompt_logprobs
            and self._might_go_on(verdict)
        )

    def _might_go_on(self, verdict: Verdict) -> bool:
        """True where what the target says it has begun by itself was handed to it."""
        if not verdict.went_on_with:
            return verdict.went_on_with is None or self._plain_ahead
        return verdict.went_on_with <= self._foreseen_by(verdict).num_draft_tokens
