"""When a pair is put on trial: a few rounds of what seems worse, for what is not done is not measured. Pure.

Plain decoding is tried where drafting seems better, drafting where it does not, and in turn with these,
or instead where they are far behind, another K that seems as good as the best one. That happens at growing
intervals, and not where nothing could be gained. All sequences take part: where only some draft, their
passes show what the mixture costs (agreement.py). Rounds are the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.agreement import Agreement

FIRST_TRIAL = 6
"""Rounds of each sequence before the first trial at a load."""
FEW = 3
"""Sequences by which a trial is longer than its sequences need: where few share a pass it tells less. Not
where it is seen to be far behind by then: one request alone would wait for three dozen plain rounds."""
TRIAL_PLAIN, TRIAL_DRAFTING = 9, 6
"""Rounds of each sequence that a trial lasts, those in which it settles included."""
TRIAL_WAITS = 12
"""Rounds of each sequence by which a trial of drafting is longer, at most, while drafts catch up for it."""
TRIAL_AGAIN, TRIAL_GROWTH, TRIAL_LAST = 64, 4, 1024
"""Rounds of each sequence between two trials: at first, how they grow, and at most."""
TRIAL_DRAFT = 2
"""Draft tokens of the first trials, at least: it is not known yet what would be better."""
SOON = 16
"""The same for early trials where one drafts and plain decoding comes close, which in a service's first
seconds seems slower than it turns out to be; and to the trial after a change of mind without one."""
WORTH_FIRST, WORTH = 0.5, 0.75
"""What is expected to make less than this share of the best is not tried: at first, and again."""
HOPELESS = 4096
"""Rounds of each sequence after the last trial in which drafting is tried all the same: what speaks against
it may be what a busy moment once told."""
TRIAL_DOUBT = 32
"""Rounds of each sequence after which it is asked whether something else became better without a trial."""
CLOSE = 0.9
"""What makes this share of the best may be the better one: trials of it come soon, and do not become rarer
by themselves."""
OFTEN, SELDOM = 2, 4
"""One in so many trials is between drafting and not; the others are of another K that is close. Seldom, but
sure, is plain decoding where it seems far behind: nothing can go wrong with it, and what it took is what is
known longest."""
EARLY, TRIAL_COST = 5, 0.01
"""Trials that come early, and the share of all rounds that later ones may cost, all that they bring with them
included: drafts read, and passes fall apart."""
AFTERMATH, SHARING = 4.0, 4
"""Rounds of each sequence that a trial of drafting costs so many or more that decode plainly afterwards: they
shared passes, and now come at different times until they end. Eight of them took a tenth longer."""
OVERHEAD_SHARE = 0.5
"""Weight of the newest trial in what trials bring with them."""


@dataclass(slots=True)
class Trial:
    """A few rounds at another K than the best known one."""

    num_draft: int
    until: int
    """Round of its load in which it ends where what came of it is far behind."""
    size: int = 1
    """Sequences that take part, when it began. With others it would compare passes of many with those of few.
    """
    longer: int = 0
    """Rounds that it lasts beyond that where it is not."""
    waits: int = 0
    """Rounds that it may still be longer."""
    patience: int = 0
    """Verdicts of its pair after which it is given up."""
    seconds: float = 0.0
    """That all its sequences waited, for proposals and verdicts."""
    made: int = 0
    """Tokens that came of it."""

    @property
    def most(self) -> int:
        """Round of its load in which it ends at the latest."""
        return self.until + self.longer + self.waits

    def ends(self, round_: int, rate: float) -> bool:
        """True where it is over, or plainly no match for `rate`, tokens per second of a sequence."""
        far_behind = self.made < WORTH * rate * self.seconds
        return round_ >= self.until + (0 if far_behind else self.longer)


@dataclass(slots=True)
class Trials:
    """Of one load."""

    next: int
    """Round of the next one."""
    doubts: int
    """Round in which it is asked whether things are as they were."""
    rounds: int = 0
    interval: int = TRIAL_AGAIN
    number: int = 0
    drafted: bool = False
    """Drafting was best when the last trial began or ended, or when it changed its mind since."""
    best: int = 0
    """The best K when the last trial began or ended."""
    unsure: bool = False
    """It has changed its mind without a trial: the next one is between drafting and not."""
    trial: Trial | None = None
    """The one in progress."""
    ended: int = 0
    """Round in which the last one ended."""
    overhead: float = 0.0
    """Rounds of each sequence that a trial of drafting costs besides what it is expected to make less, as the
    last ones did."""

    @classmethod
    def of(cls, size: int) -> Trials:
        """Of a load that has just been met."""
        return cls(size * FIRST_TRIAL, size * TRIAL_DOUBT)

    def rest(self, drafting: bool) -> bool:
        """Count a round where all draft as they did, or nobody does; False, and not counted, if something
        is due."""
        due = min(self.next, self.doubts)
        if self.trial is not None or self.drafted is not drafting or self.rounds + 1 >= due:
            return False
        self.rounds += 1
        return True

    def step(self, agreement: Agreement, size: int, *, known: bool, reading: bool) -> bool:
        """Count a round; True if a trial ended or began with it.

        Args:
            agreement: what seems best.
            size: sequences.
            known: drafting was measured at about this load.
            reading: drafts are catching up.
        """
        self.rounds += 1
        trial, ended = self.trial, False
        if trial is not None:
            if reading and trial.waits:
                trial.waits -= 1
                trial.until += 1
            if not trial.ends(self.rounds, max(agreement.rate, agreement.plain_rate)):
                return False
            ended = True
            self._end(agreement, size, known=known)
        elif self.rounds >= self.doubts:
            self.doubts = self.rounds + TRIAL_DOUBT * size
            self._doubt(agreement, size, known=known)
        # Beside prompts that are read it would say little.
        due = self.rounds >= self.next and not reading
        return (due and self._begin(agreement, size, known=known)) or ended

    def give_up(self, size: int) -> None:
        """End a trial of which nothing came, and begin it again later."""
        self.trial, self.number = None, self.number - 1
        self.ended, self.next = self.rounds, self.rounds + self.interval * size

    def _doubt(self, agreement: Agreement, size: int, *, known: bool) -> None:
        """Bring the next trial forward if things are not any more as they were at the last one."""
        if agreement.drafts is not self.drafted:
            # It has changed its mind without a trial: was that right?
            self.drafted, self.unsure = agreement.drafts, True
            self.next = min(self.next, self.rounds + SOON * size)
        elif self.number >= EARLY and (share := _share(agreement, known)) >= CLOSE:
            # Other requests came: what was far behind is close.
            other = 0 if agreement.drafts else agreement.num_draft
            wait = max(TRIAL_AGAIN, self._affordable(agreement, other, share, size))
            self.next = min(self.next, max(self.ended + wait * size, self.rounds))

    def _affordable(self, agreement: Agreement, num_draft: int, share: float, size: int) -> int:
        """Rounds of each sequence to the next trial, if it tries so many draft tokens, which make this share
        of the best."""
        cost = _expected_cost(num_draft, share, size)
        if num_draft and not agreement.drafts:
            cost += self.overhead + (AFTERMATH if size >= SHARING else 0.0)
        return min(int(cost / TRIAL_COST), TRIAL_LAST)

    def _end(self, agreement: Agreement, size: int, *, known: bool) -> None:
        assert self.trial is not None
        self.ended = self.rounds
        share = _share(agreement, known)
        if self.trial.num_draft and not agreement.drafts:
            self._learn_overhead(self.trial, agreement.plain_rate, share, size)
        found = (agreement.drafts, agreement.num_draft) != (self.drafted, self.best)
        if self.number < 2:
            self.interval = FIRST_TRIAL
        elif self._soon(agreement, share):
            self.interval = SOON
        elif self.interval < TRIAL_AGAIN or share >= CLOSE or found:
            self.interval = TRIAL_AGAIN
        else:
            self.interval = min(TRIAL_GROWTH * self.interval, TRIAL_LAST)
        if self.number >= EARLY:
            tried = self.trial.num_draft
            if agreement.drafts and tried:
                share = min(1.0, agreement.rates[tried] / agreement.rate)
            self.interval = max(self.interval, self._affordable(agreement, tried, share, size))
        self.trial = None
        self.next = self.rounds + self.interval * size
        self._remember(agreement)

    def _learn_overhead(self, trial: Trial, rate: float, share: float, size: int) -> None:
        """What a trial of drafting cost, beside plain decoding that makes `rate` tokens of a second."""
        lost = (trial.seconds * rate - trial.made) / size
        more = max(0.0, lost - _expected_cost(trial.num_draft, share, size))
        self.overhead += (more - self.overhead) * (OVERHEAD_SHARE if self.overhead else 1.0)

    def _soon(self, agreement: Agreement, share: float) -> bool:
        """True while plain decoding is to be tried again soon."""
        return agreement.drafts and self.number < EARLY and share >= CLOSE

    def _remember(self, agreement: Agreement) -> None:
        self.drafted, self.best = agreement.drafts, agreement.num_draft

    def _begin(self, agreement: Agreement, size: int, *, known: bool) -> bool:
        first = self.number < 2
        either = first or self.unsure or self._soon(agreement, _share(agreement, known))
        self.number, self.unsure = self.number + 1, False
        rival = self._rival(agreement, size, either=either, known=known)
        if rival is None:
            self.next = self.rounds + self.interval * size
            return False
        self._remember(agreement)
        length = _rounds(rival)
        longer = 0 if first else length * FEW
        waits = TRIAL_WAITS * size if rival else 0
        self.trial = Trial(rival, self.rounds + length * size, size, longer, waits)
        return True

    def _rival(self, agreement: Agreement, size: int, *, either: bool, known: bool) -> int | None:
        """K that might be better than what is done; None if none is worth it. `either`: drafting or not."""
        least = min(TRIAL_DRAFT, agreement.max_draft) if either else 1
        other = 0 if agreement.drafts else max(agreement.num_draft, least)
        if not known:
            # What was best at another load says little of this one.
            return 0 if agreement.drafts else min(TRIAL_DRAFT, agreement.max_draft)
        worth = _share(agreement, known) >= (WORTH_FIRST if either else WORTH)
        if not worth and not agreement.drafts and self.rounds - self.ended < HOPELESS * size:
            return None
        if either or self.number % (OFTEN if worth else SELDOM) == 0:
            return other
        return self._near(agreement) or (other if worth else None)

    def _near(self, agreement: Agreement) -> int | None:
        """Another K that seems nearly as good as the best one: of fewer draft tokens now and then, else of
        more. What is known of it may be of a time when all was slower, or only taken from others."""
        best, rates = agreement.num_draft, agreement.rates
        side = range(1, best) if self.number % SELDOM == SELDOM - 1 else range(best + 1, len(rates))
        near = max(side, key=rates.__getitem__, default=0)
        return near if near and rates[near] >= CLOSE * rates[best] else None


def _rounds(num_draft: int) -> int:
    """Of each sequence in a trial of so many draft tokens."""
    return TRIAL_DRAFTING if num_draft else TRIAL_PLAIN


def _expected_cost(num_draft: int, share: float, size: int) -> float:
    """Rounds of each sequence that a trial makes less, if it makes `share` of what is best."""
    return _rounds(num_draft) * (1 + FEW / size) * (1 - share)


def _share(agreement: Agreement, known: bool) -> float:
    """Of what the better one makes, what the other one does: drafting or not."""
    rates = agreement.plain_rate, agreement.rate
    return min(rates) / max(rates) if known and max(rates) else 0.0
