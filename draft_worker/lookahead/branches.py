"""The branches of one sequence: drafts for the likely outcomes of the verification in progress.

After its proposal d1..dK of a round with a ledger of n tokens, the draft would idle until the verdict (a, t):
a draft tokens accepted, then t. Instead it feeds dK and ranks the possible t after every prefix d1..da by its
scores. (In coupled mode the scores include the target's own noise, so the guess is right whenever both models
agree.) It drafts K tokens for the likeliest outcomes, a few at a time, until the verdict arrives. If the
verdict is one of them, the proposal is ready: a hit.

If the drafter draws chains, the outcomes about as likely as the likeliest one share a call, and the call that
feeds dK continues with its own guess of the next token, which is usually the likeliest outcome of all. If
such guesses come true repeatedly, that branch grows by another round during the verification: its suffix.
When the outcome comes true, the draft of the round after it is ready too (`suffix`, `adopt_suffix`). Without
chains all branches share passes, and a finished one makes room for the next.

A branch draws with the noise of the round it foresees, so a proposal from a branch equals the one that would
have been drafted without it. No emitted token depends on branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draft_worker.drafters.interface import BranchRegion, BranchState, Drafter
from draft_worker.lookahead.fanout import MAX_RANK, WORTH_DRAFTING, FanOut, RankedOutcome
from draft_worker.sampling.draw import Drawn, NoiseTape
from draft_worker.sampling.partial_draft import PartialDraft
from paceline.core.messages import Continuations, DraftProposal
from paceline.core.types import Outcome, Proposal
from paceline.engine.scheduling.sequences import HeldSequence

MIN_PROPOSAL = 2
"""Number of tokens from which an unfinished continuation is worth verifying."""
SIMILAR = 0.2
"""An outcome shares a chain call with the likeliest one if it is at least this much as likely."""


@dataclass(slots=True, eq=False)
class DraftBranch:
    """One branch: the drafter's state of it, and its draft."""

    state: BranchState
    draft: PartialDraft
    extended: PartialDraft | None = None
    """The draft's tokens again, then the bonus that would follow them, then the draft of the next round."""

    @property
    def current(self) -> PartialDraft:
        """The draft whose tokens are being drawn, or were drawn last."""
        return self.draft if self.extended is None else self.extended


