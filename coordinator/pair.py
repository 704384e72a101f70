"""What the sequences of a draft and a target share when K is chosen: costs, acceptance, and experiments.

What is not done is not measured. So now and then the pair is put on trial, plain decoding where drafting
seems better and drafting where it does not, and a sequence that does not draft is probed. Both come at
growing intervals, for few rounds, and not where nothing could be gained. Pure: rounds are its clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.acceptance import Habits, Kind, expected_tokens
from coordinator.costs import Costs, RoundSeconds, bracket

MEMORY = 500.0
"""Rounds after which the pair's acceptance has forgotten one."""
KIND_WEIGHT = 24.0
"""Tokens at each position that what is known of all kinds of requests counts for, for one kind."""
CATCH_UP_SHARE = 0.2
"""Weight of the newest time for catching up."""
CATCHING_UP = 4
"""Where more than one in so many sequences is being read, nothing is measured."""
FIRST_TRIAL = 6
"""Rounds of each sequence before the first trial at a load."""
FEW = 3
"""Sequences by which a trial is longer than its sequences need: where few share a pass it tells less."""
SETTLE = 2
"""Rounds of each sequence after a change that still tell of the time before: passes queue."""
TRIAL_PLAIN, TRIAL_DRAFTING = 5, 6
"""Rounds of each sequence that a trial lasts. The draft must catch up before it shows what it can do."""
TRIAL_AGAIN, TRIAL_GROWTH, TRIAL_LAST = 64, 4, 1024
"""Rounds of each sequence between two trials: at first, how they grow, and at most."""
WORTH_FIRST, WORTH = 0.5, 0.75
"""What is expected to make less than this share of the best is not tried: at first, and again."""
TRIAL_DOUBT = 32
"""Rounds of each sequence after which it is asked whether something else became better without a trial,
and until there is one if so."""
CLOSE = 0.9
"""What makes this share of the best may soon be the better one: trials do not become rarer."""
COPY_AGAIN = 64
"""Matches of one kind that are left unused, after which one is tried all the same."""
FRESH = 2
"""Verdicts for which what a round takes holds, but in a trial, where every measurement tells."""
PROBE_FIRST, PROBE_LAST = 16, 512
"""Rounds of the pair between two probes; they double while probes find nothing."""
PROBE_CROWD = 8
"""Sequences from which on there are more rounds between probes: one that drafts splits a pass of many."""


@dataclass(slots=True)
class Trial:
    """A few rounds at another K than the best known one."""

    num_draft: int
    until: int
    """Round of its load."""
    places: int
    """Sequences that may still join; plain decoding has one for everybody."""


@dataclass(slots=True)
class _Trials:
    """When one load has its trials."""

    rounds: int = 0
    next: int = 0
    interval: int = TRIAL_AGAIN
    number: int = 0
    drafted: bool = False
    """Drafting was best when the last trial began or ended, or when it changed its mind since."""
    trial: Trial | None = None


