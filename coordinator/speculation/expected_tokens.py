"""Expected tokens of a round for each K, learned from verdicts. Pure.

There are two estimators with the same methods: `observe` learns from a verdict, `expected` gives the tokens
of a round with each K, and `child` makes the estimator of one sequence from its pool's. `ReplayedAcceptance`
is for drafts, whose acceptance depends on the place in the text. `DepthAcceptance` is for proposals whose
acceptance depends on the depth in the proposal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR_RATE = 0.7
"""Acceptance assumed for a draft token of a pair of models without any verdicts."""
PRIOR_TOKENS = 24.0
"""Weight of the prior in judged tokens."""
MAX_RATE = 0.98
"""Upper bound of every estimated rate, since no sample shows that a position never fails."""
PRIOR_RUN = 10.0
"""Weight of the prior of `ReplayedAcceptance`, in judged tokens after an accepted one."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of the golden ratio modulo 1 are spread evenly over [0, 1)."""


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Tokens of a round with 0 to len(rates) draft tokens: 1 + a1 + a1 a2 + … (Leviathan et al., eq. 1)."""
    expected, reach = [1.0], 1.0
    for rate in rates:
        reach *= rate
        expected.append(expected[-1] + reach)
    return expected


@dataclass(slots=True)
class DepthAcceptance:
    """Acceptance rate at each depth of a proposal, given that the depth is reached."""

    memory: float
    """Verdicts after which an old one has lost 63 % of its weight."""
    prior: DepthAcceptance | None = None
    """The pool of a sequence: learns from this estimator, and supplies its prior."""
    prior_tokens: float = PRIOR_TOKENS
    prior_rate: float = PRIOR_RATE
    """Used without a `prior`."""
    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def observe(self, num_draft: int, num_accepted: int) -> None:
        """Learn from one verdict. Tokens after the first rejected one were not judged."""
        if self.prior is not None:
            self.prior.observe(num_draft, num_accepted)
        for counts in (self.reached, self.accepted):
            counts.extend([0.0] * (num_draft - len(counts)))
        keep = 1 - 1 / self.memory
        for depth in range(min(num_accepted + 1, num_draft)):
            self.reached[depth] = self.reached[depth] * keep + 1
            self.accepted[depth] = self.accepted[depth] * keep + (depth < num_accepted)

    def expected(self, most: int) -> list[float]:
        """Expected tokens of a round with 0 to `most` draft tokens."""
        return expected_tokens(self.rates(most))

    def rates(self, most: int) -> list[float]:
        """Acceptance rates at depths 0 to `most` - 1.

        The prior of a rarely reached depth comes from the pool, not from the depth before it: sequences that
        reach a depth are predicted well, and the pool's rate includes that.
        """
        priors = self.prior.rates(most) if self.prior is not None else None
        rates: list[float] = []
        before = self.prior_rate
        for depth in range(most):
            rate = priors[depth] if priors is not None else before
            if depth < len(self.reached):
                rate = self.prior_tokens * rate + self.accepted[depth]
                rate /= self.prior_tokens + self.reached[depth]
            before = min(rate, MAX_RATE)
            rates.append(before)
        return rates

    def fade(self, tokens: float) -> None:
        """Reduce the evidence at each depth to at most `tokens` judged tokens, because it is old."""
        _fade(self.reached, self.accepted, tokens)

    def child(self, memory: float, prior_tokens: float) -> DepthAcceptance:
        """The estimator of one sequence: this one supplies its prior and learns from it."""
        return DepthAcceptance(memory, self, prior_tokens)


@dataclass(slots=True)
class ReplayedAcceptance:
    """Tokens per round for every K, estimated by replaying judged tokens in rounds of each K.

    Acceptance of a draft token depends on its place in the text, and hardly on the round that proposed it.
    Easy and hard stretches alternate, so acceptance by depth depends on the K in use: long proposals end
    where an easy stretch ends, short ones begin in its middle. Counted by depth, rounds of K = 8 make K = 4
    look a tenth worse than it is. Therefore each judged token is replayed: a round of K takes tokens up to
    the first wrong one, or K + 1 tokens, the last of which needs no guess.

    The token after a fully accepted proposal was not guessed. It counts as right with the rate of tokens
    after right ones; without it, easy stretches would seem shorter than they are. Tokens of plain rounds are
    left out, since they say nothing about the draft.
    """

    memory: float
    """Verdicts after which an old one has lost 63 % of its weight."""
    prior: ReplayedAcceptance | None = None
    """The pool of a sequence: learns from this estimator, and supplies its prior."""
    prior_tokens: float = PRIOR_TOKENS
    tokens: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    """Entry k - 1: the number of replayed tokens, and of the rounds of K = k that they filled."""
    begun: list[int] = field(default_factory=list)
    """Tokens in the unfinished round of each K. Only a sequence's estimator has them: a pool follows no
    single text."""
    followed: float = 0.0
    right: float = 0.0
    """Judged tokens after right ones, and the number of right ones among them."""
    _all_accepted: bool = False
    """True if the last proposal was accepted whole."""
    _dither: float = 0.5

    def observe(self, num_draft: int, num_accepted: int) -> None:
        """Learn from one verdict, here and in the priors."""
        self._grow(max(num_draft, len(self.prior.rounds) if self.prior is not None else 0))
        wrong = num_accepted < num_draft
        # The first token follows a right one only if the previous proposal was accepted whole.
        right = num_accepted - (not self._all_accepted)
        followed, right = max(right + wrong, 0), max(right, 0)
        run, self._all_accepted = num_accepted, not wrong
        if not wrong:
            # A fixed sequence instead of random numbers decides on the token that was not guessed.
            self._dither = (self._dither + GOLDEN) % 1
            run, wrong = (run + 1, False) if self._dither < self._rate_after_right() else (run, True)
        tokens, rounds, begun = [], [], self.begun
        begun.extend([0] * (len(self.rounds) - len(begun)))
        for i, before in enumerate(begun):
            count, rest = divmod(before + run, i + 2)
            if wrong:
                # The wrong token ends a round. Directly after a full round it is a round of its own.
                count, rest = count + 1, -1
            tokens.append(before + run - rest)
            rounds.append(count)
            begun[i] = max(rest, 0)
        replay: ReplayedAcceptance | None = self
        while replay is not None:
            replay._count(tokens, rounds, followed, right)
            replay = replay.prior

    def _count(self, tokens: Sequence[int], rounds: Sequence[int], followed: int, right: int) -> None:
        self._grow(len(rounds))
        keep = 1 - 1 / self.memory
        self.followed, self.right = self.followed * keep + followed, self.right * keep + right
        for i, (more, count) in enumerate(zip(tokens, rounds, strict=True)):
            self.tokens[i] = self.tokens[i] * keep + more
            self.rounds[i] = self.rounds[i] * keep + count

    def expected(self, most: int) -> list[float]:
        """Expected tokens of a round with 0 to `most` draft tokens; never decreasing."""
        expected = [1.0]
        for share in self._rounds_per_token(most):
            expected.append(max(expected[-1], 1 / share))
        return expected

    def fade(self, tokens: float) -> None:
        """Reduce the evidence for each K to at most `tokens` judged tokens, because it is old."""
        _fade(self.tokens, self.rounds, tokens)

    def child(self, memory: float, prior_tokens: float) -> ReplayedAcceptance:
        """The estimator of one sequence: this one supplies its prior and learns from it."""
        return ReplayedAcceptance(memory, self, prior_tokens)

    def _grow(self, most: int) -> None:
        missing = most - len(self.rounds)
        if missing > 0:
            self.tokens += [0.0] * missing
            self.rounds += [0.0] * missing

    def _rate_after_right(self) -> float:
        prior = self.prior._rate_after_right() if self.prior is not None else PRIOR_RATE
        return (PRIOR_RUN * prior + self.right) / (PRIOR_RUN + self.followed)

    def _rounds_per_token(self, most: int) -> list[float]:
        self._grow(most)
        if self.prior is not None:
            priors = self.prior._rounds_per_token(most)
        else:
            priors = [1 / made for made in expected_tokens([PRIOR_RATE] * most)[1:]]
        weight = self.prior_tokens
        return [
            (weight * prior + rounds) / (weight + tokens)
            for prior, rounds, tokens in zip(priors, self.rounds, self.tokens, strict=False)
        ]


def _fade(counts: list[float], parts: list[float], most: float) -> None:
    for i, count in enumerate(counts):
        if count > most:
            parts[i] *= most / count
            counts[i] = most


Acceptance = DepthAcceptance | ReplayedAcceptance
