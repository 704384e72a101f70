"""How many tokens to draft: the K that makes the most tokens per second. Pure; fed by what was measured.

All sequences of a pair of workers share passes, so one sequence's draft tokens cost the others time. With
E(K) the tokens that a round of this sequence is expected to make and T(K) the seconds of a round when
everybody drafts K, a sequence takes the K that maximises

    E(K) - price * T(K)        price: the tokens that a second makes for a sequence

That maximises the tokens per second of all of them together (Dinkelbach 1967; the goodput of Liu et al.
2024, "Optimizing speculative decoding for serving large language models using goodput"). Where all
sequences are alike it is the K with the highest E(K) / T(K). K = 0 is a legal answer.

Passes are shared only where sequences do the same, so they decide together whether any of them drafts, and
K differs from that of the others for a good reason only: agreement.py.

E is estimated in replay.py (of copies in acceptance.py) and T in costs.py; member.py feeds them, and pair.py
holds what sequences share. Why it is done so: docs/decisions/0017-k-by-measured-rounds.md,
0031-one-k-for-all-or-none.md and 0043-the-same-text-with-every-k.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from coordinator.acceptance import expected_tokens
from coordinator.agreement import ADVANTAGE, Ballot, interpolated
from coordinator.copying import Copying
from coordinator.costs import RoundSeconds
from coordinator.habits import COPIES
from coordinator.member import CATCH_UP, PROBE_EVIDENCE, Member, Verification
from coordinator.pair import CROWD, PROBE_FIRST

HYSTERESIS = 0.02
"""Share of a round's tokens by which another K must be better than the last one."""
ALONE = 0.05
"""Share by which it must be better than the K of all others: proposals that differ do not come together."""
REST = 3
"""Rounds for which a sequence does as before without thinking (so many for every four sequences, where it
decodes plainly), and matches of a kind that was not worth copying: where cores are full, thinking costs, and
a few verdicts hardly change what is known. What is due ends a rest. A crowd that decodes plainly looks for no
match in as many rounds after a look that found nothing worth copying: each waits for what is done for all the
others."""
RECONSIDER = 16
"""Rounds without drafting, times the crowds, after which a sequence thinks again all the same: the others may
have learned."""
TURNS, FEW_DRAFT = 4, 0.5
"""Sequences from which on there are two groups, and draft tokens of each up to which hardly any drafts."""
HORIZON = 64.0
"""Rounds in which catching up must pay for itself, if the sequence does not end before."""
PROBE_ROUNDS = 3
PROBE_DRAFT = 2
"""Draft tokens of a probe."""
PROBE_LAST = 256
"""Rounds of a sequence between two probes, at most; they double from PROBE_FIRST."""
PROBE_SHARE = 1 / 32
"""Share of a sequence's time that catching up for probes may take."""
HOPE = 0.9
"""Acceptance that a probe or a trial could find."""
HOPED = 0.5
"""Share of what a copied token is believed to cost, in rounds that find out whether it does."""


class Policy(Protocol):
    """Chooses K for one sequence, and is told what came of it. Seconds are those the coordinator saw."""

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        """K of the next round, 0 to `most`. Called at most once a round, maybe while the one before lasts.

        Args:
            most: tokens that could be used.
            lacking: tokens of the ledger that the draft worker does not have.
            remaining: tokens that the sequence may still generate.
        """

    def asks(self, lacking: int) -> None:
        """The draft is asked for a proposal, and lacks so many tokens of the ledger."""

    def looks(self) -> bool:
        """False where nothing would be copied, whatever the text: then no match is looked for."""

    def copy(self, match: int, most: int, drafting: int) -> int:
        """Tokens to copy from the sequence's own text, instead of having `drafting` drafted; may be 0.

        Args:
            match: tokens that agree with an earlier place of the text.
            most: tokens that could be used.
            drafting: what `choose` answered for this round; 0 also where there is no draft to ask.
        """

    def proposed(self, num_draft: int, seconds: float, lacking: int, prefill: float = 0.0) -> None:
        """A proposal came from the draft, `seconds` after it was asked for: 0 when it had been foreseen.

        Reading what it lacked took the worker `prefill` seconds, without those of what it read for others.
        """

    def verifying(self, num_draft: int, *, prefills: bool, match: int = 0) -> None:
        """A proposal, maybe empty, is on its way to the target, which may have to prefill first.

        `match` is that of a proposal that was copied; 0 is the draft's.
        """

    def judged(self, num_draft: int, num_accepted: int, timing: Verification | None, match: int = 0) -> None:
        """A verdict came; without a timing where the target had to prefill first."""

    def waits(self) -> None:
        """The round is not put, or was refused for want of room: until it is, the sequence is in no pass."""

    def leave(self) -> None:
        """The sequence has ended."""


