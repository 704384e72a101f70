"""How many tokens to draft: the K that makes the most tokens per second. Pure; fed by what was measured.

All sequences of a pair of workers share passes, so one sequence's draft tokens cost the others time. With
E(K) the tokens that a round of this sequence is expected to make and T(K) the seconds of a round when
everybody drafts K, a sequence takes the K that maximises

    E(K) - price * T(K)        price: the tokens that a second makes for a sequence

That maximises the tokens per second of all of them together (Dinkelbach 1967; the goodput of Liu et al.
2024, "Optimizing speculative decoding for serving large language models using goodput"). Where all
sequences are alike it is the K with the highest E(K) / T(K). K = 0 is a legal answer.

E is estimated in acceptance.py and T in costs.py; member.py feeds them, and pair.py holds what sequences
share. docs/decisions/0017-k-by-measured-rounds.md says why it is done so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.acceptance import expected_tokens
from coordinator.member import CATCH_UP, PROBE_EVIDENCE, Member, Verification
from coordinator.pair import PROBE_FIRST

HYSTERESIS = 0.02
"""Share of a round's tokens by which another K must be better than the last one."""
ADVANTAGE = 0.02
"""Tokens of a round by which drafting must be better than plain decoding, which nothing can go wrong with."""
HORIZON = 64.0
"""Rounds in which catching up must pay for itself, if the sequence does not end before."""
TRIAL_CATCH_UP = 4
"""Rounds without draft tokens that a sequence may spend on catching up for a trial."""
PROBE_ROUNDS = 3
PROBE_DRAFT = 2
"""Draft tokens of a probe."""
PROBE_LAST = 256
"""Rounds of a sequence between two probes, at most; they double from PROBE_FIRST."""
PROBE_SHARE = 1 / 32
"""Share of a sequence's time that catching up for probes may take."""
HOPE = 0.9
"""Acceptance that a probe could find."""


class Policy(Protocol):
    """Chooses K for one sequence, and is told what came of it. Seconds are those the coordinator saw."""

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        """K of the next round, 0 to `most`. Called at most once a round.

        Args:
            most: tokens that could be used.
            lacking: tokens of the ledger that the draft worker does not have.
            remaining: tokens that the sequence may still generate.
        """

    def copy(self, match: int, most: int, drafting: int) -> int:
        """Tokens to copy from the sequence's own text, instead of having `drafting` drafted; may be 0.

        Args:
            match: tokens that agree with an earlier place of the text.
            most: tokens that could be used.
            drafting: what `choose` answered for this round; 0 also where there is no draft to ask.
        """

    def proposed(self, num_draft: int, seconds: float, lacking: int) -> None:
        """A proposal came from the draft, `seconds` after it was asked for: 0 when it had been foreseen."""

    def verifying(self, num_draft: int, *, prefills: bool, match: int = 0) -> None:
        """A proposal, maybe empty, is on its way to the target, which may have to prefill first.

        `match` is that of a proposal that was copied; 0 is the draft's.
        """

    def judged(self, num_draft: int, num_accepted: int, timing: Verification | None, match: int = 0) -> None:
        """A verdict came; without a timing where the target had to prefill first."""

    def leave(self) -> None:
        """The sequence has ended."""


@dataclass(slots=True)
class Fixed(Member):
    """The same K in every round; the pair learns from it all the same."""

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        """K, or what is of use of it."""
        self.pair.count_round()
        return self._asking(min(self.num_speculative_tokens, most), lacking)

    def copy(self, match: int, most: int, drafting: int) -> int:
        """As many, where they make more tokens in the time that the draft is not waited for."""
        k = min(self.num_speculative_tokens, most)
        if drafting:
            copied = expected_tokens(self.habits.of(match).rates(k))[-1]
            drafted = expected_tokens(self.habits.drafts.rates(drafting))[-1]
            share = self.pair.costs.draft_share(self.pair.sequences, drafting)
            if copied <= (1 - share) * drafted and not self._tries_copy(match):
                return 0
        return k


