"""Drafting ahead of the verdict: branches for the likely outcomes of the verification in progress.

After its proposal d1..dK of a round with a ledger of n tokens, the draft would idle until the verdict
(a, t): a draft tokens accepted, then t. Instead it feeds dK, ranks the possible t after every prefix
d1..da by the scores it draws by (in coupled mode those include the target's own noise, so its guess is
right whenever both models agree), and drafts K tokens for the likeliest outcomes, a few at a time in the
same passes; as one is finished the next one takes its place, for as long as the verdict is out. When the
verdict is one of them, the proposal is there already: a hit.

A branch draws with the noise of the round it foresees, so a proposal taken from a branch is the very one
that would have been drafted without it. What is emitted cannot depend on any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_worker.drafting import Drafting
from draft_worker.fanout import MAX_RANK
from draft_worker.propose import Drawn, NoiseTape
from paceline.core.messages import Continuations, DraftProposal
from paceline.core.types import Proposal
from paceline.engine.branches import BranchInput
from paceline.engine.holdings import Held
from paceline.kv import Branch, Branching

OF_USE = 2
"""Tokens from which on a continuation is worth verifying although it is not finished."""
Outcome = tuple[int, int]
"""(accepted draft tokens, next token)."""


@dataclass(slots=True, eq=False)
class Limb:
    """One branch: its entries and the tokens being drawn on it."""

    entries: Branch
    drafting: Drafting

    @property
    def next_input(self) -> BranchInput:
        """What the next pass feeds it."""
        return BranchInput(self.entries, self.drafting.newest)


@dataclass(slots=True, eq=False)
class Ahead:
    """The branches of one sequence while its verdict is out."""

    held: Held[DraftProposal]
    round: int
    drawn: list[Drawn]
    """The proposal that is being verified."""
    depth: int
    """Draft tokens of a branch."""
    tape: NoiseTape
    """Noise of K + 1 + `depth` positions from `base_length` on: of this round and of all that may follow."""
    outcomes: list[tuple[int, int]]
    """Without a branch yet, likeliest first: (accepted draft tokens, rank of the next token)."""
    region: Branching = field(init=False)
    base_length: int = field(init=False)
    last_entry: Limb | None = field(init=False)
    """Feeds dK and ranks what may follow it; None once that is done."""
    bonus_guesses: tuple[int, ...] = ()
    branches: dict[Outcome, Limb] = field(default_factory=dict)
    pushed: dict[Outcome, int] = field(default_factory=dict)
    """How many tokens of a branch the coordinator has."""
    _above: Branch = field(init=False)
    """All entries up to dK's."""

    def __post_init__(self) -> None:
        """Raises ResourceExhaustedError when there are no blocks for branches."""
        session, k = self.held.session, len(self.drawn)
        pool = self.held.table.pool
        fitting = (pool.free_blocks * pool.block_size - 1) // self.depth
        del self.outcomes[max(0, fitting) :]
        self.region = Branching(self.held.table, 1 + self.depth * len(self.outcomes))
        self.base_length = len(session.tokens)
        self._above = self.region.branch(self.held.table.length)
        drafting = Drafting(
            session.params, tuple(session.tokens), k + 1, self.tape, list(self.drawn), self.held.grammar
        )
        self.last_entry = Limb(self._above, drafting)

    def guesses(self, accepted: int) -> tuple[int, ...]:
        """The likeliest next tokens after `accepted` draft tokens, best first."""
        if accepted == len(self.drawn):
            return self.bonus_guesses
        return self.drawn[accepted].others[:MAX_RANK]

    def accepted_by(self, ledger: Sequence[int]) -> int | None:
        """How many draft tokens the verdict accepted that made the ledger this one.

        None when the ledger did not grow by a verdict on this proposal: the round went on without it.
        """
        accepted = len(ledger) - self.base_length - 1
        if not 0 <= accepted <= len(self.drawn):
            return None
        grown = list(ledger[self.base_length : -1])
        return accepted if grown == [d.token_id for d in self.drawn[:accepted]] else None

    def rank(self, accepted: int, next_token: int) -> int | None:
        """Where a verdict's next token stood among the guesses."""
        guesses = self.guesses(accepted)
        return guesses.index(next_token) if next_token in guesses else None

    def open_branches(self, width: int) -> None:
        """Begin branches for the likeliest outcomes, until `width` are in progress.

        A place is kept for an outcome whose token is not ranked yet.
        """
        if width == 0:
            self.outcomes.clear()
        free = width - len(self.unfinished())
        later: list[tuple[int, int]] = []
        for at, (accepted, rank) in enumerate(self.outcomes):
            if free <= 0:
                later += self.outcomes[at:]
                break
            if accepted == len(self.drawn) and self.last_entry is not None:
                later.append((accepted, rank))
                free -= 1
                continue
            guesses = self.guesses(accepted)
            if rank < len(guesses):
                self.branches[accepted, guesses[rank]] = self._branch(accepted, guesses[rank])
                free -= 1
        self.outcomes = later

    def _branch(self, accepted: int, next_token: int) -> Limb:
        session, k = self.held.session, self.depth
        prefix = [d.token_id for d in self.drawn[:accepted]]
        ledger = (*session.tokens[: self.base_length], *prefix, next_token)
        everything = accepted == len(self.drawn)
        entries = self.region.branch(self.base_length + accepted, self._above if everything else None)
        tape = self.tape.of_round_at(self.base_length, accepted + 1, session.params, k)
        return Limb(entries, Drafting(session.params, ledger, k, tape, grammar=self.held.grammar))

    def unfinished(self) -> list[Limb]:
        """What still needs passes."""
        first = [self.last_entry] if self.last_entry is not None else []
        return [*first, *(limb for limb in self.branches.values() if not limb.drafting.complete)]

    @property
    def wants_passes(self) -> bool:
        """True while there is anything to draft for."""
        return bool(self.outcomes) or bool(self.unfinished())

    def take(self, limb: Limb, token: Drawn) -> None:
        """Keep what was drawn on a limb."""
        if limb is self.last_entry:
            self.last_entry = None
            self.bonus_guesses = (token.token_id, *token.others)
        else:
            limb.drafting.drawn.append(token)

    def give_up(self, limb: Limb) -> None:
        """The limb's logits are no distribution."""
        if limb is self.last_entry:
            self.last_entry = None  # no guesses: its outcomes fall away
        self.branches = {outcome: other for outcome, other in self.branches.items() if other is not limb}

    def continuations(self) -> Continuations | None:
        """What is new for the coordinator to go on with: branches that are finished, or far enough.

        A short proposal in time is worth more than a long one that is late, so each branch is told of twice.
        None where nothing is new, and where proposals carry distributions: those would be most of the
        traffic, and the branch still answers the next round without a pass.
        """
        new = {
            outcome: limb.drafting
            for outcome, limb in self.branches.items()
            if len(limb.drafting.drawn) > self.pushed.get(outcome, 0)
            and (limb.drafting.complete or len(limb.drafting.drawn) == OF_USE)
        }
        self.pushed.update((outcome, len(drafting.drawn)) for outcome, drafting in new.items())
        if not new or any(d.distribution for drafting in new.values() for d in drafting.drawn):
            return None
        session = self.held.session
        return Continuations(
            session.sequence_id,
            session.epoch,
            self.round,
            self.base_length,
            {outcome: Proposal(tuple(drafting.token_ids)) for outcome, drafting in new.items()},
        )


@dataclass(slots=True)
class LookaheadCounts:
    """How often the verdict was foreseen."""

    rounds: int = 0
    """Rounds that followed a verdict a branch could have foreseen."""
    hits: int = 0
    """Those for which a branch was there, finished or not."""
