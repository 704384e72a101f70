"""The draft workers of one sequence: who is asked, who has answered, what they propose together. Pure.

Most sequences have one. Several propose for the same round, each for its share of the round's draft tokens,
and their proposals are merged (merged.py). Each has its own epochs, read position, failures and pauses, so a
failing one costs its own branch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.proposers.merged import merged
from coordinator.proposers.remote_draft import RemoteDraft, Wanted
from coordinator.sequence.ledger import Ledger
from paceline.core import limits
from paceline.core.types import Proposal, TreeShape


@dataclass(slots=True)
class Drafts:
    """Views of the draft workers, with the state of the present round."""

    views: Sequence[RemoteDraft]
    asked: Sequence[RemoteDraft] = ()
    """Drafts that were asked in this round, or whose continuation it began with."""
    _answers: dict[int, Proposal] = field(default_factory=dict)
    """The proposals of this round, by the draft's index."""

    @classmethod
    def make(cls, sequence_id: str, count: int) -> Drafts:
        """Views of `count` unknown workers."""
        # Shared, because a worker may leave one place among the drafts and take another.
        epochs = itertools.count(1)
        return cls([RemoteDraft(sequence_id, epochs=epochs, index=index) for index in range(count)])

    def __getitem__(self, index: int) -> RemoteDraft:
        return self.views[index]

    # ---- planning --------------------------------------------------------------------------------

    def usable(self, round_number: int) -> bool:
        """True unless all workers are gone or paused."""
        return any(draft.usable(round_number) for draft in self.views)

    def unread(self, ledger: Ledger, round_number: int) -> int:
        """Most ledger tokens that a usable worker may have to read."""
        return max((d.unread(ledger) for d in self.views if d.usable(round_number)), default=len(ledger))

    def room(self, length: int) -> int:
        """Most draft tokens that a worker can draft after `length` tokens; may be negative."""
        return max(draft.room(length) for draft in self.views)

    def to_ask(self, round_number: int, length: int, rows: int) -> Sequence[RemoteDraft]:
        """The usable drafts with room after `length` tokens.

        `rows` is the most draft tokens of a round that several may share; with 0, only one can be asked.
        """
        able = [draft for draft in self.views if draft.usable(round_number) and draft.room(length) > 0]
        return able[: max(rows, 1)]

    # ---- the present round -----------------------------------------------------------------------

    def begin_round(self) -> None:
        """No draft is asked yet."""
        self.asked, self._answers = (), {}
        for draft in self.views:
            draft.wanted, draft.retried = None, False

    def want(self, wanted: Wanted, round_number: int, length: int, rows: int) -> Sequence[RemoteDraft]:
        """Choose whom to ask, and for what; `rows` as in `to_ask`. Returns who is to be asked."""
        self.asked = self.to_ask(round_number, length, rows)
        share = rows // len(self.asked) if len(self.asked) > 1 else limits.MAX_TREE_NODES
        for draft in self.asked:
            most = min(wanted.num_draft, draft.room(length), share)
            shape = draft.within(TreeShape(wanted.shape.width, min(wanted.shape.nodes, share)))
            draft.wanted = Wanted(most, shape, alone=len(self.asked) == 1)
        return self.asked

    def answered(self, draft: RemoteDraft, proposal: Proposal) -> None:
        """An awaited draft has proposed."""
        draft.wanted = None
        self._answers[draft.index] = proposal

    def went_on(self, draft: RemoteDraft, proposal: Proposal) -> None:
        """This round began with a continuation that this draft had sent."""
        self.asked, self._answers = (draft,), {draft.index: proposal}

    @property
    def awaited(self) -> Sequence[RemoteDraft]:
        """Drafts that were asked and have neither answered nor been left out."""
        return [draft for draft in self.asked if draft.wanted is not None]

    @property
    def alone(self) -> RemoteDraft | None:
        """The only draft of this round, which may draft ahead of it; None with none or several."""
        return self.asked[0] if len(self.asked) == 1 else None

    @property
    def time_depends_on_draws(self) -> bool:
        """True if the time of this round's proposals may depend on the tokens that are drawn.

        That of one chain does not, unless a sub-drafter guesses. A tree grows where its draws lead, and
        several drafts may share a device.
        """
        asked = self.awaited
        return len(self.asked) > 1 or any(
            draft.sub_drafted or (draft.wanted is not None and not draft.wanted.shape.is_chain)
            for draft in asked
        )

    @property
    def proposers(self) -> Sequence[RemoteDraft]:
        """The drafts that proposed anything in this round."""
        return [draft for draft in self.views if self._answers.get(draft.index, Proposal()).token_ids]

    @property
    def has_answers(self) -> bool:
        """True if a draft has answered in this round, possibly with an empty proposal."""
        return bool(self._answers)

    @property
    def proposal(self) -> Proposal:
        """What the drafts that answered propose together. Their order is fixed, whoever answered first."""
        return merged([self._answers[index] for index in sorted(self._answers)])
