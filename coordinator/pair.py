"""What the sequences of a draft and a target share when K is chosen: costs, acceptance, agreement, probes.

A sequence that does not draft is probed now and then, at growing intervals, for few rounds, and not where
nothing could be gained; trials.py has what all of them try together. Pure: rounds are its clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.agreement import Agreement, Ballot
from coordinator.copying import Comparison, Copying
from coordinator.costs import Costs, RoundSeconds, bracket, least
from coordinator.habits import Habits, Kind
from coordinator.prompt_rows import PromptRows
from coordinator.trials import Trial, Trials

MEMORY = 500.0
"""Rounds after which the pair's acceptance has forgotten one."""
KIND_WEIGHT = 24.0
"""Judged tokens that what is known of all kinds of requests counts for, for one kind."""
CATCH_UP_SHARE = 0.2
"""Weight of the newest time for catching up."""
ALIKE = 0.1
"""Share by which the sequences of a trial may become more or fewer; one in any case."""
CATCHING_UP = 8
"""Where more than one in so many sequences is being read, nothing is measured."""
SETTLE, SETTLE_PLAIN = 2, 5
"""Rounds of each sequence after a change that still tell of the time before: passes queue, and sequences
that come out of drafting need longer until they share passes again."""
COPY_AGAIN = 64
"""Matches of one kind that are left unused, after which one is tried all the same."""
FRESH, FRESH_PLAIN = 2, 16
"""Verdicts for which what a round takes holds, or one of each sequence if they are more; without drafting
eight of each. Half as many in a trial, where every measurement tells."""
BETWEEN = 4
"""Sequences from which on one that is between two requests makes no other load: of five clients four are
there now and then, and what belongs together would be interrupted whenever one of them is."""
PATIENCE = 2
"""A trial for which so many times the verdicts came that it needs is none: hardly anybody takes part, for the
draft is gone, or its load was left and is met again."""
PROBE_FIRST, PROBE_LAST = 16, 512
"""Rounds of the pair between two probes; they double while probes find nothing."""
CROWD = 8
"""So many sequences are a crowd, twice as many two: what all of them do tells what one of them would find."""


