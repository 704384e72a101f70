"""One sequence's part in what its pair of workers shares: it reports what it sees, and what it does. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from coordinator.agreement import Ballot
from coordinator.costs import sampling, weight
from coordinator.habits import Habits, Kind
from coordinator.pair import Pair
from paceline.core.types import Timings

MEMORY = 200.0
"""Rounds after which a sequence's acceptance has forgotten one."""
OTHERS_WEIGHT = 40.0
"""Judged tokens that what is known of the other sequences counts for: a dozen rounds."""
PROBE_EVIDENCE = 3.0
"""Tokens a position that what is known counts for when something is tried again."""
CATCH_UP = 16
"""A draft that lacks more tokens than this is catching up: the time says little of drafting."""
APART = 2
"""Sequences up to which a proposal takes the time of its own tokens; those of more come together."""
STEADY = 0.1
"""Share by which the sequences, and the rows of all of them, may change during a round that is measured."""


@dataclass(frozen=True, slots=True)
class Verification:
    """How long a verdict took."""

    seconds: float
    """Since its round was sent."""
    rows: int
    """Of all sequences in the target's pass."""
    sequences: int
    """In that pass; at least 1."""
    prefill_rows: int = 0
    """Rows of prompts that the round waited for, in that pass and before it."""

    @classmethod
    def of(cls, seconds: float, timings: Timings) -> Verification | None:
        """None when the worker did not say what was in the pass."""
        if not timings.sequences:
            return None
        prefill_rows = timings.prefill_rows + timings.prefill_rows_before
        return cls(seconds, timings.rows, timings.sequences, prefill_rows)


