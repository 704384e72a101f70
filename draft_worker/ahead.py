"""Drafting ahead of the verdict: branches for the likely outcomes of the verification in progress.

After its proposal d1..dK of a round with a ledger of n tokens, the draft would idle until the verdict
(a, t): a draft tokens accepted, then t. Instead it feeds dK, ranks the possible t after every prefix
d1..da by the scores it draws by (in coupled mode those include the target's own noise, so its guess is
right whenever both models agree), and drafts K tokens for the likeliest outcomes, all in the same passes.
When the verdict is one of them, the proposal is there already: a hit.

A branch draws with the noise of the round it foresees, so a proposal taken from a branch is the very one
that would have been drafted without it. What is emitted cannot depend on any of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from draft_worker.drafting import Drafting
from draft_worker.fanout import MAX_RANK, FanOut
from draft_worker.propose import Drawn, NoiseTape
from paceline.core.errors import ResourceExhaustedError
from paceline.core.messages import Continuations, DraftProposal
from paceline.core.types import Proposal
from paceline.engine.holdings import Held
from paceline.engine.passes import Job
from paceline.engine.session import Session
from paceline.kv.table import BlockTable

Fork = Callable[[BlockTable], BlockTable]


@dataclass(slots=True)
class Ahead:
    """The branches of one sequence while its verdict is out."""

    held: Held[DraftProposal]
    round: int
    base_length: int
    drawn: list[Drawn]
    """The proposal that is being verified."""
    k: int
    vocabulary_size: int
    last_entry: Drafting | None
    """Feeds dK and ranks what may follow it; None once that is done."""
    bonus_guesses: tuple[int, ...] = ()
    branches: dict[tuple[int, int], Drafting] = field(default_factory=dict)

    def guesses(self, accepted: int) -> tuple[int, ...]:
        """The likeliest next tokens after `accepted` draft tokens, best first."""
        if accepted == len(self.drawn):
            return self.bonus_guesses
        return self.drawn[accepted].others[:MAX_RANK]

    def accepted_by(self, base_length: int) -> int | None:
        """How many draft tokens the verdict accepted that led to a ledger of `base_length` tokens.

        None when the ledger did not grow by a verdict on this proposal: the round went on without it.
        """
        accepted = base_length - self.base_length - 1
        if not 0 <= accepted <= len(self.drawn):
            return None
        grown = self.held.session.tokens[self.base_length : -1]
        return accepted if grown == [d.token_id for d in self.drawn[:accepted]] else None

    def rank(self, accepted: int, next_token: int) -> int | None:
        """Where a verdict's next token stood among the guesses."""
        guesses = self.guesses(accepted)
        return guesses.index(next_token) if next_token in guesses else None

    def open_branches(self, fan_out: FanOut, budget: int, fork: Fork, now: float) -> None:
        """Fork the cache for the likeliest outcomes; as many as find room."""
        for accepted, count in enumerate(fan_out.allocate(len(self.drawn), budget)):
            for next_token in self.guesses(accepted)[:count]:
                try:
                    self.branches[accepted, next_token] = self._branch(accepted, next_token, fork, now)
                except ResourceExhaustedError:
                    return

    def _branch(self, accepted: int, next_token: int, fork: Fork, now: float) -> Drafting:
        parent = self.held.session
        prefix = [d.token_id for d in self.drawn[:accepted]]
        kept = self.base_length + accepted
        table = fork(self.held.table)
        table.truncate_to(kept)
        session: Session[DraftProposal] = Session(
            f"{parent.sequence_id}/{self.base_length}/{accepted}/{next_token}",
            parent.epoch,
            parent.params,
            [*parent.tokens[: self.base_length], *prefix, next_token],
            parent.cached[:kept],
        )
        job = Job(Held(session, table), [next_token], rows=1, arrived=now)
        base = kept + 1
        return Drafting(
            job, base, self.k, NoiseTape.record(parent.params, base, self.k, self.vocabulary_size)
        )

    def unfinished(self) -> list[Drafting]:
        """What still needs passes."""
        first = [self.last_entry] if self.last_entry is not None else []
        return [*first, *(b for b in self.branches.values() if not b.complete)]

    def continuations(self) -> Continuations | None:
        """The finished branches, for the coordinator to go on with at once.

        None where there are none, and where proposals carry distributions: those would be most of the
        traffic, and the branch still answers the next round without a pass.
        """
        if not self.branches or any(d.distribution for b in self.branches.values() for d in b.drawn):
            return None
        session = self.held.session
        return Continuations(
            session.sequence_id,
            session.epoch,
            self.round,
            self.base_length,
            {outcome: Proposal(tuple(b.token_ids)) for outcome, b in self.branches.items()},
        )

    def take(self, accepted: int, next_token: int) -> Drafting | None:
        """The branch of the outcome that came true, if there is one; all others are freed."""
        taken = self.branches.pop((accepted, next_token), None)
        self.free()
        return taken

    def give_up(self, drafting: Drafting) -> None:
        """A branch, or the row the bonus guesses need, cannot be had."""
        if drafting is self.last_entry:
            self.last_entry = None
            return
        for outcome, branch in list(self.branches.items()):
            if branch is drafting:
                branch.job.held.table.free()
                del self.branches[outcome]

    def free(self) -> None:
        """Give all branches' blocks back."""
        for branch in self.branches.values():
            branch.job.held.table.free()
        self.branches.clear()