@dataclass(slots=True, eq=False)
class SequenceBranches:
    """The branches of one sequence while its verdict is awaited."""

    drafter: Drafter
    held: HeldSequence[DraftProposal]
    round: int
    drawn: list[Drawn]
    """The proposal that is being verified."""
    depth: int
    """Number of draft tokens of a branch."""
    tape: NoiseTape
    """Noise of K + 1 + `depth` positions from `base_length` on: of this and every possible next round."""
    fan_out: FanOut
    """Estimates the likelihood of outcomes."""
    chained: bool
    """True if the drafter draws chains of this sequence."""
    max_len: int
    """Maximum tokens of a branch."""
    min_likelihood: float = WORTH_DRAFTING
    """Least likelihood of an outcome that gets a branch."""
    outcomes: list[RankedOutcome] = field(init=False)
    """Outcomes without a branch yet, likeliest first."""
    region: BranchRegion = field(init=False)
    base_length: int = field(init=False)
    last_entry: DraftBranch | None = field(init=False)
    """Feeds dK and ranks the tokens after it; None once that is done, or if no outcome needs it."""
    bonus_guesses: tuple[int, ...] = ()
    branches: dict[Outcome, DraftBranch] = field(default_factory=dict)
    sent: dict[Outcome, int] = field(default_factory=dict)
    """Number of tokens of each branch that the coordinator has."""
    repeat_likelihood: float = 0.0
    """Likelihood that the likeliest outcome comes true twice in a row; 0 if it may not be drafted for."""
    _begun: set[tuple[int, int]] = field(default_factory=set)
    """Outcomes with a branch, by (accepted draft tokens, rank)."""
    _max_branches: int = field(init=False)
    """Number of branches that have room."""
    _bonus_pending: bool = field(init=False)
    """True if `last_entry` is also to be the branch of the likeliest bonus, and has not begun."""
    _after_draft: BranchState = field(init=False)
    """State after all tokens up to dK."""

    def __post_init__(self) -> None:
        """Raises ResourceExhaustedError if there is no room for branches."""
        session, k = self.held.session, len(self.drawn)
        fitting = (self.drafter.free_entries - 2) // self.depth - 1
        ranked = self.fan_out.ranked(self.margins, min_likelihood=self.min_likelihood)
        self.outcomes = ranked[: max(0, fitting)]
        self._max_branches = len(self.outcomes)
        self.region = self.drafter.fork(self.held, 2 + self.depth * (1 + self._max_branches))
        self.base_length = len(session.tokens)
        self._after_draft = self.region.branch(self.held.num_computed_tokens)
        ranks = {outcome.rank: outcome.likelihood for outcome in self.outcomes if outcome.accepted == k}
        # A round's uniforms belong to its base length: those of the next round do not continue this one's.
        self._bonus_pending = self.chained and self.tape.uniforms is None and 0 in ranks
        fits = self.base_length + k + 2 * self.depth + 2 <= self.max_len
        twice = ranks.get(0, 0.0) ** 2
        if self._bonus_pending and self.depth == k and fits and twice >= self.min_likelihood:
            self.repeat_likelihood = twice
        steps = k + 1 + (self.depth if self._bonus_pending else 0)
        draft = PartialDraft(
            session.params, tuple(session.tokens), steps, self.tape, list(self.drawn), self.held.grammar
        )
        self.last_entry = DraftBranch(self._after_draft, draft) if ranks else None

    @property
    def margins(self) -> list[float]:
        """Margins of the proposal's tokens."""
        return [d.margin for d in self.drawn]

    def guesses(self, accepted: int) -> tuple[int, ...]:
        """The likeliest next tokens after `accepted` draft tokens, best first."""
        if accepted == len(self.drawn):
            return self.bonus_guesses
        return self.drawn[accepted].others[:MAX_RANK]

    def accepted_by(self, ledger: Sequence[int]) -> int | None:
        """Number of draft tokens accepted by the verdict that led to this ledger.

        None if the ledger does not follow from a verdict on this proposal.
        """
        accepted = len(ledger) - self.base_length - 1
        if not 0 <= accepted <= len(self.drawn):
            return None
        grown = list(ledger[self.base_length : -1])
        return accepted if grown == [d.token_id for d in self.drawn[:accepted]] else None

    def rank(self, accepted: int, next_token: int) -> int | None:
        """Rank of a verdict's next token among the guesses; None if it is not among them."""
        guesses = self.guesses(accepted)
        return guesses.index(next_token) if next_token in guesses else None

    def next_branches(self, width: int) -> list[DraftBranch]:
        """The branches to draw on next: at most `width`, besides `last_entry`, which they wait for."""
        if width == 0:
            self.outcomes.clear()
            self.repeat_likelihood = 0.0
        unfinished = self._unfinished()
        # A cancelled chain is finished before others begin.
        return (
            unfinished
            if self.chained and unfinished
            else [*unfinished, *self._opened(width - len(unfinished))]
        )

    def _opened(self, free: int) -> list[DraftBranch]:
        """Branches for the likeliest outcomes; one place is kept for each whose token is not ranked yet."""
        opened: list[DraftBranch] = []
        later: list[RankedOutcome] = []
        branch = self._to_extend if free > 0 else None
        if branch is not None and (
            not self.outcomes or self.repeat_likelihood >= self.outcomes[0].likelihood
        ):
            return [self._extend(branch)]
        least = SIMILAR * self.outcomes[0].likelihood if self.chained and self.outcomes else 0.0
        for outcome in self.outcomes:
            if free <= 0 or outcome.likelihood < least:
                later.append(outcome)
            elif outcome.accepted == len(self.drawn) and self.last_entry is not None:
                later.append(outcome)
                free -= 1
                if self._bonus_pending:
                    opened.append(self.last_entry)
                    self._bonus_pending = False
            elif outcome.rank < len(guesses := self.guesses(outcome.accepted)):
                opened.append(self._open(outcome.accepted, guesses[outcome.rank], outcome.rank))
                free -= 1
        self.outcomes = later
        return opened

    @property
    def _to_extend(self) -> DraftBranch | None:
        """The branch of the likeliest outcome, if it is complete and worth the draft of another round."""
        if not (self.repeat_likelihood and self.bonus_guesses):
            return None
        branch = self.branches.get(Outcome(len(self.drawn), self.bonus_guesses[0]))
        return branch if branch is not None and branch.draft.complete else None

    def _extend(self, branch: DraftBranch) -> DraftBranch:
        """Let the branch continue as if its round were accepted too."""
        first, steps = branch.draft, 2 * self.depth + 1
        tape = NoiseTape.record(first.params, self.base_length + len(self.drawn) + 1, steps)
        branch.extended = PartialDraft(first.params, first.ledger, steps, tape, list(first.drawn))
        self.repeat_likelihood = 0.0
        return branch

    def _open(self, accepted: int, next_token: int, rank: int) -> DraftBranch:
        """A branch for an outcome."""
        self._begun.add((accepted, rank))
        session, k = self.held.session, self.depth
        prefix = [d.token_id for d in self.drawn[:accepted]]
        ledger = (*session.tokens[: self.base_length], *prefix, next_token)
        length = self.base_length + accepted
        everything = accepted == len(self.drawn)
        state = self._after_draft.cut(length) if everything else self.region.branch(length)
        tape = NoiseTape.record(session.params, length + 1, k)
        branch = DraftBranch(state, PartialDraft(session.params, ledger, k, tape, grammar=self.held.grammar))
        self.branches[Outcome(accepted, next_token)] = branch
        return branch

    def _unfinished(self) -> list[DraftBranch]:
        """Branches that have begun and are not complete."""
        first = [self.last_entry] if self.last_entry is not None and not self._bonus_pending else []
        return [*first, *(branch for branch in self.branches.values() if not branch.current.complete)]

    @property
    def wants_passes(self) -> bool:
        """True while there is anything to draft for."""
        return bool(self.outcomes) or self._to_extend is not None or bool(self._unfinished())

    def add_drawn(self, branch: DraftBranch, drawn: Iterable[Drawn]) -> None:
        """Add one or more drawn tokens to a branch."""
        branch.current.drawn.extend(drawn)
        if branch is self.last_entry:
            self._rank_bonus(branch)

    def _rank_bonus(self, fed: DraftBranch) -> None:
        """dK was fed: rank the tokens after it, and add a draft after the likeliest bonus, if any."""
        k = len(self.drawn)
        bonus, *after = fed.draft.drawn[k:]
        self.last_entry, self.bonus_guesses = None, (bonus.token_id, *bonus.others)
        self._after_draft = fed.state.cut(self.base_length + k)
        if fed.draft.k > k + 1:
            branch = self._open(k, bonus.token_id, 0)
            branch.state, branch.draft.drawn = fed.state, after
        # With uniforms of its own, the draft's margin does not predict the target's choice of the bonus.
        margin = bonus.margin if self.tape.uniforms is None else None
        likely = self.fan_out.ranked(self.margins, margin, self.min_likelihood)
        self.outcomes = [o for o in likely if (o.accepted, o.rank) not in self._begun]
        del self.outcomes[max(0, self._max_branches - len(self._begun)) :]

    def suffix(self, branch: DraftBranch) -> list[Drawn]:
        """The tokens drawn beyond a branch's draft, of which the first is the bonus after it."""
        return [] if branch.extended is None else branch.extended.drawn[self.depth :]

    def adopt_suffix(self, drawn: Sequence[Drawn], source: BranchState) -> None:
        """Take over the suffix of the branch that became this round's proposal: `last_entry` is then drawn.

        `source` is that branch's state. Nothing happens if no branch would begin with the suffix. Raises the
        drafter's errors, without any change.
        """
        branch = self.last_entry
        if not (self._bonus_pending and drawn and branch is not None):
            return
        count = min(len(drawn), 1 + self.depth)
        self.drafter.extend_branch(branch.state, source, count)
        self._bonus_pending = False
        self.add_drawn(branch, drawn[:count])

    def give_up(self, branch: DraftBranch) -> None:
        """Drop a branch whose logits are not a distribution."""
        if branch.extended is not None:
            branch.extended = None
            return
        if branch is self.last_entry:
            self.last_entry = None  # without guesses, its outcomes get no branches
        self.branches = {outcome: other for outcome, other in self.branches.items() if other is not branch}

    def continuations(self) -> Continuations | None:
        """Proposals that the coordinator does not have yet: of complete branches, or of a minimum length.

        A short proposal in time is worth more than a long late one, so each branch is sent up to twice. None
        if nothing is new, or if proposals carry distributions: those would be most of the traffic, and the
        branch still answers the next round without a pass.
        """
        new = {
            outcome: branch.draft
            for outcome, branch in self.branches.items()
            if len(branch.draft.drawn) > self.sent.get(outcome, 0) and self._worth_sending(outcome, branch)
        }
        self.sent.update((outcome, len(draft.drawn)) for outcome, draft in new.items())
        if not new or any(d.distribution for draft in new.values() for d in draft.drawn):
            return None
        session = self.held.session
        return Continuations(
            session.sequence_id,
            session.epoch,
            self.round,
            self.base_length,
            {outcome: Proposal(tuple(draft.token_ids)) for outcome, draft in new.items()},
        )

    def _worth_sending(self, outcome: Outcome, branch: DraftBranch) -> bool:
        first_time = outcome not in self.sent and len(branch.draft.drawn) >= MIN_PROPOSAL
        return branch.draft.complete or first_time
