"""What the sequences of a pair do together: whether any drafts, and the K that suits them all. Pure.

Sequences share passes only while their rounds come at the same time. Where some draft and others do not,
or some draft 2 tokens and others 6, proposals arrive one after the other and the target's passes fall
apart: each costs a step, the draft works at the same time as the target, and everybody waits for passes
that it has no part in. Half of the sequences drafting is slower than all of them, and than none
(docs/benchmarks-first-pair.md, "Many requests"). A sequence that weighs its own K alone does not see that.

So each says what it would do if drafting were allowed, and what every K is expected to give it. Nobody
drafts where that makes more tokens of a second. Where drafting does, the K that is best for all of them
together is everybody's, but for those to whom another one gives a lot more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.costs import RoundSeconds
from coordinator.curves import ALMOST_NONE

ADVANTAGE = 0.04
"""Share by which drafting must be better than plain decoding. It makes that much less than its usual rounds
promise: drafts read prompts, and of the last rounds not all tokens are of use."""
WAVERING = 0.015
"""The same for a change of mind, on top of that."""
STEADY = 0.02
"""Share by which another K must be better than the one all have."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one sequence would do."""

    expected: Sequence[float]
    """Tokens of its round with 0, 1, 2, … draft tokens."""
    num_draft: int
    """Its K if drafting is allowed."""
    fixed: bool = False
    """It drafts as many, allowed or not."""


@dataclass(slots=True)
class Agreement:
    """Of all sequences that have a ballot in."""

    max_draft: int
    size: int = 0
    drafts: bool = False
    """Those draft that gain by it."""
    num_draft: int = 0
    """The K that is best for all together, were they to draft; 0 before anything is known."""
    plain_rate: float = 0.0
    """Tokens per second of a sequence if only those draft that do so anyway."""
    rate: float = 0.0
    """The same if all draft that gain by it."""
    rates: list[float] = field(default_factory=list)
    """The same if all draft 0, 1, 2, …"""
    _tokens: list[float] = field(init=False)
    """Sum over all sequences of what each K is expected to give."""
    _made: float = 0.0
    _drafted: int = 0
    """Sums of tokens and draft tokens of a round as all have it on their ballots."""
    _fixed: int = 0
    _fixed_made: float = 0.0
    _fixed_drafted: int = 0

    def __post_init__(self) -> None:
        """Nobody has said anything."""
        self._tokens = [0.0] * (self.max_draft + 1)

    def replace(self, old: Ballot | None, new: Ballot | None) -> None:
        """A sequence joins (no `old`), thinks otherwise, or leaves (no `new`)."""
        if old is not None:
            self._count(old, -1)
        if new is not None:
            self._count(new, 1)

    def revise(self, seconds: RoundSeconds) -> None:
        """Decide again, by what rounds take."""
        if not self.size:
            return
        size = self.size
        self.rates = [tokens / size / t for tokens, t in zip(self._tokens, seconds.whole, strict=True)]
        rates = self.rates
        best = max(range(1, len(rates)), key=rates.__getitem__, default=0)
        if not self.num_draft or rates[best] > (1 + STEADY) * rates[self.num_draft]:
            self.num_draft = best
        plain = size - self._fixed + self._fixed_made
        self.plain_rate = plain / size / _round(seconds, self._fixed_drafted / size)
        self.rate = rates[self.num_draft]
        mean = self._drafted / size
        if mean >= ALMOST_NONE:
            self.rate = max(self.rate, self._made / size / _round(seconds, mean))
        wavering = -WAVERING if self.drafts else WAVERING
        self.drafts = self.rate > self.plain_rate * (1 + ADVANTAGE + wavering)

    def _count(self, ballot: Ballot, sign: int) -> None:
        expected, tokens = ballot.expected, self._tokens
        last = len(expected) - 1
        for k in range(len(tokens)):
            tokens[k] += sign * expected[min(k, last)]
        made, drafted = sign * expected[ballot.num_draft], sign * ballot.num_draft
        self.size += sign
        self._made += made
        self._drafted += drafted
        if ballot.fixed:
            self._fixed += sign
            self._fixed_made += made
            self._fixed_drafted += drafted
        if not self.size:
            # What many additions leave behind ends here.
            self._made = self._fixed_made = 0.0
            self._tokens = [0.0] * len(tokens)


def _round(seconds: RoundSeconds, mean_draft: float) -> float:
    """Seconds of a round with so many draft tokens a sequence, which not all of them have alike."""
    if mean_draft < ALMOST_NONE:
        return seconds.whole[0]
    return interpolated(seconds.beside_drafts, mean_draft)


def interpolated(values: Sequence[float], at: float) -> float:
    """Between the two entries next to `at`; beyond the last one, on their line."""
    if len(values) == 1:
        return values[0]
    below = min(int(at), len(values) - 2)
    return values[below] + (at - below) * (values[below + 1] - values[below])
