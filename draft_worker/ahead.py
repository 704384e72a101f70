"""Drafting ahead of the verdict: branches for the likely outcomes of the verification in progress.

After its proposal d1..dK of a round with a ledger of n tokens, the draft would idle until the verdict
(a, t): a draft tokens accepted, then t. Instead it feeds dK, ranks the possible t after every prefix
d1..da by the scores it draws by (in coupled mode those include the target's own noise, so its guess is
right whenever both models agree), and drafts K tokens for the likeliest outcomes, a few at a time, for as
long as the verdict is out. When the verdict is one of them, the proposal is there already: a hit.

Where the model draws chains by itself, those about as likely as the likeliest share a call, and the call that
feeds dK goes on with its own guess of what follows, which is mostly the likeliest outcome of all. Where such
guesses come true again and again, that branch grows by another round while the verdict is out: when it comes
true, what follows it is there too (`heir`, `inherit`). Elsewhere all share passes, and as one is finished the
next one takes its place.

A branch draws with the noise of the round it foresees, so a proposal taken from a branch is the very one
that would have been drafted without it. What is emitted cannot depend on any of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draft_worker.drafting import Drafting
from draft_worker.fanout import MAX_RANK, WORTH_DRAFTING, FanOut, RankedOutcome
from draft_worker.propose import Drawn, NoiseTape
from paceline.core.messages import Continuations, DraftProposal
from paceline.core.types import Outcome, Proposal
from paceline.engine.branches import BranchInput
from paceline.engine.scheduling.sequences import HeldSequence
from paceline.kv import Branch, Branching

OF_USE = 2
"""Tokens from which on a continuation is worth verifying although it is not finished."""
ALIKE = 0.2
"""An outcome shares a chain's call with the likeliest one if it is at least this much as likely."""


@dataclass(slots=True, eq=False)
class Limb:
    """One branch: its entries and the tokens being drawn on it."""

    entries: Branch
    drafting: Drafting
    beyond: Drafting | None = None
    """The next round's draft tokens again, what would follow all of them, and a proposal after that."""

    @property
    def newest(self) -> Drafting:
        """What is being drawn on it, or was drawn last."""
        return self.drafting if self.beyond is None else self.beyond

    @property
    def next_input(self) -> BranchInput:
        """What the next pass feeds it."""
        return BranchInput(self.entries, self.newest.newest)