@dataclass(slots=True)
class Pair:
    """One for all sequences of a coordinator."""

    max_draft: int
    costs: Costs = field(default_factory=Costs)
    prompts: PromptRows = field(default_factory=PromptRows)
    habits: Habits = field(default_factory=lambda: Habits.of_all(MEMORY))
    agreement: Agreement = field(init=False)
    sequences: int = 0
    """Those that verify rounds: they share passes."""
    choosing: int = 0
    """Of these, those whose K is chosen: they take part in trials."""
    load: int = 0
    """The bracket of costs that they are in."""
    drafting: int = 0
    """Draft tokens in the present rounds of all of them."""
    drafted: int = 0
    """Of these, those that were not copied."""
    yields: float = 0.0
    """Tokens that these rounds are expected to make."""
    catching_up: int = 0
    """Sequences of which the draft reads what it lacks."""
    prefilling: int = 0
    """Sequences whose prompt the target reads."""
    beginners: int = 0
    """Times that one began to draft after a plain round."""
    readings: int = 0
    """Times that one began to be read."""
    proposals: int = 0
    """Times that one had draft tokens verified that were not copied."""
    catch_up: float = 0.0
    """Seconds for which a draft worker computes for each token that it lacks of a sequence."""
    verdicts: int = 0
    """Rounds that were judged."""
    _kinds: dict[Kind, Habits] = field(default_factory=dict)
    _copies_left: dict[int, int] = field(default_factory=dict)
    """Matches left unused since one was tried, by the place of their kind."""
    _rounds: int = 0
    _settled_at: int = 0
    """Round from which on measurements count."""
    _probe_after: int = PROBE_FIRST
    _probed_at: int = -PROBE_FIRST
    _trials: dict[int, Trials] = field(default_factory=dict)
    _comparisons: dict[int, Comparison] = field(default_factory=dict)
    """Of rounds with copies and without, by load."""
    _seconds: RoundSeconds | None = None
    _knows_drafting: bool = False
    """Proposals were timed at this load or one next to it."""
    _votes: int = 0
    """Since it was last agreed."""
    _known_load: int = -1
    """That `_seconds` are of."""
    _old_at: int = 0
    """Verdicts from which on they are old."""

    def __post_init__(self) -> None:
        """Nobody is there yet."""
        self.habits.drafts.follow(self.max_draft)
        self.agreement = Agreement(self.max_draft)

    @property
    def size(self) -> int:
        """Sequences among which rounds are counted: at least the one that asks."""
        return max(self.sequences, 1)

    @property
    def choosers(self) -> int:
        """The same for rounds of trials."""
        return max(self.choosing, 1)

    @property
    def crowd(self) -> int:
        """Sequences, as their load counts them: with one that will be back."""
        return max(self.sequences, least(self.load))

    @property
    def crowds(self) -> float:
        """At least one. Of sixteen clients one is usually between two requests: parts of a crowd count."""
        return max(1.0, self.sequences / CROWD)

    @property
    def mean_draft(self) -> float:
        """Draft tokens a sequence."""
        return self.drafting / self.size

    @property
    def settled(self) -> bool:
        """False while times tell of a change: a trial begins or ends, or the workers read a lot.

        Nor do they tell what is on trial where not as many take part as when it began.
        """
        trial = self.trial
        others = trial is not None and abs(self.choosing - trial.size) > max(1, ALIKE * trial.size)
        return self._rounds >= self._settled_at and not self._reading and not others

    @property
    def _reading(self) -> bool:
        return self.catching_up + self.prefilling > self.sequences // CATCHING_UP

    @property
    def only_copies(self) -> int | None:
        """A number that stays while all rows of passes are plain ones or copies; None while some are not."""
        if self.catching_up or self.prefilling or self.drafted:
            return None
        return self.readings + self.proposals

    def read_much_since(self, readings: int) -> bool:
        """Whether a worker has begun to read more since then than is usual among so many."""
        return self.readings - readings > self.sequences // CATCHING_UP

    def habits_of(self, kind: Kind) -> Habits:
        """Of the requests of one kind."""
        if kind not in self._kinds:
            self._kinds[kind] = self.habits.some(MEMORY, KIND_WEIGHT)
        return self._kinds[kind]

    def count_round(self) -> None:
        """One sequence begins a round."""
        self._rounds += 1
        if self.load not in self._trials:
            self._trials[self.load] = Trials.of(self.choosers)
            self._settle()

    def rests(self, *, drafting: bool) -> bool:
        """Count a round for which nothing is to be decided: all do as they did, and no trial is due.

        False, and not counted, where something might be.
        """
        trials = self._trials.get(self.load)
        if trials is None or self.agreement.drafts is not drafting or not trials.rest(drafting):
            return False
        self._rounds += 1
        return True

    def begin_round(self) -> RoundSeconds | None:
        """Count it; what it takes with 0 to `max_draft` draft tokens, None while nothing is known of the
        target."""
        self.count_round()
        return self.round_seconds()

    def round_seconds(self) -> RoundSeconds | None:
        """What a round takes as things are; None while nothing is known of the target."""
        # A table costs as much as all the rest of a round here, and a few measurements hardly move it.
        if self.verdicts >= self._old_at or self.load != self._known_load or self._seconds is None:
            row = self.prompts.row or 0.0
            self._seconds = self.costs.round_seconds(self.crowd, self.max_draft, row)
            self._known_load = self.load
            self._old_at = self.verdicts + self._holds()
            self._knows_drafting = self.costs.knows_drafting(self.crowd)
            self._agree()
        return self._seconds

    def _holds(self) -> int:
        """Verdicts until what a round takes is asked again."""
        if self.trial is not None:
            return max(1, self.sequences // 2)
        if self.agreement.drafts or not self._knows_drafting:
            return max(FRESH, self.sequences)
        return max(FRESH_PLAIN, 8 * self.sequences)

    def vote(self, old: Ballot | None, new: Ballot | None) -> None:
        """A sequence joins, thinks otherwise, or leaves."""
        self.agreement.replace(old, new)
        self._votes += 1
        if 2 * self._votes >= self.sequences:
            self._agree()

    def _agree(self) -> None:
        self._votes = 0
        if self._knows_drafting and self._seconds is not None:
            self.agreement.revise(self._seconds)
        else:
            self.agreement.drafts = False

    def counts(self, change: int, *, choosing: bool) -> None:
        """Sequences come or go, whose K is chosen or not."""
        self.sequences += change
        self.choosing += change * choosing
        load = bracket(self.sequences)
        between = self.sequences >= BETWEEN and bracket(self.sequences + 1) == self.load
        if load != self.load and not between:
            self._no_comparison()
            self.load = load

    # ---- trials ------------------------------------------------------------------------------------

    @property
    def trial(self) -> Trial | None:
        """The one in progress at this load."""
        trials = self._trials.get(self.load)
        return trials.trial if trials is not None else None

    def schedule(self) -> None:
        """End a trial that is over, begin one that is due."""
        trials, size = self._trials[self.load], self.choosers
        if trials.step(self.agreement, size, known=self._knows_drafting, reading=self._reading):
            self._settle()
            self._old_at = 0
            if trials.trial is not None:
                rounds = trials.trial.most - trials.rounds
                trials.trial.patience = self.verdicts + PATIENCE * rounds * self.size // size
                self.costs.at(self.crowd).verdict.fade(trials.trial.num_draft)

    def _give_up_trial(self) -> None:
        """One that does not come to its end: while it lasts, much is not learned."""
        self._trials[self.load].give_up(self.choosers)
        self._settle()
        self._old_at = 0

    def _settle(self) -> None:
        """What is measured next still tells of what was before."""
        drafts = self.trial.num_draft > 0 if self.trial is not None else self.agreement.drafts
        self._settled_at = self._rounds + (SETTLE if drafts else SETTLE_PLAIN) * self.size

    def caught_up(self, seconds: float, tokens: int) -> None:
        """A draft has read a sequence of which it lacked so many tokens, and computed so long for that."""
        self.catch_up += (seconds / tokens - self.catch_up) * (CATCH_UP_SHARE if self.catch_up else 1.0)

    def spent(self, seconds: float, made: int) -> None:
        """A sequence whose K is chosen waited for a proposal or a verdict, which made so many tokens."""
        trial = self.trial
        if trial is not None:
            trial.seconds += seconds
            trial.made += made

    def judged(self) -> None:
        """Count a verdict."""
        self.verdicts += 1
        trial = self.trial
        if trial is not None and self.verdicts > trial.patience:
            self._give_up_trial()

    # ---- copies ------------------------------------------------------------------------------------

    @property
    def copying(self) -> Copying:
        """What all do about matches now, for the sake of what it tells."""
        comparison = self._comparisons.get(self.load)
        return comparison.copying if comparison is not None else Copying.USUAL

    def lasted(self, seconds: float, copied: int) -> None:
        """A round with so many copied tokens lasted so long, from one verdict to the next."""
        if self.sequences < CROWD:
            if self.sequences < CROWD - 1:
                self._no_comparison()
            return
        if self.drafted or self.agreement.drafts or self.trial is not None:
            self._no_comparison()
            return
        comparison = self._comparisons.setdefault(self.load, Comparison())
        found = comparison.judged(seconds, copied, self.sequences)
        if found is not None:
            self.costs.at(self.crowd).copies.compared(found)
            self._old_at = 0

    def _no_comparison(self) -> None:
        if self.load in self._comparisons:
            self._comparisons[self.load].interrupted(self.size)

    def tries_copy(self, match: int) -> bool:
        """A match is not expected to be of use; now and then it is tried, since text changes."""
        kind = self.habits.copies.kind(match)
        left = self._copies_left.get(kind, 0) + 1
        self._copies_left[kind] = left % COPY_AGAIN
        return left == COPY_AGAIN

    # ---- probes ------------------------------------------------------------------------------------

    @property
    def may_probe(self) -> bool:
        """One sequence at a time, and seldom while probes find nothing."""
        # One that drafts splits the passes of all of them.
        return self._rounds - self._probed_at >= self._probe_after * self.crowds**2

    def probing(self) -> None:
        """A probe begins."""
        self._probed_at = self._rounds

    def probed(self, *, useful: bool) -> None:
        """A probe has ended."""
        self._probe_after = PROBE_FIRST if useful else min(2 * self._probe_after, PROBE_LAST)