@dataclass(slots=True)
class Fixed(Member):
    """The same K in every round; the pair learns from it all the same."""

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        """K, or what is of use of it."""
        pair, k = self.pair, min(self.num_speculative_tokens, self.pair.max_draft)
        pair.count_round()
        if self._ballot is None:
            self._vote(Ballot(self.habits.drafts.expected(k), k, fixed=True))
        return self._of_use(self.num_speculative_tokens, most)

    def looks(self) -> bool:
        """Every round."""
        return True

    def copy(self, match: int, most: int, drafting: int) -> int:
        """As many, where they make more tokens in the time that the draft is not waited for."""
        k = min(self.num_speculative_tokens, most)
        if drafting:
            copied = self.habits.of(match).expected(k)[-1]
            drafted = self.habits.drafts.expected(drafting)[-1]
            share = self.pair.costs.draft_share(self.pair.crowd, drafting)
            if copied <= (1 - share) * drafted and not self._tries_copy(match):
                return 0
        return k


@dataclass(slots=True)
class Goodput(Member):
    """The K that makes the most tokens per second, up to `num_speculative_tokens`."""

    chooses: ClassVar[bool] = True

    _seen: int = 0
    """Verdicts that the ballot knows of."""
    _off: int = 0
    """Rounds since it last drafted by its merits."""
    _reconsiders: int = 0
    """That many of these, and it thinks again without news."""
    _rest: int = 0
    """Rounds still to come without thinking."""
    _kept: int = 0
    """K of these."""
    _probe_after: int = PROBE_FIRST
    _probe_left: int | None = None
    """Rounds still to come of the probe in progress."""
    _measures: bool = False
    """This round's K is not chosen by its merits."""
    _copies_rest: list[int] = field(default_factory=lambda: [0] * len(COPIES))
    """By the kind of a match, how many more are left alone without thinking: they were not worth it."""
    _waited: bool = False
    """It begins to draft a round later than it could."""
    _looks_rest: int = 0
    """Rounds still to come in which no match is looked for."""

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        """Weigh what drafting is expected to give against what it costs everybody."""
        pair = self.pair
        self._measures = False
        kept = self._kept
        if self._rest and (not kept or lacking <= CATCH_UP) and pair.rests(drafting=kept > 0):
            self._rest -= 1
            if not kept:
                self._off += 1
                return 0
            self._off = 0
            return self._of_use(kept, most)
        table = pair.begin_round()
        if table is None:
            return 0
        # Among many a verdict of one changes little, and thinking takes time from all of them.
        drafts, ballot = self.habits.drafts, self._ballot
        news = drafts.observed - self._seen
        much = min(pair.sequences // CROWD, self._seen)
        if ballot is None or news > much or self._off >= self._reconsiders:
            self._seen, self._reconsiders = drafts.observed, self._off + int(RECONSIDER * pair.crowds)
            expected = drafts.expected(self.num_speculative_tokens)
            ballot = Ballot(expected, self._wish(expected, table.beside_drafts))
            self._vote(ballot)
        pair.schedule()
        k = ballot.num_draft if pair.agreement.drafts else 0
        if k and lacking > CATCH_UP and not self._repays(ballot, table, lacking, remaining):
            k = 0
        if self._probe_left is not None and (k or not self._probe_left):
            self._end_probe(useful=k > 0)
        self._off = 0 if k else self._off + 1
        trial = self._join_trial(lacking, remaining, table.whole[0])
        self._measures = trial is not None
        if trial is None:
            trial = k or self._probe(lacking, table.whole)
            self._measures = trial != k
        if trial and self._probe_left is None and self._waits_its_turn():
            self._rest = 0
            return 0
        rests = REST if trial else REST * max(pair.sequences // 4, 1)
        self._kept, self._rest = trial, 0 if self._measures else rests
        return self._of_use(trial, most)

    def _waits_its_turn(self) -> bool:
        """Where nearly all decoded plainly, every other sequence begins to draft a round later than the rest.

        Plain sequences share all passes. If all began at once, draft and target would wait for each other for
        many rounds; so two groups take turns from the beginning, as they do in the end.
        """
        pair, waited = self.pair, self._waited
        self._waited = False
        if not (waited or self._kept or pair.sequences < TURNS or pair.mean_draft > FEW_DRAFT):
            pair.beginners += 1
            self._waited = pair.beginners % 2 == 0
        return self._waited

    def looks(self) -> bool:
        """Among many that decode plainly, seldom while nothing is found that is worth copying."""
        if self._looks_rest:
            self._looks_rest -= 1
            return False
        if self.pair.copying is not Copying.USUAL:
            return self.pair.copying is Copying.MORE
        self._looks_rest = 0 if self._kept or self.pair.sequences < CROWD else REST
        return True

    def copy(self, match: int, most: int, drafting: int) -> int:
        """Weigh what copying is expected to give against what was chosen."""
        measures, self._measures = self._measures, False
        table, copying = self.pair.round_seconds(), self.pair.copying
        if measures or table is None or copying is Copying.NONE:
            return 0
        kind, most = self.habits.copies.kind(match), min(self.num_speculative_tokens, most)
        if self._copies_rest[kind]:
            self._copies_rest[kind] -= 1
        elif k := self._worth_copying(match, most, drafting, table):
            self._looks_rest = 0
            return k
        else:
            self._copies_rest[kind] = REST
        return min(PROBE_DRAFT, most) if self._tries_copy(match) else 0

    def _worth_copying(self, match: int, most: int, drafting: int, table: RoundSeconds) -> int:
        """Tokens to copy; 0 where what was chosen for this round is better."""
        expected = self.habits.of(match).expected(most)
        drafted = self.habits.drafts.expected(drafting)[-1]
        seconds = table.verify if drafting else table.copied
        if self.pair.copying is Copying.MORE:
            seconds = [seconds[0] + HOPED * (t - seconds[0]) for t in seconds]
        own = max(_best_rate(expected, seconds), drafted / table.whole[drafting])
        price = self._price(own, table.whole if drafting else seconds)
        scores = [e - price * t for e, t in zip(expected, seconds, strict=False)]
        k = max(range(len(scores)), key=scores.__getitem__)
        other = drafted - price * table.whole[drafting] if drafting else scores[0] + ADVANTAGE
        return k if scores[k] > other else 0

    def leave(self) -> None:
        """A probe that did not come to its end has found nothing."""
        if self._probe_left is not None:
            self._end_probe(useful=False)
        Member.leave(self)

    def _wish(self, expected: Sequence[float], seconds: Sequence[float]) -> int:
        """K beside others that draft."""
        agreement, before = self.pair.agreement, self._ballot
        others = agreement.size - (before is not None)
        price = (others * agreement.rate + _best_rate(expected, seconds)) / (others + 1)
        scores = [e - price * t for e, t in zip(expected, seconds, strict=False)]
        k = max(range(len(scores)), key=scores.__getitem__)
        usual = min(agreement.num_draft, len(scores) - 1)
        if others and usual and scores[k] - scores[usual] < ALONE * expected[usual]:
            return usual
        if before is not None and scores[k] - scores[before.num_draft] < HYSTERESIS * expected[k]:
            return before.num_draft
        return k

    def _repays(self, ballot: Ballot, table: RoundSeconds, lacking: int, remaining: int) -> bool:
        """Does drafting make up for the time of catching up, before the sequence ends?"""
        k, expected = ballot.num_draft, ballot.expected
        seconds, price = table.beside_drafts, self.pair.agreement.rate
        gain = expected[k] - 1 - price * (seconds[k] - seconds[0])
        return gain * min(HORIZON, remaining / expected[k]) >= price * self._catch_up(lacking)

    def _catch_up(self, lacking: int) -> float:
        """Seconds that sequences wait while the draft reads what this one lacks.

        Where all lack as much each of them waits for all. What it reads while the target reads it as well,
        it reads while it has nothing else to do.
        """
        return self.pair.catch_up * lacking * (1 if self._prefilling else self.pair.size)

    def _price(self, own: float, seconds: Sequence[float]) -> float:
        """Tokens that a second makes for a sequence: the others as they are, this one at its best, `own`."""
        pair = self.pair
        others = pair.sequences - self._joined
        if others <= 0:
            return own
        made = (pair.yields - self._yield) / others
        present = interpolated(seconds, (pair.drafting - self._in_flight) / others)
        return (others * made / present + own) / (others + 1)

    def _join_trial(self, lacking: int, remaining: int, plain: float) -> int | None:
        """K of the trial in progress; None without one, or where catching up for it would never repay."""
        trial = self.pair.trial
        if trial is None:
            return None
        k = min(trial.num_draft, self.num_speculative_tokens)
        if k and lacking > CATCH_UP:
            hoped = expected_tokens([HOPE] * k)[k]
            rounds = min(HORIZON, remaining / hoped)
            if (hoped - 1) * rounds * plain < self._catch_up(lacking):
                return None
        return k

    # ---- probes ------------------------------------------------------------------------------------

    def _probe(self, lacking: int, seconds: Sequence[float]) -> int:
        """K of a probe; 0 while none is due."""
        most = min(PROBE_DRAFT, self.num_speculative_tokens)
        if self._probe_left is None:
            if not self._probe_is_due(most, lacking, seconds):
                return 0
            self.pair.probing()
            self.habits.drafts.fade(PROBE_EVIDENCE)
            self._probe_left = PROBE_ROUNDS
        self._probe_left -= 1
        return most

    def _probe_is_due(self, most: int, lacking: int, seconds: Sequence[float]) -> bool:
        pair = self.pair
        if self._off < self._probe_after or not pair.may_probe:
            return False
        if lacking > CATCH_UP and pair.catch_up * lacking > PROBE_SHARE * self._off * seconds[0]:
            return False
        # With many sequences the best draft may be of no use: then nothing can be found.
        price = self._price(1 / seconds[0], seconds)
        hoped = expected_tokens([HOPE] * most)
        return any(hoped[k] - 1 > price * (seconds[k] - seconds[0]) for k in range(1, most + 1))

    def _end_probe(self, *, useful: bool) -> None:
        self._probe_left, self._off = None, 0
        self._reconsiders = int(RECONSIDER * self.pair.crowds)
        self._probe_after = PROBE_FIRST if useful else min(2 * self._probe_after, PROBE_LAST)
        self.pair.probed(useful=useful)


def _best_rate(expected: Sequence[float], seconds: Sequence[float]) -> float:
    """The most tokens per second; `seconds` may go on."""
    return max(e / t for e, t in zip(expected, seconds, strict=False))
