"""Tokens that a round makes with each number of draft tokens: what was judged is dealt out again. Pure.

Whether the target takes a draft token depends on where it stands in the text, and hardly on the round that
proposed it. Easy stretches and hard ones alternate, so acceptance at a position of a proposal depends on K
itself: short proposals begin in the middle of an easy stretch more often than long ones, which end where it
ends. Counted by position, what 8 draft tokens show makes 4 of them look a tenth worse than they are, and
the other way round (docs/decisions/0043-the-same-text-with-every-k.md).

So the tokens of a text, which a draft got right or wrong, are dealt out one after the other into the rounds
that each K would have made of them: a round of K takes tokens up to the first wrong one, or K + 1, the last
of which nobody had to guess. Tokens per round with K are those dealt out over the rounds they filled.

The token after a proposal that was accepted whole was not guessed. It is presumed right as often as tokens
after right ones are: left out, easy stretches would seem shorter than they are, and more so the smaller K
is. Tokens of plain rounds are left out; they are many, and say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.acceptance import NEWCOMER, PRIOR_WEIGHT, expected_tokens, fade

AFTER_RIGHT = 10.0
"""Tokens after right ones that what others show of them counts for."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples spread evenly over [0, 1), in step with nothing that rounds do."""


@dataclass(slots=True)
class Replay:
    """Rounds that each K would have made of what was judged; newer ones count more."""

    memory: float
    """Verdicts after which an old one has lost its say."""
    prior: Replay | None = None
    """What the text of others is like, which learns from this one: all sequences of the pair, for one."""
    prior_weight: float = PRIOR_WEIGHT
    """Judged tokens that what is known beforehand counts for."""
    tokens: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    """Dealt out with 1, 2, … draft tokens, and the rounds that they filled."""
    begun: list[int] = field(default_factory=list)
    """Tokens of the round that each K is in; of one sequence only, since each has a text of its own."""
    observed: int = 0
    """Grows whenever something is learned."""
    followed: float = 0.0
    right: float = 0.0
    """Judged tokens after right ones, and how many of them were right."""
    _whole: bool = False
    """The last proposal was accepted whole."""
    _turn: float = 0.5

    def follow(self, most: int) -> None:
        """Deal out for up to so many draft tokens from now on."""
        missing = most - len(self.rounds)
        if missing > 0:
            self.tokens += [0.0] * missing
            self.rounds += [0.0] * missing

    def observe(self, num_draft: int, num_accepted: int) -> None:
        """Take in one verdict, here and in the priors."""
        self.follow(max(num_draft, len(self.prior.rounds) if self.prior is not None else 0))
        wrong = num_accepted < num_draft
        # The first token was judged after a right one if the proposal before it was accepted whole.
        right = num_accepted - (not self._whole)
        followed, right = max(right + wrong, 0), max(right, 0)
        self._whole, run = not wrong, num_accepted
        if self._whole:
            self._turn = (self._turn + GOLDEN) % 1
            run, wrong = (run + 1, False) if self._turn < self._after_right() else (run, True)
        tokens, rounds, begun = [], [], self.begun
        begun.extend([0] * (len(self.rounds) - len(begun)))
        for i, before in enumerate(begun):
            count, rest = divmod(before + run, i + 2)
            if wrong:
                # Where it would have come after a whole proposal, it ends that round all the same.
                count, rest = count + 1, -1
            tokens.append(before + run - rest)
            rounds.append(count)
            begun[i] = max(rest, 0)
        replay: Replay | None = self
        while replay is not None:
            replay._count(tokens, rounds, followed, right)
            replay = replay.prior

    def _count(self, tokens: Sequence[int], rounds: Sequence[int], followed: int, right: int) -> None:
        self.follow(len(rounds))
        self.observed += 1
        keep = 1 - 1 / self.memory
        self.followed, self.right = self.followed * keep + followed, self.right * keep + right
        for i, (more, count) in enumerate(zip(tokens, rounds, strict=True)):
            self.tokens[i] = self.tokens[i] * keep + more
            self.rounds[i] = self.rounds[i] * keep + count

    def fade(self, weight: float) -> None:
        """Let what was known count for at most `weight` tokens: it is long ago."""
        self.observed += 1
        self.prior_weight = min(self.prior_weight, weight)
        fade(self.tokens, self.rounds, weight)

    def expected(self, most: int) -> list[float]:
        """Tokens of a round with 0 to `most` draft tokens."""
        expected = [1.0]
        for share in self._rounds_a_token(most):
            # One draft token more never makes fewer tokens, and what few rounds say may say so.
            expected.append(max(expected[-1], 1 / share))
        return expected

    def _after_right(self) -> float:
        """How often a token is right after one that was."""
        prior = self.prior._after_right() if self.prior is not None else NEWCOMER
        return (AFTER_RIGHT * prior + self.right) / (AFTER_RIGHT + self.followed)

    def _rounds_a_token(self, most: int) -> list[float]:
        self.follow(most)
        if self.prior is not None:
            priors = self.prior._rounds_a_token(most)
        else:
            priors = [1 / made for made in expected_tokens([NEWCOMER] * most)[1:]]
        weight = self.prior_weight
        return [
            (weight * prior + rounds) / (weight + tokens)
            for prior, rounds, tokens in zip(priors, self.rounds, self.tokens, strict=False)
        ]
