"""Plans a round: the source of its proposal, if any, and the number of draft tokens. Pure.

A round is planned when it begins, or during the previous round if a worker can use the plan: continuations
from the draft are cut to the planned length, and the target begins a plain round by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.proposers.drafts import Drafts
from coordinator.proposers.interface import ContextSource, Guess
from coordinator.round.present_round import PresentRound
from coordinator.sequence.ledger import Ledger
from coordinator.sequence.validation import shortened
from coordinator.speculation.policy import Policy
from paceline.core import limits
from paceline.core.types import CHAIN, Outcome, Proposal, TreeShape, Verdict


@dataclass(slots=True)
class Planner:
    """Plans the rounds of one sequence."""

    ledger: Ledger
    drafts: Drafts
    policy: Policy
    """Chooses K."""
    sources: Sequence[ContextSource]
    num_speculative_tokens: int
    """Maximum number of draft tokens per round; with 0 no draft worker is needed."""
    vocabulary_size: int
    target_max_len: int
    max_tree_nodes: int = limits.MAX_TREE_NODES
    """Most draft tokens of a round with a tree or with several drafts."""
    takes_trees: bool = False
    """True if the request's acceptance rule accepts trees."""
    asks_draft: bool = True
    """False if the request names a context source as its only source."""
    target_max_nodes: int = 0
    """Nodes of the largest tree that the target takes; 0 for chains only."""
    chosen: int = 0
    """The policy's last choice of K; a round may have room for fewer draft tokens."""

    def room(self, more: int = 0) -> int:
        """Maximum K of a round after the ledger has grown by `more` tokens; may be negative.

        A tree counts by its depth: the tokens of other paths are never committed.
        """
        return min(self.room_on_target(more), self.drafts.room(len(self.ledger) + more))

    def room_on_target(self, more: int = 0) -> int:
        """The same for a proposal from a context source, which the draft's maximum length does not limit."""
        return min(self.ledger.remaining - more - 1, self.target_max_len - len(self.ledger) - more)

    def wanted_now(self, round_number: int, planned: int | None) -> int:
        """Choose K of the round that begins.

        The first round has K = 0: its target pass prefills the prompt, and drafting must not delay the first
        token. The last rounds have a smaller K: tokens past `max_tokens` or a model's length are wasted.
        """
        if round_number == 1 or not self.asks(round_number):
            return 0
        room = max(0, self.room())
        return min(planned if planned is not None else self._choose(room, round_number), room)

    def wanted_next(self, round_number: int) -> int:
        """Choose K of the next round. The verdict on the present round adds at least one token."""
        number = round_number + 1
        return self._choose(max(0, self.room(1)), number) if self.asks(number) else 0

    def asks(self, round_number: int) -> bool:
        """True if a draft can be asked in this round."""
        return self.asks_draft and self.drafts.usable(round_number)

    def shape(self, k: int) -> TreeShape:
        """Bounds of the tree of a round with this K, which the target and the acceptance rule allow."""
        wanted = self.policy.shape(k)
        if wanted.is_chain or not self.most_rows:
            return CHAIN
        return TreeShape(wanted.width, min(wanted.nodes, self.most_rows))

    def rows(self, shape: TreeShape) -> int:
        """Most draft tokens that several drafts may propose together within `shape`; 0 if only one can."""
        return self.most_rows if shape.is_chain else shape.nodes

    @property
    def most_rows(self) -> int:
        """Most draft tokens of a round with a tree or with several drafts; 0 if there can be none."""
        return min(self.max_tree_nodes, self.target_max_nodes) if self.takes_trees else 0

    @property
    def awaits_verdict(self) -> bool:
        """True if a source may guess from what the verdict on the present round says."""
        return any(source.awaits_verdict for source in self.sources)

    def on_verdict(self, verdict: Verdict) -> None:
        """Tell the sources about a verdict that was committed."""
        for source in self.sources:
            source.on_verdict(verdict, len(self.ledger))

    def on_end(self) -> None:
        """The sequence has come to its end."""
        for source in self.sources:
            source.close(self.ledger.token_ids)

    def guess(self, num_wanted: int) -> Guess | None:
        """The best guess of a context source, if it is worth more than `num_wanted` draft tokens."""
        most = min(self.num_speculative_tokens, self.room_on_target())
        if most <= 0:
            return None
        tokens = self.ledger.token_ids
        guesses = [guess for source in self.sources if (guess := source.guess(tokens, most))]
        return self.policy.choose_guess(guesses, most, num_wanted) if guesses else None

    def guess_ahead(self, present: PresentRound) -> tuple[Outcome, Guess] | None:
        """A guess for the next round, and the outcome it assumes: full acceptance and a certain bonus token.

        If a source proposed the present round, the same source guesses the bonus token.
        """
        proposal = present.proposal.token_ids
        if not self.sources or present.drafted:
            return None
        most = min(self.num_speculative_tokens, self.room_on_target(1 + len(proposal)))
        if most <= 0:
            return None
        for source in self.sources:
            if present.guess is not None and source.name != present.guess.source:
                continue
            whole = source.guess(self.ledger.token_ids, 1 + most, proposal)
            if whole is None or len(whole.token_ids) == 1:
                continue
            if guess := self.policy.choose_guess([whole.behind_first()], most, 0):
                return Outcome(len(proposal), whole.token_ids[0]), guess
        return None

    def shortened(
        self, proposal: Proposal, outcome: Outcome, num_wanted: int, known: Proposal
    ) -> Proposal | None:
        """Cut a continuation from the draft to what the next round may have; None if it is useless."""
        most = min(num_wanted, self.room(outcome.num_accepted + 1))
        return shortened(proposal, most, self.vocabulary_size, known, self.shape(num_wanted))

    def _choose(self, most: int, round_number: int) -> int:
        unread = self.drafts.unread(self.ledger, round_number)
        self.chosen = self.policy.choose(
            min(most, self.num_speculative_tokens), unread, self.ledger.remaining
        )
        return self.chosen