@dataclass(slots=True)
class Pair:
    """One for all sequences of a coordinator."""

    max_draft: int
    costs: Costs = field(default_factory=Costs)
    habits: Habits = field(default_factory=lambda: Habits.of_all(MEMORY))
    sequences: int = 0
    """Those that verify rounds: they share passes."""
    drafting: int = 0
    """Draft tokens in the present rounds of all of them."""
    yields: float = 0.0
    """Tokens that these rounds are expected to make."""
    catching_up: int = 0
    """Sequences that a worker reads: the target prefills, or the draft catches up."""
    catch_up: float = 0.0
    """Seconds for each token that a draft worker lacks of a sequence."""
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
    _trials: dict[int, _Trials] = field(default_factory=dict)
    _seconds: RoundSeconds | None = None
    _known_at: tuple[int, int] = (-1, -1)

    @property
    def size(self) -> int:
        """Sequences among which rounds are counted: at least the one that asks."""
        return max(self.sequences, 1)

    @property
    def mean_draft(self) -> float:
        """Draft tokens a sequence."""
        return self.drafting / self.size

    @property
    def settled(self) -> bool:
        """False while times tell of a change: a trial begins or ends, or the workers read a lot."""
        return self._rounds >= self._settled_at and self.catching_up <= self.sequences // CATCHING_UP

    @property
    def knows_drafting(self) -> bool:
        """True once proposals were timed at this load or one next to it."""
        return self.costs.knows_drafting(self.sequences)

    def habits_of(self, kind: Kind) -> Habits:
        """Of the requests of one kind."""
        if kind not in self._kinds:
            self._kinds[kind] = self.habits.some(MEMORY, KIND_WEIGHT)
        return self._kinds[kind]

    def count_round(self) -> None:
        """One sequence begins a round."""
        self._rounds += 1
        load = bracket(self.sequences)
        if load not in self._trials:
            self._trials[load] = _Trials(next=FIRST_TRIAL * self.size)
            self._settle()

    def begin_round(self) -> RoundSeconds | None:
        """Count it; what it takes with 0 to `max_draft` draft tokens, None while nothing is known of the
        target."""
        self.count_round()
        return self.round_seconds()

    def round_seconds(self) -> RoundSeconds | None:
        """What a round takes as things are; None while nothing is known of the target."""
        load = bracket(self.sequences)
        # A table costs as much as all the rest of a round here, and a few measurements hardly move it.
        since = self.verdicts - self._known_at[1]
        stale = max(1 if self.trial is not None else FRESH, self.sequences // 8)
        if load != self._known_at[0] or since >= stale or self._seconds is None:
            self._seconds = self.costs.round_seconds(self.sequences, self.max_draft)
            self._known_at = load, self.verdicts
        return self._seconds

    # ---- trials ------------------------------------------------------------------------------------

    @property
    def trial(self) -> Trial | None:
        """The one in progress at this load."""
        trials = self._trials.get(bracket(self.sequences))
        return trials.trial if trials is not None else None

    def schedule(self, seconds: Sequence[float]) -> None:
        """End a trial that is over, begin one that is due."""
        trials = self._trials[bracket(self.sequences)]
        trials.rounds += 1
        if trials.trial is not None and trials.rounds >= trials.trial.until:
            trials.trial = None
            self._settle()
            best, _, share = self._best(seconds)
            if trials.number < 2:
                trials.interval = FIRST_TRIAL
            elif trials.number == 2 or share >= CLOSE or (best > 0) is not trials.drafted:
                trials.interval = TRIAL_AGAIN
            else:
                trials.interval = min(TRIAL_GROWTH * trials.interval, TRIAL_LAST)
            trials.next = trials.rounds + trials.interval * self.size
            trials.drafted = best > 0
        elif trials.trial is None and self._doubts(trials, seconds):
            # It has changed its mind without a trial: was that right?
            trials.drafted = not trials.drafted
            trials.next = min(trials.next, trials.rounds + TRIAL_DOUBT * self.size)
        if trials.trial is None and trials.rounds >= trials.next:
            self._begin_trial(trials, seconds)

    def _doubts(self, trials: _Trials, seconds: Sequence[float]) -> bool:
        """Now and then: does the model of costs contradict what the last trial found?"""
        due = trials.rounds % (TRIAL_DOUBT * self.size) == 0
        return due and (self._best(seconds)[0] > 0) is not trials.drafted

    def _begin_trial(self, trials: _Trials, seconds: Sequence[float]) -> None:
        best, rival, share = self._best(seconds)
        first, trials.number = trials.number < 2, trials.number + 1
        worth = share >= (WORTH_FIRST if first else WORTH) or (first and rival == 0)
        if not worth and self.knows_drafting:
            trials.next = trials.rounds + trials.interval * self.size
            return
        trials.drafted = best > 0
        each = TRIAL_DRAFTING if rival else TRIAL_PLAIN
        until = trials.rounds + each * (self.size if first else self.size + FEW)
        # Half of the sequences show what drafting costs, and spare the others the draft's catching up.
        places = (self.size + 1) // 2 if rival else self.size
        self.costs.at(self.sequences).verdict.fade(rival)
        self._settle()
        trials.trial = Trial(max(rival, min(2, self.max_draft)) if rival else 0, until, places)

    def _settle(self) -> None:
        """What is measured next still tells of what was before: passes queue."""
        self._settled_at = self._rounds + SETTLE * self.size

    def _best(self, seconds: Sequence[float]) -> tuple[int, int, float]:
        """The best K, the best one of the other kind (drafting or not), and the share the other makes."""
        if not self.knows_drafting:
            return 0, min(2, self.max_draft), 0.0
        expected = expected_tokens(self.habits.drafts.rates(self.max_draft))
        rates = [e / t for e, t in zip(expected, seconds, strict=True)]
        drafted = max(range(1, len(rates)), key=rates.__getitem__)
        best, rival = (drafted, 0) if rates[drafted] > rates[0] else (0, drafted)
        return best, rival, rates[rival] / rates[best]

    def caught_up(self, seconds: float) -> None:
        """A draft has caught up, and took so many seconds for each token that it lacked."""
        self.catch_up += (seconds - self.catch_up) * (CATCH_UP_SHARE if self.catch_up else 1.0)

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
        crowd = max(1, self.sequences // PROBE_CROWD)
        return self._rounds - self._probed_at >= self._probe_after * crowd

    def probing(self) -> None:
        """A probe begins."""
        self._probed_at = self._rounds

    def probed(self, *, useful: bool) -> None:
        """A probe has ended."""
        self._probe_after = PROBE_FIRST if useful else min(2 * self._probe_after, PROBE_LAST)