@dataclass(slots=True)
class Goodput(Member):
    """The K that makes the most tokens per second, up to `num_speculative_tokens`."""

    _last: int = -1
    """K by its merits, without trials, probes and the sequence's end; -1 before the first."""
    _off: int = 0
    """Rounds since it last drafted by its merits."""
    _probe_after: int = PROBE_FIRST
    _probe_left: int | None = None
    """Rounds still to come of the probe in progress."""
    _trial: int = -1
    """The trial it is part of, by its end."""
    _measures: bool = False
    """This round's K is not chosen by its merits."""

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        """Weigh what drafting is expected to give against what it costs everybody."""
        table = self.pair.begin_round()
        self._measures = False
        if table is None:
            return 0
        self.pair.schedule(table.whole)
        expected = expected_tokens(self.habits.drafts.rates(self.num_speculative_tokens))
        seconds = table.whole[: len(expected)]
        price = self._price(_best_rate(expected, seconds), seconds)
        k = self._last = self._by_merit(expected, seconds, price, lacking, remaining)
        if self._probe_left is not None and (k or not self._probe_left):
            self._end_probe(useful=k > 0)
        self._off = 0 if k else self._off + 1
        trial = self._join_trial(lacking, seconds)
        self._measures = trial is not None
        if trial is None:
            trial = k or self._probe(lacking, seconds, price)
            self._measures = trial != k
        return self._asking(min(trial, most), lacking)

    def copy(self, match: int, most: int, drafting: int) -> int:
        """Weigh what copying is expected to give against what was chosen."""
        measures, self._measures = self._measures, False
        table = self.pair.round_seconds()
        if measures or table is None:
            return 0
        rates = self.habits.of(match).rates(min(self.num_speculative_tokens, most))
        expected = expected_tokens(rates)
        drafted = expected_tokens(self.habits.drafts.rates(drafting))[-1]
        own = max(_best_rate(expected, table.verify), drafted / table.whole[drafting])
        price = self._price(own, table.whole)
        scores = [e - price * t for e, t in zip(expected, table.verify, strict=False)]
        k = max(range(len(scores)), key=scores.__getitem__)
        other = drafted - price * table.whole[drafting] if drafting else scores[0] + ADVANTAGE
        if k and scores[k] > other:
            return k
        return min(PROBE_DRAFT, len(rates)) if self._tries_copy(match) else 0

    def leave(self) -> None:
        """A probe that did not come to its end has found nothing."""
        if self._probe_left is not None:
            self._end_probe(useful=False)
        Member.leave(self)

    def _by_merit(
        self, expected: Sequence[float], seconds: Sequence[float], price: float, lacking: int, remaining: int
    ) -> int:
        if not self.pair.knows_drafting:
            return 0
        scores = [e - price * t for e, t in zip(expected, seconds, strict=True)]
        scores[0] += ADVANTAGE
        k = max(range(len(scores)), key=scores.__getitem__)
        if self._last >= 0 and scores[k] - scores[self._last] < HYSTERESIS * expected[self._last]:
            k = self._last
        if k and lacking > CATCH_UP:
            rounds = min(HORIZON, remaining / expected[k])
            if (scores[k] - scores[0]) * rounds < price * self.pair.catch_up * lacking:
                return 0
        return k

    def _price(self, own: float, seconds: Sequence[float]) -> float:
        """Tokens that a second makes for a sequence: the others as they are, this one at its best, `own`."""
        pair = self.pair
        others = pair.sequences - self._joined
        if others <= 0:
            return own
        made = (pair.yields - self._yield) / others
        present = _interpolated(seconds, (pair.drafting - self._in_flight) / others)
        return (others * made / present + own) / (others + 1)

    def _join_trial(self, lacking: int, seconds: Sequence[float]) -> int | None:
        """K of the trial in progress; None without one, or without this sequence."""
        trial, pair = self.pair.trial, self.pair
        if trial is None or trial.num_draft == 0:
            return None if trial is None else 0
        if self._trial != trial.until:
            if not trial.places:
                return None
            if lacking > CATCH_UP and pair.catch_up * lacking > TRIAL_CATCH_UP * seconds[0]:
                return None
            trial.places -= 1
            self._trial = trial.until
        return min(trial.num_draft, self.num_speculative_tokens)

    # ---- probes ------------------------------------------------------------------------------------

    def _probe(self, lacking: int, seconds: Sequence[float], price: float) -> int:
        """K of a probe; 0 while none is due."""
        most = min(PROBE_DRAFT, self.num_speculative_tokens)
        if self._probe_left is None:
            if not self._probe_is_due(most, lacking, seconds, price):
                return 0
            self.pair.probing()
            self.habits.drafts.fade(PROBE_EVIDENCE)
            self._probe_left = PROBE_ROUNDS
        self._probe_left -= 1
        return most

    def _probe_is_due(self, most: int, lacking: int, seconds: Sequence[float], price: float) -> bool:
        pair = self.pair
        if self._off < self._probe_after or not pair.may_probe:
            return False
        if lacking > CATCH_UP and pair.catch_up * lacking > PROBE_SHARE * self._off * seconds[0]:
            return False
        # With many sequences the best draft may be of no use: then nothing can be found.
        hoped = expected_tokens([HOPE] * most)
        return any(hoped[k] - 1 > price * (seconds[k] - seconds[0]) for k in range(1, most + 1))

    def _end_probe(self, *, useful: bool) -> None:
        self._probe_left, self._off = None, 0
        self._probe_after = PROBE_FIRST if useful else min(2 * self._probe_after, PROBE_LAST)
        self.pair.probed(useful=useful)


def _best_rate(expected: Sequence[float], seconds: Sequence[float]) -> float:
    """The most tokens per second; `seconds` may go on."""
    return max(e / t for e, t in zip(expected, seconds, strict=False))


def _interpolated(values: Sequence[float], at: float) -> float:
    """Between the two entries next to `at`; beyond the last one, on their line."""
    if len(values) == 1:
        return values[0]
    below = min(int(at), len(values) - 2)
    return values[below] + (at - below) * (values[below + 1] - values[below])