@dataclass(slots=True)
class Member:
    """A sequence that learns, and lets the others learn; it does not choose."""

    chooses: ClassVar[bool] = False
    """Its K is chosen, so that it takes part in trials."""

    pair: Pair
    num_speculative_tokens: int
    kind: Kind = ("", 0)
    habits: Habits = field(init=False)
    _joined: bool = False
    _ballot: Ballot | None = None
    _in_flight: int = 0
    _drafted: int = 0
    """Draft tokens of its round, and those that were not copied."""
    _yield: float = 0.0
    _catching_up: bool = False
    """The draft reads what it lacks of it; the same for its prompt and the target."""
    _prefilling: bool = False
    _readings: int = 0
    """Of the pair, when the draft was asked."""
    _mean_draft: float = 0.0
    _sequences: int = 0
    """Draft tokens a sequence and sequences, when the round was sent."""
    _only_copies: int | None = None
    """Of the pair, when the round was sent."""
    _settled: bool = False
    """Times were worth measuring when it was sent; the same when the proposal was asked for."""

    def __post_init__(self) -> None:
        """A new sequence is expected to be like those of its kind before it."""
        self.habits = self.pair.habits_of(self.kind).some(MEMORY, OTHERS_WEIGHT)

    def asks(self, lacking: int) -> None:
        """A draft that reads what it lacks keeps others waiting: their times say little of drafting."""
        pair = self.pair
        self._is_catching_up(lacking > CATCH_UP)
        self._settled = self._settled and pair.settled
        self._readings = pair.readings

    def proposed(self, num_draft: int, seconds: float, lacking: int, prefill: float = 0.0) -> None:
        """Learn what drafting costs; from a draft that had to catch up, what that costs."""
        pair = self.pair
        if num_draft == 0:
            return
        self._spent(seconds, 0)
        load = pair.costs.at(pair.crowd)
        if lacking > CATCH_UP:
            pair.caught_up(prefill, lacking)
        elif self._settled and pair.settled and not (seconds and pair.read_much_since(self._readings)):
            load.proposed(num_draft, seconds, weight(pair.sequences))

    def verifying(self, num_draft: int, *, prefills: bool, match: int = 0) -> None:
        """This sequence's share of the rows in flight."""
        self._is_catching_up(False)
        self._is_prefilling(prefills)
        pair, drafted = self.pair, 0 if match else num_draft
        pair.proposals += drafted > 0
        self._share(True, num_draft, drafted, self._expected(num_draft, match))
        self._only_copies = pair.only_copies
        self._mean_draft, self._sequences, self._settled = pair.mean_draft, pair.sequences, pair.settled

    def judged(self, num_draft: int, num_accepted: int, timing: Verification | None, match: int = 0) -> None:
        """Learn what a verification takes, and what is accepted."""
        pair = self.pair
        self._is_prefilling(False)
        pair.judged()
        if timing is not None:
            self._spent(timing.seconds, num_accepted + 1)
            pair.lasted(timing.seconds, num_draft if match else 0)
            if pair.verdicts % sampling(pair.sequences) == 0:
                self._time(timing)
        if num_draft:
            self.habits.of(match).observe(num_draft, num_accepted)

    def _spent(self, seconds: float, made: int) -> None:
        if self.chooses:
            self.pair.spent(seconds, made)

    def _time(self, timing: Verification) -> None:
        """Learn what a verification takes, and what copies add to one without drafts."""
        pair = self.pair
        counts = self._settled and pair.settled
        share = min(1.0, weight(timing.sequences) * sampling(pair.sequences))
        mean = (self._mean_draft + pair.mean_draft) / 2
        # While everybody changes K, comes or goes, nobody knows what was in the pass.
        alike = abs(pair.mean_draft - mean) <= STEADY * (1 + mean)
        stay = abs(pair.sequences - self._sequences) <= STEADY * pair.sequences
        if alike and stay:
            # What prompts add is seen best while many are read, when nothing else counts.
            prompts = pair.prompts
            prompts.observe((pair.load, round(mean)), timing.prefill_rows, timing.seconds)
            seconds = prompts.without(timing.prefill_rows, timing.seconds)
            if counts and seconds is not None:
                pair.costs.at(pair.crowd).judged(mean, seconds, share, trial=pair.trial is not None)
        # Without drafts and prompts all of it is known, if all sequences share it.
        shared = counts and timing.sequences >= max(2, (1 - STEADY) * pair.sequences)
        if shared and self._only_copies is not None and self._only_copies == pair.only_copies:
            more = timing.rows / timing.sequences - 1
            pair.costs.at(pair.crowd).copied(more, timing.seconds, share)

    def _expected(self, num_draft: int, match: int) -> float:
        """Tokens of a round with so many draft tokens."""
        if self._ballot is not None and not match and num_draft < len(self._ballot.expected):
            return self._ballot.expected[num_draft]
        return self.habits.of(match).expected(num_draft)[-1]

    def _tries_copy(self, match: int) -> bool:
        """Copying does not seem worth it: is it tried all the same, and what comes of it believed?"""
        tries = self.pair.tries_copy(match)
        if tries:
            self.habits.of(match).fade(PROBE_EVIDENCE)
        return tries

    def waits(self) -> None:
        """It takes part in no pass until it is put again, and what it would be read for nobody waits for."""
        self._is_catching_up(False)
        self._is_prefilling(False)
        self._share(False, 0, 0, 0.0)

    def leave(self) -> None:
        """Give the share back."""
        self.waits()
        self._vote(None)

    def _vote(self, ballot: Ballot | None) -> None:
        self.pair.vote(self._ballot, ballot)
        self._ballot = ballot

    def _of_use(self, num_draft: int, most: int) -> int:
        """What is of use of `num_draft`."""
        pair = self.pair
        # Few tokens that end an answer are waited for as long as the many of the others in their passes.
        self._settled = pair.settled and (num_draft <= most or pair.sequences <= APART)
        return min(num_draft, most)

    def _is_catching_up(self, now: bool) -> None:
        self.pair.catching_up += now - self._catching_up
        self.pair.readings += now and not self._catching_up
        self._catching_up = now

    def _is_prefilling(self, now: bool) -> None:
        self.pair.prefilling += now - self._prefilling
        self.pair.readings += now and not self._prefilling
        self._prefilling = now

    def _share(self, present: bool, in_flight: int, drafted: int, expected: float) -> None:
        pair = self.pair
        if present is not self._joined:
            pair.counts(present - self._joined, choosing=self.chooses)
        pair.drafting += in_flight - self._in_flight
        pair.drafted += drafted - self._drafted
        pair.yields += expected - self._yield
        self._joined, self._in_flight, self._drafted, self._yield = present, in_flight, drafted, expected