@dataclass(slots=True, eq=False)
class Ahead:
    """The branches of one sequence while its verdict is out."""

    held: HeldSequence[DraftProposal]
    round: int
    drawn: list[Drawn]
    """The proposal that is being verified."""
    depth: int
    """Draft tokens of a branch."""
    tape: NoiseTape
    """Noise of K + 1 + `depth` positions from `base_length` on: of this round and of all that may follow."""
    fan_out: FanOut
    """Says which outcomes are likely."""
    chained: bool
    """The model draws its chains by itself."""
    max_len: int
    """Entries that any of it may have."""
    least: float = WORTH_DRAFTING
    """How likely an outcome with a branch is."""
    outcomes: list[RankedOutcome] = field(init=False)
    """Without a branch yet, likeliest first."""
    region: Branching = field(init=False)
    base_length: int = field(init=False)
    last_entry: Limb | None = field(init=False)
    """Feeds dK and ranks what may follow it; None once that is done, and where nobody asks."""
    bonus_guesses: tuple[int, ...] = ()
    branches: dict[Outcome, Limb] = field(default_factory=dict)
    """By (accepted draft tokens, next token)."""
    pushed: dict[Outcome, int] = field(default_factory=dict)
    """How many tokens of a branch the coordinator has."""
    further: float = 0.0
    """How likely the likeliest outcome is to come true twice in a row; 0 where nobody may draft for that."""
    _begun: set[tuple[int, int]] = field(default_factory=set)
    """Outcomes with a branch, by (accepted draft tokens, rank)."""
    _most: int = field(init=False)
    """Branches there is room for."""
    _goes_on: bool = field(init=False)
    """What feeds dK is to be the branch of the likeliest token after it as well, and has not begun."""
    _above: Branch = field(init=False)
    """All entries up to dK's."""

    def __post_init__(self) -> None:
        """Raises ResourceExhaustedError when there are no blocks for branches."""
        session, k = self.held.session, len(self.drawn)
        pool = self.held.table.pool
        fitting = (pool.free_blocks * pool.block_size - 2) // self.depth - 1
        self.outcomes = self.fan_out.ranked(self.margins, least=self.least)[: max(0, fitting)]
        self._most = len(self.outcomes)
        self.region = Branching(self.held.table, 2 + self.depth * (1 + self._most))
        self.base_length = len(session.tokens)
        self._above = self.region.branch(self.held.table.length)
        ranks = {outcome.rank: outcome.likelihood for outcome in self.outcomes if outcome.accepted == k}
        # Draws of a round belong to its place: those of the next round are not the ones after these.
        self._goes_on = self.chained and self.tape.uniforms is None and 0 in ranks
        fits = self.base_length + k + 2 * self.depth + 2 <= self.max_len
        if self._goes_on and self.depth == k and fits and ranks[0] ** 2 >= self.least:
            self.further = ranks[0] ** 2
        steps = k + 1 + (self.depth if self._goes_on else 0)
        drafting = Drafting(
            session.params, tuple(session.tokens), steps, self.tape, list(self.drawn), self.held.grammar
        )
        self.last_entry = Limb(self._above, drafting) if ranks else None

    @property
    def margins(self) -> list[float]:
        """Of the proposal's tokens."""
        return [d.margin for d in self.drawn]

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

    def next_limbs(self, width: int) -> list[Limb]:
        """What the next passes are for: at most `width` branches, and what they wait for."""
        if width == 0:
            self.outcomes.clear()
            self.further = 0.0
        limbs = self._unfinished()
        # A chain that was stopped is finished before others begin.
        return limbs if self.chained and limbs else [*limbs, *self._opened(width - len(limbs))]

    def _opened(self, free: int) -> list[Limb]:
        """Branches for the likeliest outcomes; a place is kept for one whose token is not ranked yet."""
        opened: list[Limb] = []
        later: list[RankedOutcome] = []
        limb = self._to_grow if free > 0 else None
        if limb is not None and (not self.outcomes or self.further >= self.outcomes[0].likelihood):
            return [self._grow(limb)]
        least = ALIKE * self.outcomes[0].likelihood if self.chained and self.outcomes else 0.0
        for outcome in self.outcomes:
            if free <= 0 or outcome.likelihood < least:
                later.append(outcome)
            elif outcome.accepted == len(self.drawn) and self.last_entry is not None:
                later.append(outcome)
                free -= 1
                if self._goes_on:
                    opened.append(self.last_entry)
                    self._goes_on = False
            elif outcome.rank < len(guesses := self.guesses(outcome.accepted)):
                opened.append(self._branch(outcome.accepted, guesses[outcome.rank], outcome.rank))
                free -= 1
        self.outcomes = later
        return opened

    @property
    def _to_grow(self) -> Limb | None:
        """The branch of the likeliest outcome, where it is done and worth another round's drafts."""
        if not (self.further and self.bonus_guesses):
            return None
        limb = self.branches.get(Outcome(len(self.drawn), self.bonus_guesses[0]))
        return limb if limb is not None and limb.drafting.complete else None

    def _grow(self, limb: Limb) -> Limb:
        """Draft on it as if its round were accepted too."""
        first, more = limb.drafting, 2 * self.depth + 1
        tape = NoiseTape.record(first.params, self.base_length + len(self.drawn) + 1, more)
        limb.beyond = Drafting(first.params, first.ledger, more, tape, list(first.drawn))
        self.further = 0.0
        return limb

    def _branch(self, accepted: int, next_token: int, rank: int) -> Limb:
        self._begun.add((accepted, rank))
        session, k = self.held.session, self.depth
        prefix = [d.token_id for d in self.drawn[:accepted]]
        ledger = (*session.tokens[: self.base_length], *prefix, next_token)
        everything = accepted == len(self.drawn)
        entries = self.region.branch(self.base_length + accepted, self._above if everything else None)
        tape = NoiseTape.record(session.params, self.base_length + accepted + 1, k)
        limb = Limb(entries, Drafting(session.params, ledger, k, tape, grammar=self.held.grammar))
        self.branches[Outcome(accepted, next_token)] = limb
        return limb

    def _unfinished(self) -> list[Limb]:
        """What was begun and still needs passes."""
        first = [self.last_entry] if self.last_entry is not None and not self._goes_on else []
        return [*first, *(limb for limb in self.branches.values() if not limb.newest.complete)]

    @property
    def wants_passes(self) -> bool:
        """True while there is anything to draft for."""
        return bool(self.outcomes) or self._to_grow is not None or bool(self._unfinished())

    def take(self, limb: Limb, drawn: Iterable[Drawn]) -> None:
        """Keep what was drawn on a limb, at least one token."""
        limb.newest.drawn.extend(drawn)
        if limb is self.last_entry:
            self._rank_bonus(limb)

    def _rank_bonus(self, limb: Limb) -> None:
        """dK was fed: what follows it is known, and what was drawn after that."""
        k = len(self.drawn)
        bonus, *after = limb.drafting.drawn[k:]
        self.last_entry, self.bonus_guesses = None, (bonus.token_id, *bonus.others)
        fed = limb.entries
        self._above = fed.cut(self.base_length + k)
        if limb.drafting.k > k + 1:
            branch = self._branch(k, bonus.token_id, 0)
            branch.entries, branch.drafting.drawn = fed, after
        # A draft's own draws say nothing of what the target makes of the bonus.
        sure = bonus.margin if self.tape.uniforms is None else None
        likely = self.fan_out.ranked(self.margins, sure, self.least)
        self.outcomes = [o for o in likely if (o.accepted, o.rank) not in self._begun]
        del self.outcomes[max(0, self._most - len(self._begun)) :]

    def heir(self, limb: Limb) -> list[Drawn]:
        """What was drawn beyond a branch, one token for each of its newest entries."""
        return [] if limb.beyond is None else limb.beyond.drawn[self.depth :]

    def inherit(self, drawn: Sequence[Drawn], slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """Take over what was drawn beyond this round's proposal before it was one, one token a slot.

        Returns which slots' entries are to be copied to which; none where nobody would ask for them.
        """
        limb = self.last_entry
        if not (self._goes_on and drawn and limb is not None):
            return [], []
        count, begun = min(len(drawn), 1 + self.depth), len(limb.entries.own)
        limb.entries.reserve(count)
        limb.entries.commit(count)
        self._goes_on = False
        self.take(limb, drawn[:count])
        return list(slots[:count]), limb.entries.own_slots()[begun:]

    def give_up(self, limb: Limb) -> None:
        """The limb's logits are no distribution."""
        if limb.beyond is not None:
            limb.beyond = None
            return
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
            and (
                limb.drafting.complete or (len(limb.drafting.drawn) >= OF_USE and outcome not in self.pushed)
            )
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
